"""Which runs the second corpus has, in their order, and which more it gets if failures are too few."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from second_families import FAMILIES, families
from subjects import LIBRARY, SECOND
from training import Recipe

PILOT = (200, 201)  # seeds of the sweeps that find the edges
CHOOSE, TEST = (8, 10, 12), (9, 11, 13, 15, 17)
RESERVE = (18, 19, 20, 21, 22, 23, 24, 25)  # seeds of a topping-up
CALIBRATE = tuple(range(1000, 1050))  # seeds of the sets that test the calibration
CALIBRATED = ("postln-d4", "preln-d4", "deepnorm-d4", "branchnorm-d4", "subln-d4", "sandwich-d4", "gpt2-d4", "llama-d4")
FAILING, OUTSIDE, MORE = 6, 2, 3  # runs of a subject and seed: from within, from outside, of a topping-up
EVENTS, COLLAPSES = 100, 60  # failures from within that the corpus aims at, both halves together
OFTEN = 1 / 3  # the share of a family's runs that fail, from which on it tops up


def half(seed: int) -> str:
    """Return "calibrate" for the seeds of the calibration's sets, "choose" for other even seeds, "test" for odd ones; a
    twin and what is compared with it share a seed."""
    return "calibrate" if seed >= CALIBRATE[0] else "test" if seed % 2 else "choose"


def recipes() -> Iterator[Recipe]:
    """Yield all runs, seed by seed, so that a corpus that is cut short has whole seeds; a twin before what needs it.

    Of each subject and seed: a twin, a high but fine rate, a hard case of health, six failures from within, two faults
    from outside. Families take turns with the seed and the subject. The sets of the calibration come last.
    """
    for seed in (*CHOOSE, *TEST):
        for place, (name, subject) in enumerate(SECOND.items()):
            turn = (*CHOOSE, *TEST).index(seed) + place
            hard = [own for own in families("healthy", subject.arch) if own not in ("twin", "fast")]
            yield of(name, seed, "twin")
            yield of(name, seed, "fast")
            yield of(name, seed, hard[turn % len(hard)])
            for kind, runs in (("endogenous", FAILING), ("exogenous", OUTSIDE)):
                known = families(kind, subject.arch)
                yield from (of(name, seed, known[(runs * turn + more) % len(known)]) for more in range(runs))
    for seed in CALIBRATE:
        yield from (of(name, seed, "twin") for name in CALIBRATED)


def more(told: Sequence[Mapping[str, Any]]) -> Iterator[Recipe]:
    """Yield the runs of a topping-up, seed by seed of :data:`RESERVE`: twins, and of each subject three runs by the
    families that failed in a third of their runs of the choosing half or more, the lacking label first.

    ``told``: lines of the ledger (``family``, ``kind``, ``seed``, ``outcome``), of which it takes those of
    :func:`recipes`, so that runs of the topping-up itself change nothing. It looks at no signal, and at no label of the
    test half but for the total counts."""
    told = [one for one in told if int(one["seed"]) in (*CHOOSE, *TEST)]
    seen = [one for one in told if one["kind"] == "endogenous" and int(one["seed"]) in CHOOSE]
    runs, failed, short = Counter(one["family"] for one in seen), Counter[str](), lacking(told)
    for one in seen:
        failed[one["family"]] += one["outcome"] in short
    often = sorted((own for own in runs if failed[own] >= OFTEN * runs[own]), key=lambda own: -failed[own] / runs[own])
    for seed in RESERVE if often else ():
        for place, (name, subject) in enumerate(SECOND.items()):
            yield of(name, seed, "twin")
            here = [own for own in often if own in families("endogenous", subject.arch)][:MORE]
            yield from (of(name, seed, here[(place + at) % len(here)]) for at in range(len(here)))


def lacking(told: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the outcomes of which there are too few."""
    events, collapses = counts(told)
    short = (("event",) if events < EVENTS else ()) + (("collapse",) if collapses < COLLAPSES else ())
    return (*short, "both") if short else ()


def enough(told: Sequence[Mapping[str, Any]]) -> bool:
    """True if there are as many events and collapses from within as the corpus aims at."""
    return not lacking(told)


def counts(told: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the numbers of events and of collapses from within; a run with both counts in both."""
    found = Counter(one["outcome"] for one in told if one["kind"] == "endogenous")
    return found["event"] + found["both"], found["collapse"] + found["both"]


def of(subject: str, seed: int, family: str) -> Recipe:
    """Return a recipe whose strength is drawn evenly in its logarithm, by subject, seed and family."""
    low, high = FAMILIES[family].ends
    random = np.random.default_rng([seed, list(SECOND).index(subject), list(FAMILIES).index(family)])
    return Recipe(subject, seed, family, float(math.exp(random.uniform(math.log(low), math.log(high)))))


def archs() -> tuple[str, ...]:
    """Return the architectures of the corpus; those of another library last."""
    found = dict.fromkeys(own.arch for own in SECOND.values())
    return (*(own for own in found if own not in LIBRARY), *LIBRARY)
