"""``stabilitylab.bisect``: the first sub-layer where two models, or two stored rows, part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ..errors import UsageError
from ..probes import Mask
from ..store import Run
from .judging import LIMIT, ONE_ROUNDING, Place, coarser_ulp, first_over, judged
from .matching import Matched, matched
from .model_pass import LossFunction
from .prints import Fingerprint, load, of_run, steps_of
from .result import Bisection, unmatched
from .sides import FirstSide, Side, Subject, fed_side, first_side, here, look

Work = Callable[..., Any]


def bisect(
    a: nn.Module | Callable[[], nn.Module],
    b: nn.Module | Callable[[], nn.Module],
    batch: Any,
    loss_fn: LossFunction | tuple[LossFunction, LossFunction],
    *,
    b_batch: Any = None,
    maps: Sequence[str] = (),
    limit: float = LIMIT,
    controls: int = 3,
    mask: Mask | None = None,
    feed: bool = True,
    seed: int = 0,
) -> Bisection:
    """Find the first sub-layer where model ``b`` computes something else than model ``a`` on one batch.

    Both run forward and backward once, in evaluation mode and with the random states of ``seed``; nothing of them is
    changed. ``a``, ``b``: modules, or functions that make one, of which one exists at a time. ``loss_fn(model, batch)``
    returns the loss; a pair of functions is for models that are called differently, and ``b_batch`` for another layout
    of the same batch. ``mask``: which tokens are real, as in :func:`stabilitylab.watch`.

    The control is ``a`` with the roundings of the coarser dtype drawn anew, ``controls`` times. A place counts if its
    added error, sqrt(max(0, e_out^2 - (g e_in)^2)) with g the gain c_out / c_in of the control, is above ``limit``
    times the control. ``feed``: confirm it by feeding each module of ``b`` what enters the same module of ``a``, which
    keeps the values of all sub-layers on the host. ``maps``: 'REGEX=REPLACEMENT', from names of ``b`` to ``a``'s.

    Raises UsageError if the models have no place in common, InputError if ``loss_fn`` fails.

    >>> found = bisect(reference, candidate, batch, loss_fn)  # doctest: +SKIP
    >>> found.verdict, found.where  # doctest: +SKIP
    ('different', 'transformer.h.1.attn.c_proj')
    """
    losses = loss_fn if isinstance(loss_fn, tuple) else (loss_fn, loss_fn)

    def side(model: Any, own: Any, loss: LossFunction) -> Subject:
        return Subject(model if isinstance(model, nn.Module) else model(), own, loss, mask)

    sides = partial(side, a, batch, losses[0]), partial(side, b, batch if b_batch is None else b_batch, losses[1])
    names = ("the first model", "the second model")
    return of_sides(*sides, names, maps=maps, limit=limit, controls=controls, feed=feed, seed=seed)


def of_sides(
    a: Side,
    b: Side,
    labels: tuple[str, str],
    *,
    maps: Sequence[str] = (),
    limit: float = LIMIT,
    controls: int = 3,
    feed: bool = True,
    seed: int = 0,
    do: Work = here,
) -> Bisection:
    """Bisect two sides, one after the other; ``do`` calls the work, here or in a process of its own."""
    if controls < 1:
        raise UsageError(f"controls = {controls}: at least one control is needed.")
    _check_limit(limit)
    second: Fingerprint = do(look, b, labels[1], seed)
    first: FirstSide = do(first_side, a, labels[0], seed, coarser_ulp(second), controls, feed)
    pairs = matched(first.print_, second, maps)
    ulp = coarser_ulp(first.print_, second)
    told = f"{labels[0]} with its roundings drawn anew at {ulp:.2g} relative, {controls} times"
    places = judged(pairs, [matched(first.print_, control) for control in first.controls], made=True)
    fed: tuple[Place, ...] = ()
    if feed:
        forward = {place.name: place.other for place in places if place.phase == "forward"}
        errors: Mapping[str, float] = do(fed_side, b, seed, forward, first.values)
        fed = _fed(places, errors, first.fed, ulp)
    notes = []
    if first.print_.facts.get("batch") != second.facts.get("batch"):
        notes.append("The two sides have different batches, or one batch in two layouts.")
    return _answer(labels, 0, pairs, places, fed, limit, told, notes)


def _fed(
    places: Sequence[Place], errors: Mapping[str, float], controls: Sequence[Mapping[str, float]], ulp: float
) -> tuple[Place, ...]:
    """Return the places of the forward pass with their own errors: nothing is inherited where each input is given."""
    found = []
    for place in places:
        if place.phase != "forward" or math.isnan(error := errors.get(place.name, math.nan)):
            continue
        known = [each[place.name] for each in controls if math.isfinite(each.get(place.name, math.nan))]
        control = max(float(np.sqrt(np.mean(np.square(known)))) if known else 0.0, ONE_ROUNDING * ulp)
        found.append(
            Place(
                "forward", place.name, place.other, place.stack, place.layer, place.sublayer, error, 0.0, control, 0.0,
                error, place.order,
            )
        )  # fmt: skip
    return tuple(found)


def _answer(
    labels: tuple[str, str],
    step: int,
    pairs: Matched,
    places: tuple[Place, ...],
    fed: tuple[Place, ...],
    limit: float,
    control: str,
    notes: Sequence[str],
) -> Bisection:
    suspected, own = first_over(places, limit), first_over(fed, limit)
    first, confirmed, more = suspected, False, list(notes)
    if suspected is not None and suspected.phase == "weights":
        confirmed = True  # parameters are compared, not what is computed with them
    elif own is not None:
        first, confirmed = own, True
    elif suspected is not None and suspected.phase == "forward" and any(p.name == suspected.name for p in fed):
        more.append(f"The sums suspected {suspected.module}, but fed with the inputs of {labels[0]} no module differs.")
        later = [place for place in places if place.phase not in ("forward", "backward", "gradients")]
        first = first_over(later, limit)
    if pairs.by == "structure":
        more.append("Some names differ: places were paired by their layer and the order of their calls.")
    more += filter(None, (unmatched(pairs.only_a, labels[0]), unmatched(pairs.only_b, labels[1])))
    same = not any(place.error for place in (*places, *fed))
    verdict = "different" if first is not None else "identical" if same else "rounding"
    return Bisection(
        *labels, step, verdict, confirmed and first is not None, first, suspected, places, fed, limit, control,
        pairs.by, pairs.only_a, pairs.only_b, tuple(more),
    )  # fmt: skip


def _check_limit(limit: float) -> None:
    if not (math.isfinite(limit) and limit > 0):
        raise UsageError(f"limit = {limit} must be above 0: how many times the control an added error may be.")


def stored(path: str | Path) -> Fingerprint | Run:
    """Open a run directory, or read a fingerprint from a file."""
    return load(Path(path)) if Path(path).is_file() else Run.open(path)


def of_stored(
    a: str | Path,
    b: str | Path,
    control: str | Path | None = None,
    *,
    step: int | None = None,
    maps: Sequence[str] = (),
    limit: float = LIMIT,
) -> Bisection:
    """Bisect two stored rows: of run directories, or of files that ``stabilitylab fingerprint`` wrote.

    ``control``: a run like ``a``, whose difference from ``a`` is rounding. ``step``: the row; by default the first that
    all have. Raises UsageError if there is none, InputError for what cannot be read.
    """
    opened = [stored(path) for path in (a, b, *([] if control is None else [control]))]
    at = common_steps(opened, step)[0]
    return of_prints([of_run(one, at) if isinstance(one, Run) else one for one in opened], maps=maps, limit=limit)


def of_prints(prints: Sequence[Fingerprint], *, maps: Sequence[str] = (), limit: float = LIMIT) -> Bisection:
    """Bisect two fingerprints, with a third as the control if there is one."""
    _check_limit(limit)
    at = prints[0].step
    pairs = matched(prints[0], prints[1], maps)
    controls = [matched(prints[0], one) for one in prints[2:]]
    told = (
        f"{prints[2].label}, a run like the first" if controls else "none, so that the dtype's roundings stand for it"
    )
    notes = []
    if not controls:
        notes.append("Without --control, a run like the first, small errors cannot be told from rounding.")
    if at:
        notes.append(f"At step {at} the parameters may differ by what came before: the first row says most.")
    return _answer(
        (prints[0].label, prints[1].label), at, pairs, judged(pairs, controls, made=False), (), limit, told, notes
    )


def common_steps(opened: Sequence[Fingerprint | Run], step: int | None = None) -> list[int]:
    """Return the steps at which all have a fingerprint, or only ``step``. Raises UsageError for none."""
    known = [{*steps_of(one)} if isinstance(one, Run) else {one.step} for one in opened]
    both = sorted(set.intersection(*known))
    if step is not None and step not in both:
        raise UsageError(f"step {step} has no fingerprint in all of them; {_steps(both)}.")
    if not both:
        raise UsageError("they have no step with a fingerprint in common: record them with the same --every.")
    return both if step is None else [step]


def _steps(both: Sequence[int]) -> str:
    return f"the common steps are {', '.join(map(str, both[:12]))}" if both else "there is no common one"
