"""What is done to a run: ways to fail from within, faults from outside, and hard cases of health.

A family changes a :class:`Plan`, which the training loop follows. ``strength`` is what its ``knob`` says; where that is
a rate, in units of the subject's edge: the rate at which its slow ramp broke in the pilot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from stabilitylab.data import Batch

UPDATES, WARMUP = 400, 20
REFERENCE, FINE = 1 / 12, 1 / 4  # of the edge: the rate of twins, and one that is high but fine
FAULT = (100, 250)  # the rows between which something comes from outside
SHARD = 30  # batches of a corrupt shard
RAMP = 100  # updates in which the slow ramp multiplies the rate by e
CLIMB = 150  # updates of a climb to a rate that may be too high: failures that nothing could precede teach nothing

Kind = Literal["endogenous", "exogenous", "healthy"]


@dataclass
class Plan:
    """What one run does. Rates in absolute numbers; ``at``: the row at which something begins, None: from the start."""

    rate: Callable[[int], float]
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    decay: float = 0.01
    query_key: float = 1.0  # factor of the updates of queries' and keys' matrices
    embedding: float = 1.0  # factor of the embedding at initialisation
    half: Literal["", "bf16", "fp16"] = ""
    loss_scale: float = 1.0  # of fp16
    order: int = 0  # added to the seed of the batches' order
    accumulate: Callable[[int], int] = lambda row: 1
    batch: Callable[[int, Batch, int], Batch] = lambda row, batch, vocab: batch
    which: Callable[[int], int] = lambda row: row  # the batch that a row takes
    gradients: Callable[[int, list[nn.Module]], None] = lambda row, layers: None
    zero: Callable[[int], bool] = lambda row: True  # whether gradients are forgotten after this row
    summed: bool = False  # whether the losses of several batches are added and not averaged
    at: int | None = None


Change = Callable[[Plan, float, float, int], None]  # plan, edge, strength, seed


@dataclass(frozen=True)
class Family:
    """``levels``: strengths that the pilot tries, from mild to severe; ``knob``: what strength means."""

    name: str
    kind: Kind
    knob: str
    levels: tuple[float, ...]
    change: Change
    title: str


FAMILIES: dict[str, Family] = {}
_RATES = (0.35, 0.7, 1.4, 2.8)
_ANY = (1.0,)


def _family(kind: Kind, knob: str, levels: tuple[float, ...]) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        name = change.__name__
        FAMILIES[name] = Family(name, kind, knob, levels, change, (change.__doc__ or "").strip())
        return change

    return register


def plan(family: str, edge: float, strength: float, seed: int) -> Plan:
    """The plan of a run: the reference, changed by its family."""
    made = Plan(rate=constant(REFERENCE * edge))
    FAMILIES[family].change(made, edge, strength, seed)
    return made


def constant(rate: float, warmup: int = WARMUP) -> Callable[[int], float]:
    """Linear warm-up, then the rate."""
    return lambda row: rate * min(1.0, (row + 1) / max(warmup, 1))


def climbing(rate: float, edge: float) -> Callable[[int], float]:
    """The reference rate after the usual warm-up, and from there in 150 updates, linearly, another."""
    usual = constant(REFERENCE * edge)
    return lambda row: usual(row) + (rate - REFERENCE * edge) * min(max(row - WARMUP, 0) / CLIMB, 1.0)


def begins(seed: int) -> int:
    """The row of a fault from outside, by its seed."""
    return int(np.random.default_rng([seed, 77]).integers(*FAULT))


# Ways to fail from within


@_family("endogenous", "rate", _RATES)
def rate(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """The learning rate is too high, after the usual warm-up."""
    plan.rate = constant(strength * edge)


@_family("endogenous", "rate at the end of the ramp", (0.5, 1.0, 2.0, 4.0))
def ramp(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """The learning rate grows by e in 100 updates, up to a last value."""
    start = strength * edge / math.exp((UPDATES - 100) / RAMP)
    plan.rate = lambda row: start * min(1.0, (row + 1) / WARMUP) * math.exp(min(row, UPDATES - 100) / RAMP)


@_family("endogenous", "rate", _RATES)
def no_warmup(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """There is no warm-up."""
    plan.rate = constant(strength * edge, 0)


@_family("endogenous", "rate", _RATES)
def slow_moment(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """beta_2 is .9999: the second moment lags, while the rate climbs."""
    plan.betas, plan.rate = (0.9, 0.9999), climbing(strength * edge, edge)


@_family("endogenous", "rate", _RATES)
def fast_moment(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """beta_2 is .9: the second moment is noisy, while the rate climbs."""
    plan.betas, plan.rate = (0.9, 0.9), climbing(strength * edge, edge)


@_family("endogenous", "rate", _RATES)
def tiny_eps(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """Adam's eps is 1e-15, while the rate climbs."""
    plan.eps, plan.rate = 1e-15, climbing(strength * edge, edge)


