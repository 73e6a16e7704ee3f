"""The answer on two fingerprints, and the first difference of two stored rows. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError
from ..store import Run
from .differences import gap
from .judging import LIMIT, PlaceGap, first_over, judged
from .matching import Matched, matched
from .prints import DIRECTIONS, Fingerprint, load, of_run, steps_of
from .result import Bisection, unmatched

OTHERWISE = "another kernel, number of threads or order of summation"


def answer(
    labels: tuple[str, str],
    step: int,
    pairs: Matched,
    places: tuple[PlaceGap, ...],
    fed: tuple[PlaceGap, ...],
    limit: float,
    control: str,
    notes: Sequence[str],
) -> Bisection:
    suspected, own = first_over(places, limit), first_over(fed, limit)
    first, confirmed, more = suspected, False, list(notes)
    if suspected is not None and suspected.phase == "weights":
        confirmed = True  # parameters are compared directly, so nothing has to be confirmed
    elif own is not None:
        first, confirmed = own, True
    elif suspected is not None and suspected.phase == "forward" and any(p.name == suspected.name for p in fed):
        more.append(f"The sums suspect {suspected.module}, but no module differs if it gets the inputs of {labels[0]}.")
        later = [place for place in places if place.phase not in ("forward", "backward", "gradients")]
        first = first_over(later, limit)
    if pairs.by == "structure":
        more.append(
            "Some names differ: modules were paired by equal parameters, other places by equal values or by order."
        )
    more += [f"--map '{text}' matches no name of {labels[1]}." for text in pairs.useless]
    more += filter(None, (unmatched(pairs.only_a, labels[0]), unmatched(pairs.only_b, labels[1])))
    same = not any(place.error for place in (*places, *fed))
    verdict = "different" if first is not None else "identical" if same else "rounding"
    return Bisection(
        a=labels[0],
        b=labels[1],
        step=step,
        verdict=verdict,
        confirmed=confirmed and first is not None,
        first=first,
        suspected=suspected,
        places=places,
        fed=fed,
        limit=limit,
        control=control,
        by=pairs.by,
        only_a=pairs.only_a,
        only_b=pairs.only_b,
        notes=tuple(more),
    )


def check_limit(limit: float) -> None:
    if not (math.isfinite(limit) and limit > 0):
        raise UsageError(f"limit = {limit} must be above 0: how many times the control an added error may be.")


def stored(path: str | Path) -> Fingerprint | Run:
    """Open a run directory, or read a fingerprint from a file."""
    return load(Path(path)) if Path(path).is_file() else Run.open(path)


def of_stored(
    a: str | Path,
    b: str | Path,
    control: str | Path | Sequence[str | Path] | None = None,
    *,
    step: int | None = None,
    maps: Sequence[str] = (),
    limit: float = LIMIT,
) -> Bisection:
    """Bisect two stored rows: of run directories, or of files that ``stabilitylab fingerprint`` wrote.

    ``control``: a run like ``a``, or several, whose differences from ``a`` are rounding. ``step``: the row; by default
    the first that all have. Raises UsageError if there is none, InputError for what cannot be read.
    """
    controls = [] if control is None else [control] if isinstance(control, (str, Path)) else control
    opened = [stored(path) for path in (a, b, *controls)]
    at = common_steps(opened, step)[0]
    return of_prints([of_run(one, at) if isinstance(one, Run) else one for one in opened], maps=maps, limit=limit)


def of_prints(prints: Sequence[Fingerprint], *, maps: Sequence[str] = (), limit: float = LIMIT) -> Bisection:
    """Bisect two fingerprints; those behind them are the controls."""
    check_limit(limit)
    at = prints[0].step
    pairs = matched(prints[0], prints[1], maps)
    controls = [matched(prints[0], one) for one in prints[2:]]
    places = judged(pairs, controls, made=False)
    told = (
        f"{' and '.join(one.label for one in prints[2:])}, like the first"
        if controls
        else "none was given, so the rounding of the dtype is used"
    )
    notes = []
    if not controls and any(place.error for place in places):
        notes.append(f"Give --control, a run like the first with {OTHERWISE}, to tell small errors from rounding.")
    if controls and not any(gap(pair.a, pair.b).relative for each in controls for pair in each.pairs):
        notes.append(
            "The control equals the first run bit for bit, so the rounding of the dtype is used instead: record it "
            f"with {OTHERWISE}."
        )
    has_directions = all(DIRECTIONS in one.passes for one in prints[:2])
    if not has_directions and any(place.phase == "update" and place.error for place in places):
        notes.append(
            "Without fingerprint_weight_direction, the update was compared only where the gradients agree bit for bit "
            "or the update is a multiple of the gradient: record both runs again."
        )
    if at:
        notes.append(f"At step {at} the parameters may differ because of earlier updates: compare the first rows too.")
    return answer((prints[0].label, prints[1].label), at, pairs, places, (), limit, told, notes)


def common_steps(opened: Sequence[Fingerprint | Run], step: int | None = None) -> list[int]:
    """Return the steps at which all have a fingerprint, or only ``step``. Raises UsageError for none."""
    known = [{*steps_of(one)} if isinstance(one, Run) else {one.step} for one in opened]
    both = sorted(set.intersection(*known))
    if step is not None and step not in both:
        raise UsageError(f"not all runs have a fingerprint at step {step}: {_steps(both)}.")
    if not both:
        raise UsageError("the runs have no step with a fingerprint in common: record them with the same --every.")
    return both if step is None else [step]


def _steps(both: Sequence[int]) -> str:
    return f"the common steps are {', '.join(map(str, both[:12]))}" if both else "they have no common step"
