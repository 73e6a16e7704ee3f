#!/usr/bin/env python
"""Fixes everything that is chosen, on the choosing half alone: the combination, its thresholds, those of all rules.

python results/alarm/second/second_freeze.py     # frozen.json; commit it before the test half is gathered
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[3] / "benchmarks" / "faults"))
sys.path.insert(1, str(Path(__file__).parents[1]))

from combine import Fit, fit
from second_corpus import FROZEN, HERE, SecondRun, features_of, read
from second_rules import COMBINATION, admitted, choose_penalty, cross_fitted, known, largest, thresholds, well


def frozen(runs: Sequence[SecondRun]) -> dict[str, Any]:
    """Return the combination with its thresholds, which are made of healthy runs that its fit has not seen (each
    architecture by the fit of the others); for each architecture the fit and the thresholds without it; and the
    thresholds of all other rules. Raises SystemExit if there is no event or no healthy run to fit it on."""
    healthy = well(runs)
    if not healthy or not any(run.outcome == "failure" for run in runs):
        raise SystemExit("the choosing half has no event or no healthy run: there is nothing to fit.")
    penalty = choose_penalty(runs)
    whole, fits = fit(runs, penalty, admitted(), signed=True), cross_fitted(runs, penalty)
    crossed = [largest(run, fits[run.arch].score()) for run in healthy]
    accused = [run.is_accused for run in healthy]
    left_out = {}
    for arch, own in fits.items():
        kept = [place for place, run in enumerate(healthy) if run.arch != arch]
        limits = thresholds([crossed[place] for place in kept], [accused[place] for place in kept])
        left_out[arch] = {"fit": asdict(own), "thresholds": limits}
    rules = {COMBINATION: thresholds(crossed, accused)}
    for name, rival in known(whole).items():
        if name != COMBINATION:
            rules[name] = thresholds([largest(run, rival.score) for run in healthy], accused)
    return {
        "fit": asdict(whole),
        "penalty": penalty,
        "thresholds": rules,
        "left_out": left_out,
        "healthy": len(healthy),
        "accused": sum(accused),
        "events": sum(run.outcome == "failure" for run in runs),
    }


def load(folder: Path = HERE) -> tuple[dict[str, Any], Fit]:
    """Return what was frozen, and the combination."""
    told = json.loads((folder / FROZEN).read_text())
    return told, Fit(**told["fit"])


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def main(folder: Path = HERE) -> None:
    runs = read(("choose",), folder)
    made = frozen(runs)
    names = sorted({features_of(run.half, run.seed, run.subject) for run in runs})
    made["features"] = {name: digest(folder / name) for name in names}
    (folder / FROZEN).write_text(json.dumps(made, indent=1) + "\n")
    print(f"{FROZEN} {digest(folder / FROZEN)}: {made['healthy']} healthy runs, {made['events']} events")


if __name__ == "__main__":
    main()
