"""The language-model studies of ``results/deepnorm-baseline`` and ``results/keel``: a process an arm, side by side.

Each searches its arm's rate and then trains the judged seeds at it. Tables lie in ``studies/`` and come back whole; all
go on from those that are committed. The rules are the studies' own; nothing here chooses.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from place import ROOT, SIDES, Clock, Place, Progress, pair
from sharing import Job, carry, progress, side_by_side, together

FOLDER, RUNS = Path("studies"), Path("studies-runs")
NAMES = ("deepnorm-baseline", "keel")
TABLES = ("rates.csv", "searches", "search.csv", "ledger.csv", "deep.csv")
WORKERS = 2  # runs of an arm at a time where they share the GPU: a dozen arms go at once
DEEP_WORKERS = 18  # all runs of the deepest models


@dataclass(frozen=True)
class Step:
    """A process of a study: ``parts`` of its script. ``arm``: "" for all."""

    study: str
    parts: Sequence[str]
    layers: int | None = None
    arm: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.study, *self.parts, str(self.layers or ""), self.arm)))


def steps() -> Iterator[list[Step]]:
    """What runs at once: all arms of both studies at their least number of layers, then at the next, then the deepest
    models."""
    depths = {name: protocol_of(name).LAYERS for name in NAMES}
    for at in range(2):
        yield [
            Step(name, ("search", "judged"), depths[name][at], arm)
            for name in NAMES
            for arm in protocol_of(name).arms(depths[name][at])
        ]
    yield [Step("keel", ("deep",))]


def protocol_of(name: str) -> Any:
    """Return the module of a study that has its arms; each study calls it ``protocol``."""
    if (results := str(ROOT / "results")) not in sys.path:
        sys.path.append(results)
    title = f"protocol_of_{name.replace('-', '_')}"
    if title not in sys.modules:
        spec = importlib.util.spec_from_file_location(title, ROOT / "results" / name / "protocol.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[title] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[title])
    return sys.modules[title]


def studies(place: Place, clock: Clock) -> Progress:
    """Both studies, in the order of :func:`steps`; state.json has the processes that have ended."""
    if place.smoke:
        return Progress("complete", "not tried without the corpus")
    for name, table in product(NAMES, TABLES):
        carry(ROOT / "results" / name / table, FOLDER / name / table)
    done: list[str] = place.state.decided.setdefault("studies", [])
    every = [*steps()]
    codes: dict[str, int | None] = {}
    with side_by_side(place.log, place.python) as is_shared:
        for at_once in every:
            left = [step for step in at_once if step.name not in done]
            if left and clock.left() > 1:
                ended = together(place, clock, [_job(step, is_shared) for step in left])
                done += [name for name, code in ended.items() if code == 0]
                codes |= ended
    return progress(len(done), sum(map(len, every)), "processes", codes)


def _job(step: Step, is_shared: bool) -> Job:
    at_once = (WORKERS if step.arm else DEEP_WORKERS) if is_shared else 1
    own = (*(("--layers", str(step.layers), "--arm", step.arm) if step.arm else ()), "--workers", str(at_once))
    texts = (("--text", "train"), ("--valid", "val"), ("--test", "test_2016_flickr"))
    given = [word for flag, split in texts for word in (flag, pair(split).split(",")[SIDES.index("en")])]
    where = ("--runs", str(RUNS / step.study), "--out", str(FOLDER / step.study))
    script = ROOT / "results" / step.study / "make.py"
    return Job(step.name, (str(script), *step.parts, *own, *given, *where), FOLDER / f"{step.name}.txt")
