"""What is done to a run of the second corpus: failures from within, faults from outside, and hard cases of health.

Of the eleven families from within two let the learning rate climb. In seven the rate is constant and what grows is
something else, so that neither the rate nor its distance from the subject's edge tells such a run from a healthy one
with the same schedule (``fast``). A strength is drawn evenly in its logarithm between the two ends of its family.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from families import WARMUP, Kind, Plan, constant, middle_scaled, noise, other_labels
from torch import nn

from stabilitylab.data import Batch

ROWS = 300  # updates of a run
# Rates of twins, and one that is high but fine, of the edge. In the first corpus they were a twelfth and a quarter; in
# the pilot of this one (seed 200) the attention of a LLaMA was spent at an eighth.
REFERENCE, FINE = 1 / 24, 1 / 12
CLIMB = 150  # updates of a climb
FAULT = (90, 190)  # the rows between which something comes from outside
GROWS = (40, 150)  # the rows between which a knob grows to its strength
SHARD = 30  # batches of a corrupt shard
STALE = 60  # updates by which a restored state or weight is too old
TINY = 1e-6  # of a learning rate, by which a decay a step is divided at the least


@dataclass
class Loop:
    """What a fault from outside may touch before a row: the model, its layers, its optimizer, and what it kept."""

    model: nn.Module
    layers: list[nn.Module]
    optimizer: torch.optim.Optimizer
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass
class SecondPlan(Plan):
    """A plan with knobs that change with the row. ``part``: the parameters whose updates are multiplied by
    ``faster(row)``: "query_key", "embedding", "norms" or "ffn"; ``first``: their factor at initialisation; ``shrinks``:
    the share of each weight that its decay takes in a row, None for AdamW's usual decay; ``sinks``: what is taken from
    the bias of each block's first matrix in a row; ``scale``: the loss scale of float16; ``clip``: the largest gradient
    norm; ``before``: what happens to the loop before a row's forward pass."""

    part: str = ""
    faster: Callable[[int], float] = lambda row: 1.0
    first: float = 1.0
    shrinks: Callable[[int], float] | None = None
    sinks: Callable[[int], float] = lambda row: 0.0
    scale: Callable[[int], float] | None = None
    clip: float = math.inf
    before: Callable[[int, Loop], None] = lambda row, loop: None


Change = Callable[[SecondPlan, float, float, int], None]  # plan, edge, strength, seed
Register = Callable[[Change], Change]


@dataclass(frozen=True)
class SecondFamily:
    """``knob``: what strength means; ``ends``: its mildest and its severest value; ``climbs``: the learning rate is
    what grows; ``known``: how its cause can be known: "ledger", "tables" or "" (it cannot); ``only``: the architectures
    that have it, () for all."""

    name: str
    kind: Kind
    knob: str
    ends: tuple[float, float]
    change: Change
    title: str
    climbs: bool = False
    known: str = ""
    only: tuple[str, ...] = ()


FAMILIES: dict[str, SecondFamily] = {}


def _family(kind: Kind, knob: str = "-", ends: tuple[float, float] = (1.0, 1.0), **facts: Any) -> Register:
    def register(change: Change) -> Change:
        title = (change.__doc__ or "").strip()
        FAMILIES[change.__name__] = SecondFamily(change.__name__, kind, knob, ends, change, title, **facts)
        return change

    return register


def plan(family: str, edge: float, strength: float, seed: int) -> SecondPlan:
    """Return the plan of a run: the reference, changed by its family."""
    made = SecondPlan(rate=constant(REFERENCE * edge))
    FAMILIES[family].change(made, edge, strength, seed)
    return made


def families(kind: Kind, arch: str) -> list[str]:
    """Return the names of the families of a kind that an architecture has."""
    return [name for name, own in FAMILIES.items() if own.kind == kind and arch in (own.only or (arch,))]


def climbing(rate: float, edge: float) -> Callable[[int], float]:
    """Return the reference rate after the usual warm-up, and from there in 150 updates, linearly, another."""
    usual = constant(REFERENCE * edge)
    return lambda row: usual(row) + (rate - REFERENCE * edge) * min(max(row - WARMUP, 0) / CLIMB, 1.0)


def begins(seed: int) -> int:
    """Return the row of a fault from outside, by its seed."""
    return int(np.random.default_rng([seed, 78]).integers(*FAULT))


def growing(strength: float) -> Callable[[int], float]:
    """Return a factor that goes from 1 to ``strength`` between the rows of :data:`GROWS`, evenly in its logarithm."""
    start, end = GROWS
    return lambda row: strength ** min(max(row - start, 0) / (end - start), 1.0)


# Failures from within


