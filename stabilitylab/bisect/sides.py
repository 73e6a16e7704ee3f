"""The work on each of two models: their fingerprints, the controls of the first, and the second fed by the first."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..errors import ResourceError, StabilityLabError
from ..probes import Mask
from .forcing import Values, forced, values_of
from .judging import coarser_ulp
from .model_pass import LossFunction, fingerprint_of
from .prints import Fingerprint
from .rounding import redrawn

T = TypeVar("T")


@dataclass(frozen=True)
class BisectSubject:
    """A model, its batch, its loss and the mask of real tokens."""

    model: nn.Module
    batch: Any
    loss_fn: LossFunction
    mask: Mask | None = None


# Makes the subject of one side; for another process a function of a module, whose arguments can be pickled.
Side = Callable[[], BisectSubject]


@dataclass(frozen=True)
class FirstSide:
    """The findings of the first model: its fingerprint, those of its controls, its values, and the errors of each
    control that is fed with these values."""

    print_: Fingerprint
    controls: tuple[Fingerprint, ...]
    values: Values
    fed: tuple[Mapping[str, float], ...]


def look(side: Side, label: str, seed: int) -> Fingerprint:
    """Return the fingerprint of a side."""
    return _print_of(_made(side, seed), label, seed)


def first_side(side: Side, label: str, seed: int, ulp: float, sums_ulp: float, count: int, feed: bool) -> FirstSide:
    """Return all that the first model gives. ``count`` controls round anew by the dtypes of the second model, or of the
    first where they are coarser: ``ulp`` is the coarsest of the forward pass, ``sums_ulp`` that of the gradients of
    parameters."""
    subject = _made(side, seed)
    model, batch, loss_fn = subject.model, subject.batch, subject.loss_fn
    own = _print_of(subject, label, seed)
    places = list(own.passes["forward"])
    ulp = max(ulp, coarser_ulp(own))
    sums_ulp = max(sums_ulp, coarser_ulp(own, phase="gradients"))
    values = values_of(model, batch, loss_fn, places, seed) if feed else Values()
    controls, fed = [], []
    for number in range(count):
        with redrawn(model, ulp, seed + 1 + number, sums_ulp):
            controls.append(_print_of(subject, f"control {number + 1}", seed))
            if feed:
                fed.append(forced(model, batch, loss_fn, dict(zip(places, places, strict=True)), values, seed))
    return FirstSide(own, tuple(controls), values, tuple(fed))


def fed_side(side: Side, seed: int, places: Mapping[str, str], values: Values) -> dict[str, float]:
    """Return the error of each place of the second model, fed with the values of the first."""
    subject = _made(side, seed)
    return forced(subject.model, subject.batch, subject.loss_fn, places, values, seed)


def _made(side: Side, seed: int) -> BisectSubject:
    torch.manual_seed(seed)  # two factories that draw alike draw the same weights
    return side()


def _print_of(subject: BisectSubject, label: str, seed: int) -> Fingerprint:
    return fingerprint_of(subject.model, subject.batch, subject.loss_fn, label, mask=subject.mask, seed=seed)


def here(work: Callable[..., T], *arguments: Any) -> T:
    """Do the work in this process."""
    return work(*arguments)


def elsewhere(work: Callable[..., T], *arguments: Any) -> T:
    """Do the work in a process of its own, which ends with it and leaves no memory behind. Errors come back."""
    with tempfile.TemporaryDirectory(prefix="stabilitylab-bisect-") as folder:
        given, told = Path(folder, "given.pt"), Path(folder, "told.pt")
        torch.save(arguments, given)
        process = multiprocessing.get_context("spawn").Process(target=_worked, args=(work, given, told))
        process.start()
        try:
            process.join()
        finally:
            process.kill()
        if not told.exists():
            raise ResourceError(
                "the process of one model was killed, perhaps because memory ran out: give a smaller batch, or record "
                "two runs and compare those."
            )
        is_error, found = torch.load(told, weights_only=False)
    if is_error:
        raise found
    return found


def _worked(work: Callable[..., Any], given: Path, told: Path) -> None:
    try:
        answer = False, work(*torch.load(given, weights_only=False))
    except StabilityLabError as error:
        answer = True, error
    except Exception as error:
        answer = True, StabilityLabError(f"{type(error).__name__}: {error}")
    part = told.with_suffix(".part")
    torch.save(answer, part)
    part.rename(told)
