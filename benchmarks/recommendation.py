"""How well does `recommend` foretell how runs end? Its ranking, and each column alone, against trained runs.

    stabilitylab sweep table                                    # or any runs that differ in arch, depth and seed alone
    python benchmarks/recommendation.py runs/tiny/table --depths 12,36 --out benchmarks/recommendation.md

The settings (data, recipe, sizes) are those of the runs; the seeds of the measurements are others. What was measured
into --measured before is kept.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stabilitylab.config import resolve
from stabilitylab.errors import InputError
from stabilitylab.recommend import Ask, measure_all, ranking, wanted
from stabilitylab.recommend.checking import Check, alike, check
from stabilitylab.reports.build import load
from stabilitylab.reports.collection import Runs
from stabilitylab.reports.measures.comparison import counted
from stabilitylab.reports.stability import layers_in_all, stability_table
from stabilitylab.store.layout import flat

OWN = ("model.arch", "model.encoder_layers", "model.decoder_layers", "data.seed", "train.seed", "train.device")


def settings_of(runs: Runs) -> dict[str, dict[str, Any]]:
    """What the runs have set differently from their preset, an architecture's own recipe left out."""
    run = next((run for run in runs if run.label == "postln"), runs[0])
    defaults = dict(flat(resolve({"preset": str(run.settings["preset"])}).model_dump(mode="json")))
    given: dict[str, dict[str, Any]] = {}
    for key, value in run.settings.items():
        section, _, name = key.partition(".")
        if name and section != "probes" and key not in OWN and value != defaults.get(key):
            given.setdefault(section, {})[name] = value
    return given


def lines_of(depth: int, checked: Check, places: Any, table: Mapping[str, Any]) -> Iterator[str]:
    states = ", ".join(f"{count} {state}" for state, count in checked.states.items() if count)
    runs = f"{counted(checked.seeds)} of trained runs ({states})"
    yield f"\n## {depth} layers: {len(checked.real)} architectures, {runs}\n"
    yield "| against how runs ended | Spearman's rho | 95 % |\n|---|---|---|"
    for one in checked.agreements:
        text = "- | - |" if math.isnan(one.rho) else f"{one.rho:+.2f} | {one.low:+.2f} to {one.high:+.2f} |"
        yield f"| {one.name} | {text}"
    yield f"\nOne seed of the trained runs against another: rho {checked.reliability:+.2f} (mean of the pairs).\n"
    yield "| place | architecture | mean rank | bound broken | rank of the runs | nll - unigram (range) | stuck |"
    yield "|---|---|---|---|---|---|---|"
    for place in places:
        if (row := table.get(place.arch)) is None:
            continue
        broken = "; ".join(place.broken)
        gap = f"{row['nll_gap']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f})"
        stuck = f"{row['stuck'] + row['diverged']} of {row['seeds']}"
        real = f"{checked.real[place.arch]:g}"
        yield f"| {place.place} | {place.arch} | {place.score:.1f} | {broken} | {real} | {gap} | {stuck} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--depths", default="12,36")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--archs", default="", help="names with commas between them; all where none is given")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--measured", type=Path, default=Path("runs/recommend"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    runs, _ = load(arguments.runs)
    archs = [name for name in arguments.archs.split(",") if name]
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    said = []
    for depth in (int(depth) for depth in arguments.depths.split(",")):
        here = runs.where(lambda run, depth=depth: layers_in_all(run) == depth, kind="train")
        if not here:
            raise InputError(f"{arguments.runs} has no trained runs of {depth} layers.")
        configs, _ = wanted(Ask(depth, None, archs, seeds, settings_of(here)))
        found, failed = measure_all(configs, arguments.measured, arguments.jobs, lambda name: None)
        if failed:
            raise InputError(f"some measurements failed: {failed}")
        table = {str(row["arch"]): row for row in stability_table(alike(found, here)).to_dict("records")}
        said += lines_of(depth, check(found, here), ranking(found), table)
    text = "\n".join(said)
    print(text)
    if arguments.out:
        arguments.out.write_text(f"# What `recommend` foretells\n\n`python benchmarks/recommendation.py`\n{text}\n")


if __name__ == "__main__":
    main()