@_family("endogenous", "factor of the updates of queries and keys", (2.0, 6.0, 18.0, 54.0))
def attention_growth(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """Queries and keys learn faster than the rest, so that attention logits grow."""
    plan.query_key, plan.rate = strength, constant(FINE * edge)


@_family("endogenous", "rate", _RATES)
def no_decay(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """No weight decay, while the rate climbs and stays high."""
    plan.decay, plan.rate = 0.0, climbing(strength * edge, edge)


@_family("endogenous", "rate", _RATES)
def bf16_weights(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """Weights are kept in bfloat16 (emulated: rounded after each update), while the rate climbs."""
    plan.half, plan.rate = "bf16", climbing(strength * edge, edge)


@_family("endogenous", "loss scale", (2.0**14, 2.0**18, 2.0**22, 2.0**26))
def fp16_scale(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """Gradients of activations pass through float16 with a static loss scale (emulated), at a high but fine rate."""
    plan.half, plan.loss_scale, plan.rate = "fp16", strength, constant(FINE * edge)


@_family("endogenous", "factor of the embedding", (4.0, 16.0, 64.0, 256.0))
def embedding_scale(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """The embedding is initialised too large."""
    plan.embedding, plan.rate = strength, constant(FINE * edge)


# Faults from outside: what the pipeline does to a run that would be well


def noise(row: int, batch: Batch, vocab: int, seed: int) -> Batch:
    """Real tokens replaced by any, inputs and labels."""
    random = torch.Generator().manual_seed(seed * 100_003 + row)

    def any_token(ids: Tensor) -> Tensor:
        return torch.where(ids > 3, torch.randint(4, vocab, ids.shape, generator=random), ids)

    inputs = {name: any_token(ids) if ids.dtype == torch.int64 else ids for name, ids in batch.inputs.items()}
    return Batch(inputs, any_token(batch.labels), batch.weight, batch.tokens, batch.masks)


def other_labels(row: int, batch: Batch, vocab: int, seed: int) -> Batch:
    """The labels of another sentence of the batch, where both are real."""
    return Batch(
        batch.inputs, batch.labels.roll(1, 0), batch.weight * batch.weight.roll(1, 0), batch.tokens, batch.masks
    )


def _spoil(plan: Plan, seed: int, change: Callable[[int, Batch, int, int], Batch], rows: int) -> None:
    start = plan.at = begins(seed)
    plan.batch = lambda row, batch, vocab: change(row, batch, vocab, seed) if 0 <= row - start < rows else batch


def middle_scaled(start: int, factor: float) -> Callable[[int, list[nn.Module]], None]:
    """Return what multiplies the gradients of the middle layer from a row on."""

    def scale(row: int, layers: list[nn.Module]) -> None:
        if row >= start:
            for parameter in layers[len(layers) // 2].parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    return scale


@_family("exogenous", "-", _ANY)
def corrupt_batch(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """One batch of random tokens."""
    _spoil(plan, seed, noise, 1)


@_family("exogenous", "-", _ANY)
def corrupt_shard(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """Thirty batches of random tokens."""
    _spoil(plan, seed, noise, SHARD)


@_family("exogenous", "-", _ANY)
def shuffled_labels(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """From a row on labels belong to another sentence."""
    _spoil(plan, seed, other_labels, UPDATES)


@_family("exogenous", "-", _ANY)
def repeated_batch(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """From a row on every batch is the same one."""
    start = plan.at = begins(seed)
    plan.which = lambda row: min(row, start)


@_family("exogenous", "factor of the rate", (4.0, 16.0))
def rate_jump(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """The rate jumps, as after a resume with other settings."""
    start = plan.at = begins(seed)
    usual = plan.rate
    plan.rate = lambda row: usual(row) * (strength if row >= start else 1.0)


@_family("exogenous", "-", _ANY)
def frozen_layer(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """From a row on a middle layer gets no gradient."""
    start = plan.at = begins(seed)

    def freeze(row: int, layers: list[nn.Module]) -> None:
        if row >= start:
            for parameter in layers[len(layers) // 2].parameters():
                parameter.grad = None

    plan.gradients = freeze


@_family("exogenous", "factor of the gradient", (30.0, 1000.0))
def scaled_layer(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """From a row on the gradients of a middle layer are multiplied."""
    plan.at = begins(seed)
    plan.gradients = middle_scaled(plan.at, strength)


@_family("exogenous", "-", _ANY)
def missing_zero_grad(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """From a row on gradients are not forgotten, but added up."""
    start = plan.at = begins(seed)
    plan.zero = lambda row: row < start


# Health, plain and hard


@_family("healthy", "-", _ANY)
def twin(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """The same model, batches and seed at the reference rate."""


@_family("healthy", "-", _ANY)
def rewarmed(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """The rate falls to a tenth and comes back in fifty updates."""
    start = begins(seed)
    usual = constant(FINE * edge)
    plan.rate = lambda row: usual(row) * (min(1.0, 0.1 + 0.9 * (row - start) / 50) if row >= start else 1.0)


@_family("healthy", "-", _ANY)
def larger_batch(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """From a row on a batch has four times as many sentences."""
    start = begins(seed)
    plan.accumulate = lambda row: 4 if row >= start else 1


@_family("healthy", "-", _ANY)
def fast(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """A high but fine rate."""
    plan.rate = constant(FINE * edge)


@_family("healthy", "factor of the rate", (5.0,))
def healing(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """Three updates at five times the rate, which heal."""
    start = begins(seed)
    usual = plan.rate
    plan.rate = lambda row: usual(row) * (strength if 0 <= row - start < 3 else 1.0)


@_family("healthy", "-", _ANY)
def other_order(plan: Plan, edge: float, strength: float, seed: int) -> None:
    """The same sentences in another order."""
    plan.order = 1000
