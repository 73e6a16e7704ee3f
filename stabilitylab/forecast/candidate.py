"""The subject of a forecast: a model that can be made anew, its batches, its losses, and its optimizer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from ..config import Config
from ..data import Batch, Dataset
from ..errors import InputError, UsageError
from ..labels import label
from ..models import Transformer, build_model
from ..models.groups import groups_of
from ..probes import Mask
from ..train.recipe import adamw, param_groups, token_losses
from .known import design

IGNORED = -100  # a label that does not count, as in PyTorch and Hugging Face
KEYS = (
    *("model", "batch", "loss_fn", "optimizer", "batches", "held_out", "baseline", "clipping", "classes", "mask"),
    *("sites", "output_site"),
)


@dataclass(frozen=True)
class Candidate:
    """A model and how it trains.

    ``model()`` returns a fresh model at its initialisation; ``optimizer(model, rate)`` its optimizer; ``enter(model,
    t)`` is called before update t; ``loss(model, t)`` is the loss of update t; ``held_out(model)`` are the losses of a
    fixed batch, of which the mean counts [nats, for a comparison with ``baseline``]; ``masks(t)`` are the masks of the
    batch of update t. ``baseline``: the loss of a model that ignores its input; None if unknown. ``facts``: the facts
    that the cover of a fit compares.
    """

    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]
    enter: Callable[[nn.Module, int], None]
    loss: Callable[[nn.Module, int], Tensor]
    held_out: Callable[[nn.Module], Tensor]
    masks: Callable[[int], Mask | None]
    baseline: float | None
    facts: Mapping[str, Any]
    apart: bool  # True if the held-out batch is not trained on
    clipping: float = 0.0  # norm that gradients are clipped to; 0: no clipping
    sites: Mapping[str, Any] = field(default_factory=dict)  # arguments of the watcher


def reference(config: Config, dataset: Dataset, device: torch.device) -> Candidate:
    """Return the reference Transformer of ``config``, with the batches and losses of a training run: the same initial
    weights and the same sentences."""
    held_out, train = dataset.held_out.to(device), config.train

    @lru_cache(maxsize=2)  # an update asks for its loss and its masks, and much is measured on the first batch
    def batch(t: int) -> Batch:
        return dataset.micro_batch(t).to(device)

    def model() -> nn.Module:
        sizes = {"source_vocab": dataset.source_vocab, "target_vocab": dataset.target_vocab}
        made = build_model(config.model, **sizes, seed=train.seed).to(device)
        torch.manual_seed(train.seed)  # dropout
        made.calibrate(**batch(0).inputs)
        made.set_row(0)
        return made

    def loss(model: nn.Module, t: int) -> Tensor:
        own = batch(t)
        return token_losses(model(**own.inputs), own.labels, own.weight, train.label_smoothing)[0] / own.tokens

    def losses(model: nn.Module) -> Tensor:
        real = held_out.weight > 0
        return F.cross_entropy(model(**held_out.inputs)[real], held_out.labels[real], reduction="none")

    def optimizer(model: nn.Module, rate: float) -> AdamW:
        own = train.model_copy(update={"lr": rate, "warmup": 0})
        assert isinstance(model, Transformer)
        return adamw(own, param_groups(own, groups_of(model)))

    return Candidate(
        name=label(config.model),
        model=model,
        optimizer=optimizer,
        enter=lambda model, t: model.set_row(t),  # pyright: ignore[reportCallIssue]
        loss=loss,
        held_out=losses,
        masks=lambda t: batch(t).masks,
        baseline=dataset.unigram.cross_entropy,
        facts={
            "width": config.model.d_model,
            "layers": config.model.depth,
            "optimizer": f"{train.optimizer} ({train.beta1:g}, {train.beta2:g})",
            "clipping": train.clip_norm,
            "precision": "float32" if train.precision == "fp32" else train.precision,
            "tokens": batch(0).tokens * train.accumulate,
            "classes": dataset.target_vocab,
            "design": design(config),
            "entropy": dataset.label_entropy(),
        },
        apart=True,
        clipping=train.clip_norm,
    )


def of_yours(name: str, given: Mapping[str, Any]) -> Candidate:
    """Return the candidate of a user's function, from the arguments of :func:`stabilitylab.preflight` that it returned,
    and these:

    ``batches`` (to train on, one after another, again from the first one), ``held_out`` (one batch more), ``baseline``
    (loss of a model that ignores its input; else the entropy of the labels, if batches have ``labels``); and two facts
    for the cover of a fit, ``clipping`` (norm that gradients are clipped to; 0: no clipping) and ``classes`` (of the
    output).

    Raises UsageError for a wrong value.
    """
    own, loss_fn, device = given["model"], given["loss_fn"], _device(given["model"])
    batches: Sequence[Any] = given.get("batches") or [given["batch"]]
    held_out = given.get("held_out", batches[0])
    optimizer = given.get("optimizer")
    baseline = given.get("baseline")
    if baseline is None:
        baseline = entropy([*batches, held_out])
    elif not (isinstance(baseline, int | float) and math.isfinite(baseline)):
        raise UsageError(f"{name} returned baseline={baseline!r}: give the loss of a model that ignores its input.")
    numbers = {key: _number(name, key, given[key]) for key in ("clipping", "classes") if key in given}

    pairs: WeakKeyDictionary[nn.Module, torch.optim.Optimizer] = WeakKeyDictionary()  # a copy and its optimizer

    def fresh() -> nn.Module:
        try:
            if isinstance(optimizer, torch.optim.Optimizer):  # together, so that the copy moves the copied parameters
                twin, pairs[twin] = copy.deepcopy((getattr(own, "_orig_mod", own), optimizer))
                return twin
            return copy.deepcopy(getattr(own, "_orig_mod", own))
        except (RuntimeError, TypeError, ValueError) as error:
            raise UsageError(
                f"the model cannot be copied ({str(error).splitlines()[0]}): give the module as it is before "
                "DistributedDataParallel, fully_shard or a backward pass."
            ) from error

    def at_rate(model: nn.Module, rate: float) -> torch.optim.Optimizer:
        """Return the optimizer with largest learning rate ``rate``, the other rates in proportion; AdamW if none was
        given."""
        mine = pairs.get(model) or (optimizer or AdamW)(model.parameters())
        largest = max(float(group["lr"]) for group in mine.param_groups) or 1.0
        for group in mine.param_groups:
            group["share"] = float(group["lr"]) / largest
            group["lr"] = rate * group["share"]
        return mine

    def loss(model: nn.Module, t: int) -> Tensor:
        try:
            found = loss_fn(model, batches[t % len(batches)])
        except Exception as error:
            raise InputError(f"loss_fn(model, batch) failed: {type(error).__name__}: {error}") from error
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise UsageError("loss_fn(model, batch) must return one number.")
        return found

    made = at_rate(fresh(), 1e-3)
    betas = made.param_groups[0].get("betas", ())
    mask = given.get("mask")
    return Candidate(
        name=name,
        model=fresh,
        optimizer=at_rate,
        enter=lambda model, t: None,
        loss=loss,
        held_out=lambda model: loss_fn(model, held_out),
        masks=lambda t: mask,
        baseline=baseline,
        facts={
            "optimizer": f"{type(made).__name__.lower()} ({', '.join(f'{beta:g}' for beta in betas)})",
            "precision": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in own.parameters()})),
            "tokens": _tokens(batches[0]),
            "device": str(device),
            **numbers,
        },
        apart="held_out" in given,
        clipping=float(numbers.get("clipping", 0)),
        sites={key: given[key] for key in ("sites", "output_site") if key in given},
    )


def entropy(batches: Sequence[Any]) -> float | None:
    """Return the entropy [nats] of the integer ``labels`` of these batches: the lowest loss of a model that ignores its
    input. None without labels."""
    found = [batch["labels"] for batch in batches if isinstance(batch, Mapping) and "labels" in batch]
    if not found or any(not isinstance(one, Tensor) or one.is_floating_point() for one in found):
        return None
    labels = torch.cat([one.flatten().cpu() for one in found])
    counts = torch.unique(labels[labels != IGNORED], return_counts=True)[1].double()
    if not len(counts):
        return None
    shares = counts / counts.sum()
    return float(-(shares * shares.log()).sum())


def _number(name: str, key: str, value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        what = {"clipping": "the norm that gradients are clipped to, 0 for none", "classes": "how many the output has"}
        raise UsageError(f"{name} returned {key}={value!r}: give {what[key]}.")
    return value


def _device(model: Any) -> torch.device:
    if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        raise UsageError("the model must be a torch.nn.Module with parameters.")
    return next(model.parameters()).device


def _tokens(batch: Any) -> int | None:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return int((labels != IGNORED).sum()) if isinstance(labels, Tensor) else None
