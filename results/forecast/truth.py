"""What "trains" and "fails" mean, which cells are tried in which order, and which learning rate comes next.

Written before any run was made; README.md gives the reasons. Rates are numbers k of the grid 1e-3 * 1.3^k.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Outcome = Literal["trains", "fails", "cannot tell"]
JUDGED = (150, 300, 600, 1200)  # updates after which a run is judged; what is open after the last stays so
SAFE_NATS = 0.5  # below the baseline: of the runs of results/states that stood so at any time none came back
RATIO, LOWEST, HIGHEST = 1.3, -12, 22  # the grid: 4.3e-5 to 0.32
SEEDS = (3, 4, 5)
WARMUPS = (40, 0)
T = 40  # of BranchNorm's ramp, with and without warm-up: it is part of the architecture, as its initialisation is
TEXT = "Multi30k, German to English", 5.5542  # and the entropy of its training labels [nats]
START = 4  # 2.9e-3, where nothing is known yet
FAR, NEAR = 3, 1  # first step of a search that starts from another cell, and from another seed of the cell
WIDE = 3  # rates that are tried above one that cannot be told, until one fails

# One of each way to join a sub-layer to the stream: behind a norm, before it, scaled, ramped, profiled, with norms
# inside the branch, without norms, and in two streams ...
FIRST = ("postln", "preln", "deepnorm", "branchnorm", "admin", "subln", "rezero", "resi-dual")
# ... and the others with a recipe of their own; T-Fixup's forbids the warm-up that half of the cells have.
OTHERS = (
    *("dsinit", "sandwich", "dlcl", "normformer", "layernorm-scaling", "periln", "rfixup", "postln-init"),
    *("dlcl-post", "dsinit-code"),
)


@dataclass(frozen=True)
class Cell:
    """An edge that is looked for: ``layers`` of both stacks together, ``shift`` of the grid (the last test's rates lie
    between those of the others)."""

    arch: str
    layers: int
    warmup: int
    seed: int
    shift: float = 0.0

    def rate(self, k: int) -> float:
        return float(f"{1e-3 * RATIO ** (k + self.shift):.3g}")

    def middle(self, edge: Edge) -> float:
        """log10 of the rate half way between the edge's ends; NaN where one side is open."""
        inside = math.isfinite(edge.low) and math.isfinite(edge.high)
        return -3 + math.log10(RATIO) * ((edge.low + edge.high) / 2 + self.shift) if inside else math.nan


class Judged(NamedTuple):
    """How a run stood after ``updates``: state by stabilitylab.verdict, gap to the unigram baseline [nats]."""

    updates: int
    state: str
    gap: float


# stage -> architectures, depths, shift; the last one is looked at once, after everything else was fixed
STAGES: Mapping[str, tuple[Sequence[str], Sequence[int], float]] = {
    "first": (FIRST, (12, 36), 0.0),
    "others": (OTHERS, (12, 36), 0.0),
    "deep": ((*FIRST, *OTHERS), (100,), 0.0),
    "test": ((*FIRST, *OTHERS), (60,), 0.5),
}


def cells(stage: str) -> Iterator[Cell]:
    """Seed by seed, the shallow ones first, so that a stopped call has whole sets of architectures; the last test has
    one seed."""
    archs, depths, shift = STAGES[stage]
    for seed in SEEDS[:1] if stage == "test" else SEEDS:
        for layers in depths:
            yield from (Cell(arch, layers, warmup, seed, shift) for arch in archs for warmup in WARMUPS)


def outcome(seen: Sequence[Judged]) -> Outcome | None:
    """What became of a run that was judged so; None: it goes on.

    - ``fails`` at once where a number was not finite, and from the second judgement on where it diverged;
    - ``trains``: trained, and ``SAFE_NATS`` below the baseline; after the last judgement trained is enough;
    - ``fails``: at or above the baseline and not seen to fall (stuck, cannot tell) twice in a row, the second time
      after the third judgement or later, one of them stuck; after the last judgement once is enough;
    - ``cannot tell``: learning or descending after the last judgement.
    """
    now, last = seen[-1], seen[-1].updates >= JUDGED[-1]
    if not math.isfinite(now.gap) or (now.state == "diverged" and len(seen) > 1):
        return "fails"
    if now.state == "trained" and (last or now.gap < -SAFE_NATS):
        return "trains"
    flat = [one.state in ("stuck", "cannot tell") for one in seen]
    if len(seen) >= 3 and all(flat[-2:]) and "stuck" in (one.state for one in seen[-2:]):
        return "fails"
    if last:
        return "fails" if flat[-1] else "cannot tell"
    return None


def wanted(known: Mapping[int, Outcome], guess: int, step: int) -> int | None:
    """The rate to try next; None where the edge is known.

    From ``guess`` upwards or downwards in steps that double, then halving until the largest rate that trains and the
    smallest above it that does not are neighbours. Where that one cannot be told, the next ``WIDE`` rates above it too.
    """
    if not known:
        return _inside(guess)
    stops = [k for k, what in known.items() if what != "trains"]
    if not stops:
        top = max(known)
        return None if top == HIGHEST else _inside(top + step * 2 ** (len(known) - 1))
    high = min(stops)
    below = [k for k, what in known.items() if k < high and what == "trains"]
    if not below:
        return None if high == LOWEST else _inside(high - step * 2 ** (len(stops) - 1))
    low = max(below)
    if high - low > 1:
        return (low + high) // 2
    for k in range(high, min(high + WIDE, HIGHEST) + 1):
        if k not in known:
            return k
        if known[k] == "fails":
            break
    return None


def _inside(k: int) -> int:
    return max(LOWEST, min(HIGHEST, k))


class Edge(NamedTuple):
    """The edge lies between ``low``, which trains, and ``high``, which fails [numbers of the grid]; -inf and inf: none
    of the grid does. ``done``: nothing is left to try."""

    low: float
    high: float
    done: bool


def edge(known: Mapping[int, Outcome]) -> Edge:
    """The edge as far as it is known."""
    stop = min((k for k, what in known.items() if what != "trains"), default=math.inf)
    low = max((k for k, what in known.items() if what == "trains" and k < stop), default=-math.inf)
    high = min((k for k, what in known.items() if what == "fails" and k > low), default=math.inf)
    return Edge(low, high, bool(known) and wanted(known, START, FAR) is None)


def start(cell: Cell, known: Mapping[Cell, Mapping[int, Outcome]]) -> tuple[int, int]:
    """(guess, step): from the nearest edge that is known: another seed's, another warm-up's, another depth's, another
    architecture's."""

    def lows(same: Iterable[str]) -> list[float]:
        fitting = [one for one in known if all(getattr(one, key) == getattr(cell, key) for key in same)]
        return sorted(found.low for one in fitting if (found := edge(known[one])).done and math.isfinite(found.low))

    near = (("arch", "layers", "warmup"), ("arch", "layers"), ("arch", "warmup"), ("layers", "warmup"))
    for nearness, same in enumerate(near):
        if found := lows(same):
            return int(found[len(found) // 2]), FAR if nearness else NEAR
    return START, FAR
