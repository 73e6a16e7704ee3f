"""A learning-rate range test that recognises a stuck model: it ends when the loss is back at the unigram baseline, not
only when the loss rises."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from ..probes import evaluation
from .candidate import Candidate

LOWEST, HIGHEST, PER_DECADE = 3e-5, 1.0, 30
MOST = math.ceil(PER_DECADE * math.log10(HIGHEST / LOWEST)) + 1  # updates
LEARNT = 0.05  # nats below the baseline: only after such a loss does a return to the baseline count
Ending = Literal["not finite", "back at the baseline", "no fall over a decade of rates", "the last rate"]


@dataclass(frozen=True)
class Ramp:
    """The result of the test. ``low``: the rate at the lowest held-out loss; ``end``: the last rate, and ``why`` the
    test ended; ``lowest``: the lowest loss; ``updates``: the number of updates."""

    low: float
    end: float
    why: Ending
    lowest: float
    updates: int


def rate(update: int) -> float:
    """Return the rate of an update, counted from 0."""
    return LOWEST * 10 ** (update / PER_DECADE)


def ended(losses: Iterable[float], baseline: float | None) -> Ramp:
    """Follow the held-out loss, from that of the start, to the end of the test.

    The test ends if a loss is not finite; if the loss was ``LEARNT`` below the baseline and is at or above it again; if
    the lowest loss is a decade of rates old; else at the last loss. Smith 2017 (1506.01186) ends at the explosion of
    the loss, which a model that collapses to the baseline never shows.
    """
    lowest, at, update = math.inf, 0, 0
    for number, loss in enumerate(losses):
        update = max(number - 1, 0)  # the one that led here
        if not math.isfinite(loss):
            return Ramp(rate(at), rate(update), "not finite", lowest, number)
        if loss < lowest:
            lowest, at = loss, update
        elif baseline is not None and lowest < baseline - LEARNT and loss >= baseline:
            return Ramp(rate(at), rate(update), "back at the baseline", lowest, number)
        elif update - at >= PER_DECADE:
            return Ramp(rate(at), rate(update), "no fall over a decade of rates", lowest, number)
    return Ramp(rate(at), rate(update), "the last rate", lowest, update + 1)


def range_test(candidate: Candidate) -> Ramp:
    return ended(_losses(candidate), candidate.baseline)


def _losses(candidate: Candidate) -> Iterator[float]:
    """Yield the held-out loss of a fresh model at the start, and after each update at growing rates."""
    model = candidate.model()
    optimizer = candidate.optimizer(model, LOWEST)
    shares = [group.get("share", 1.0) for group in optimizer.param_groups]
    yield held_out(candidate, model, 0)
    for update in range(MOST):
        for group, share in zip(optimizer.param_groups, shares, strict=True):
            group["lr"] = rate(update) * share
        one_update(candidate, model, optimizer, update)
        yield held_out(candidate, model, update + 1)


def one_update(candidate: Candidate, model: torch.nn.Module, optimizer: torch.optim.Optimizer, update: int) -> None:
    model.train()
    candidate.enter(model, update)
    candidate.loss(model, update).backward()
    clip(candidate, model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def clip(candidate: Candidate, model: torch.nn.Module) -> None:
    if candidate.clipping:
        torch.nn.utils.clip_grad_norm_(model.parameters(), candidate.clipping)


def held_out(candidate: Candidate, model: torch.nn.Module, row: int) -> float:
    candidate.enter(model, row)
    with evaluation(model), torch.no_grad():
        return float(candidate.held_out(model).mean())