@_family("endogenous", "rate at the end of the climb, of the edge", (1.0, 8.0), climbs=True)
def climb(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """The learning rate climbs for 150 updates, up to a value that is too high."""
    plan.rate = climbing(strength * edge, edge)


@_family("endogenous", "rate at the end of the climb, of the edge", (1.0, 8.0), climbs=True)
def slow_moment(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """beta_2 is .9999: the second moment lags, while the rate climbs."""
    plan.betas, plan.rate = (0.9, 0.9999), climbing(strength * edge, edge)


@_family("endogenous", "rate, of the edge", (1.0, 8.0))
def high_rate(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """The learning rate is too high, after the usual warm-up."""
    plan.rate = constant(strength * edge)


@_family("endogenous", "rate, of the edge", (0.5, 4.0))
def momentum(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """beta_1 is .99 at a high rate: updates overshoot."""
    plan.betas, plan.rate = (0.99, 0.99), constant(strength * edge)


@_family("endogenous", "factor of the updates of queries and keys", (10.0, 300.0), known="tables")
def attention_growth(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """Updates of queries and keys grow, at a constant rate, so that attention logits do."""
    plan.part, plan.faster, plan.rate = "query_key", growing(strength), constant(FINE * edge)


@_family("endogenous", "factor of queries and keys", (8.0, 64.0), known="tables")
def attention_scale(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """Queries and keys are initialised too large: each query sees one key."""
    plan.part, plan.first, plan.rate = "query_key", strength, constant(FINE * edge)


@_family("endogenous", "factor of the updates of the embedding", (30.0, 3000.0))
def embedding_growth(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """Updates of the embedding grow, at a constant rate."""
    plan.part, plan.faster, plan.rate = "embedding", growing(strength), constant(FINE * edge)


@_family("endogenous", "factor of the updates of norms", (30.0, 1000.0))
def norm_growth(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """Updates of the norms' gains and biases grow, at a constant rate."""
    plan.part, plan.faster, plan.rate = "norms", growing(strength), constant(FINE * edge)


@_family("endogenous", "share of a weight that its decay takes in an update", (0.01, 0.3))
def heavy_decay(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """Weight decay grows, at a constant rate, until the weights shrink faster than they learn."""
    plan.rate, factor = constant(FINE * edge), growing(strength / 1e-4)
    plan.shrinks = lambda row: 1e-4 * factor(row)


@_family("endogenous", "rows in which the loss scale doubles", (8.0, 40.0), known="tables")
def growing_scale(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """The loss scale of float16 gradients (emulated) doubles again and again, and nothing makes it back off."""
    plan.half, plan.rate = "fp16", constant(FINE * edge)
    plan.scale = lambda row: 2.0 ** (10 + row / strength)


RELU = ("postln", "preln", "deepnorm", "branchnorm", "admin", "subln", "sandwich", "hybridnorm")


@_family("endogenous", "what is taken from a bias in an update", (0.02, 0.3), only=RELU)
def dead_units(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """The biases in front of the ReLUs sink from row 40 on, until no unit is active."""
    plan.rate = constant(FINE * edge)
    plan.sinks = lambda row: strength if row >= GROWS[0] else 0.0


# Faults from outside that the ledger of updates knows


def _at(plan: SecondPlan, seed: int, act: Callable[[Loop], None]) -> int:
    """Let something happen once, before the forward pass of the row of the fault, which is returned."""
    start = plan.at = begins(seed)

    def before(row: int, loop: Loop) -> None:
        if row == start:
            act(loop)

    plan.before = before
    return start


@_family("exogenous", known="ledger")
def state_zeroed(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """Adam's moments are set to zero; the step count goes on."""
    plan.rate = constant(FINE * edge)

    def zero(loop: Loop) -> None:
        for state in loop.optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()

    _at(plan, seed, zero)


@_family("exogenous", known="ledger")
def state_stale(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """The optimizer's state is that of sixty updates before."""
    plan.rate = constant(FINE * edge)
    start = plan.at = begins(seed)

    def before(row: int, loop: Loop) -> None:
        if row == start - STALE:
            loop.kept["state"] = copy.deepcopy(loop.optimizer.state_dict())
        elif row == start:
            loop.optimizer.load_state_dict(loop.kept.pop("state"))

    plan.before = before


@_family("exogenous", known="ledger")
def beta_changed(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """beta_1 is 0 and beta_2 .5 from a row on, as after a resume with other settings."""
    plan.rate = constant(FINE * edge)
    _at(plan, seed, lambda loop: _set(loop, betas=(0.0, 0.5)))


@_family("exogenous", "share of a weight that its decay takes in an update", (0.02, 0.2), known="ledger")
def decay_changed(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """Weight decay jumps from a row on."""
    rate = REFERENCE * edge
    _at(plan, seed, lambda loop: _set(loop, weight_decay=strength / max(rate, TINY)))


@_family("exogenous", "factor of the rate", (8.0, 128.0), known="ledger")
def rate_jump(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """The rate jumps, as after a resume with other settings."""
    start = plan.at = begins(seed)
    usual = plan.rate
    plan.rate = lambda row: usual(row) * (strength if row >= start else 1.0)


@_family("exogenous", known="ledger")
def schedule_restarts(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """The schedule, a warm-up and a decay to a tenth, begins again at a row."""
    start = plan.at = begins(seed)
    once = _decaying(FINE * edge, ROWS)
    plan.rate = lambda row: once(row if row < start else row - start)


@_family("exogenous", known="ledger")
def layer_frozen(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """From a row on a middle layer does not require gradients."""
    plan.rate = constant(FINE * edge)
    _at(plan, seed, lambda loop: loop.layers[len(loop.layers) // 2].requires_grad_(False))


@_family("exogenous", known="ledger")
def weights_swapped(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """The weights of two layers of one stack change places."""

    def swap(loop: Loop) -> None:
        first, second = (loop.layers[at].state_dict() for at in (-1, -2))
        kept = copy.deepcopy(first)
        loop.layers[-1].load_state_dict(second)
        loop.layers[-2].load_state_dict(kept)

    plan.rate = constant(FINE * edge)
    _at(plan, seed, swap)


@_family("exogenous", known="ledger")
def accumulation_summed(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """From a row on four micro-batches make an update, and their losses are added instead of averaged."""
    start = plan.at = begins(seed)
    plan.summed, plan.accumulate = True, lambda row: 4 if row >= start else 1


def _set(loop: Loop, **settings: Any) -> None:
    for group in loop.optimizer.param_groups:
        group.update(settings)


# Faults from outside that tables show


@_family("exogenous", "factor of the gradient", (30.0, 3000.0), known="tables")
def layer_scaled(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """From a row on the gradients of a middle layer are multiplied."""
    plan.at = begins(seed)
    plan.gradients = middle_scaled(plan.at, strength)


@_family("exogenous", known="tables")
def gradients_kept(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """From a row on gradients are not set to zero, but added up."""
    start = plan.at = begins(seed)
    plan.zero = lambda row: row < start


# Faults from outside that neither knows: the content of batches


def _spoil(plan: SecondPlan, seed: int, change: Callable[[int, Batch, int, int], Batch], rows: int) -> None:
    start = plan.at = begins(seed)
    plan.batch = lambda row, batch, vocab: change(row, batch, vocab, seed) if 0 <= row - start < rows else batch


@_family("exogenous")
def shard_corrupt(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """Thirty batches of random tokens."""
    _spoil(plan, seed, noise, SHARD)


@_family("exogenous")
def labels_shuffled(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """From a row on labels belong to another sentence."""
    _spoil(plan, seed, other_labels, ROWS)


@_family("exogenous")
def batch_repeated(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """From a row on every batch is the same one."""
    start = plan.at = begins(seed)
    plan.which = lambda row: min(row, start)


# Health, plain and hard


@_family("healthy")
def twin(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """The reference rate: a 24th of the edge."""


@_family("healthy")
def fast(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """A twelfth of the edge, a high but fine rate."""
    plan.rate = constant(FINE * edge)


@_family("healthy")
def decaying(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """Warm-up and a cosine to a tenth."""
    plan.rate = _decaying(FINE * edge, ROWS)


@_family("healthy")
def restarts(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """A cosine that begins again every hundred updates, on purpose."""
    once = _decaying(FINE * edge, 100)
    plan.rate = lambda row: once(row % 100 if row >= 100 else row)


@_family("healthy")
def rewarmed(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """The rate falls to a tenth and comes back in fifty updates."""
    start, usual = begins(seed), constant(FINE * edge)
    plan.rate = lambda row: usual(row) * (min(1.0, 0.1 + 0.9 * (row - start) / 50) if row >= start else 1.0)


@_family("healthy")
def larger_batch(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """From a row on a batch has four times as many sentences, averaged."""
    start = begins(seed)
    plan.accumulate = lambda row: 4 if row >= start else 1


@_family("healthy", "factor of the rate", (3.0, 6.0))
def healing(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """Three updates at a multiple of the rate, which heal."""
    start, usual = begins(seed), plan.rate
    plan.rate = lambda row: usual(row) * (strength if 0 <= row - start < 3 else 1.0)


@_family("healthy")
def clipped(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """Gradients are clipped at .25."""
    plan.clip, plan.rate = 0.25, constant(FINE * edge)


@_family("healthy")
def thawed(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """A middle layer is frozen at first, and learns from a row on."""
    start = begins(seed)

    def before(row: int, loop: Loop) -> None:
        if row in (0, start):
            loop.layers[len(loop.layers) // 2].requires_grad_(row == start)

    plan.before = before


@_family("healthy")
def batch_strange(plan: SecondPlan, edge: float, strength: float, seed: int) -> None:
    """One batch of random tokens, which heals."""
    start = begins(seed)
    plan.batch = lambda row, batch, vocab: noise(row, batch, vocab, seed) if row == start else batch


def _decaying(rate: float, rows: int) -> Callable[[int], float]:
    """Return a warm-up and a cosine from ``rate`` to a tenth of it."""
    usual = constant(rate, WARMUP)
    return lambda row: usual(row) * (0.55 + 0.45 * math.cos(math.pi * min(row / rows, 1.0)))
