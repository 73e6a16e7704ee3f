"""The loss against the learning rate, a line a rung of a search by ``stabilitylab lr-find``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ... import style
from ...base import Figure, MissingRuns, Panel, Picture, Reference, Series, figure
from ...collection import Record, Runs
from ...measures.provenance import provenance

ANSWER = "lr-find.json"  # beside the trials of a search
BEST, SAFE = "best rate", "largest safe rate"
FEW = 4  # searches that have a panel each


@figure("rates:loss", title="The loss against the learning rate", source="stabilitylab lr-find")
class LossByRate(Figure):
    """The loss of a search's trials against their learning rate, with one line per rung, for the seed that searched.
    Also drawn are the mean of the seeds that did not fail at rates that other seeds repeated, crosses at rates that
    failed, marks at the best and the largest safe rate, and the trials with a shorter warm-up. Each search has its own
    panel."""

    def picture(self, runs: Runs) -> Picture:
        searches = dict(_searches(runs))
        if not searches:
            raise MissingRuns("no trials of a search", "stabilitylab lr-find PACKAGE.MODULE:FACTORY")
        largest = sorted(searches, key=lambda folder: -len(searches[folder]))[:FEW]
        shown = [folder for folder in searches if folder in largest]
        panels = [_panel(folder, searches[folder]) for folder in shown]
        left = len(searches) - len(shown)
        notes = [
            "Crosses: rates at which a trial failed, at the height of the highest loss that is drawn.",
            *([f"Left out: {left} smaller searches."] if left else []),
        ]
        drawn = Runs([run for folder in shown for run in searches[folder]])
        finding = " ".join(_finding(folder) for folder in shown)
        return Picture(panels, finding, notes, columns=min(2, len(panels)), provenance=provenance(drawn))


def _searches(runs: Runs) -> Iterator[tuple[Path, list[Record]]]:
    """Yield the folder and the trials of every search that has a loss at a rung."""
    found: dict[Path, list[Record]] = {}
    for run in runs:
        if isinstance(run.run.manifest.get("lr_find"), Mapping):
            found.setdefault(run.run.path.parent, []).append(run)
    yield from ((folder, own) for folder, own in sorted(found.items()) if any(map(_losses, own)))


def _told(run: Record) -> Mapping[str, Any]:
    return run.run.manifest["lr_find"]


def _losses(run: Record) -> dict[int, float]:
    """Return the losses of a trial at the rungs that it reached; that at which it failed is left out."""
    told, data = _told(run), run.metrics
    if told["measured"] not in data:
        return {}
    own = data.loc[data["step"].isin(told["rungs"]), ["step", told["measured"]]].dropna()
    end = run.status.step if run.status.state == "diverged" else math.inf
    return {int(step): float(loss) for step, loss in own.to_numpy() if math.isfinite(loss) and step < end}


def _panel(folder: Path, runs: list[Record]) -> Panel:
    searching = [run for run in runs if _told(run)["searches"]]
    rungs = [int(rung) for rung in _told(runs[0])["rungs"]]
    failed = {float(_told(run)["rate"]) for run in runs if run.status.state == "diverged" and _is_planned(run)}
    lines = list(_rungs(searching, rungs))
    lines += _repeats(runs, rungs[-1])
    answer = _answer(folder)
    lines += _warmups(runs, answer)
    highest = max((max(line.y) for line in lines if line.y), default=0.0)
    if failed:
        crossed = sorted(failed)
        lines.append(Series("failed", crossed, [highest] * len(crossed), kind="crosses", colour="#a50f15", marker="x"))
    marks = [
        Reference(float(answer[key]["value"]), name, vertical=True)
        for key, name in (("best", BEST), ("safe", SAFE))
        if answer.get(key)
    ]
    if len(marks) == 2 and marks[0].value == marks[1].value:
        marks = [Reference(marks[0].value, f"{BEST} = {SAFE}", vertical=True)]
    scores = "training loss, smoothed" if _told(runs[0])["measured"] == "smoothed_loss" else "held-out loss"
    model = str(_told(runs[0])["model"])
    return Panel(model, "learning rate (largest of all groups)", scores, lines, marks, log_x=True)


def _is_planned(run: Record) -> bool:
    """True if a trial has the planned warm-up."""
    return bool(_told(run)["planned"])


def _rungs(runs: list[Record], rungs: list[int]) -> Iterator[Series]:
    """Yield a line a rung, of the seed that searched, over the rates that did not fail."""
    colours = style.of_amounts(len(rungs))
    for rung, colour in zip(rungs, colours, strict=True):
        points = sorted((float(_told(run)["rate"]), own[rung]) for run in runs if rung in (own := _losses(run)))
        if points:
            x, y = zip(*points, strict=True)
            yield Series(f"{rung:,} updates", x, y, colour=colour, marker="o", seeds=1)


def _repeats(runs: list[Record], horizon: int) -> Iterator[Series]:
    """Yield the mean at the horizon over the seeds that did not fail, of rates at which several did not, with the range
    over seeds."""
    found: dict[float, list[float]] = {}
    for run in runs:
        if _is_planned(run) and horizon in (own := _losses(run)):
            found.setdefault(float(_told(run)["rate"]), []).append(own[horizon])
    several = {rate: losses for rate, losses in sorted(found.items()) if len(losses) > 1}
    if several:
        mean, low, high = ([float(pick(own)) for own in several.values()] for pick in (np.mean, np.min, np.max))
        counts = [len(losses) for losses in several.values()]
        yield Series(
            "mean of seeds", [*several], mean, low, high, kind="points", colour="#2b8cbe", marker="D", seeds=counts
        )


def _warmups(runs: list[Record], answer: Mapping[str, Any]) -> Iterator[Series]:
    """Yield the trials with a shorter warm-up, which is the least that suffices, and which failed behind the point that
    is drawn."""
    least = (answer.get("warmup") or {}).get("value")
    points = []
    for run in runs:
        if not _is_planned(run) and (own := _losses(run)):
            rung, failed = max(own), run.status.state == "diverged"
            points.append((int(run.run.config["warmup"]), rung, float(_told(run)["rate"]), own[rung], failed))
    for warmup, rung, rate, loss, failed in sorted(points):
        suffices = warmup == least and not failed
        end = ", failed later" if failed else ", suffices" if suffices else ""
        label, colour = f"warm-up {warmup}, {rung:,} updates{end}", "#31a354" if suffices else "#e6550d"
        yield Series(label, [rate], [loss], kind="points", colour=colour, marker="s")


def _answer(folder: Path) -> Mapping[str, Any]:
    """Return the answer of a search; {} while it goes on, or if it cannot be read."""
    try:
        found = json.loads((folder / ANSWER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _finding(folder: Path) -> str:
    """Return the three numbers in a sentence."""
    answer = _answer(folder)
    if not answer.get("best"):
        return f"The search in {folder.name} has no best rate yet."
    told = [f"best rate {_range(answer['best'])}", f"largest safe rate {_range(answer['safe'])}"]
    if answer.get("warmup"):
        told.append(f"least warm-up {answer['warmup']['value']:.0f}")
    return f"{answer['name']}: {', '.join(told)}, after {answer['updates']:,} updates."


def _range(one: Mapping[str, Any]) -> str:
    ends = ["?" if one[end] is None else f"{float(one[end]):.2g}" for end in ("low", "high")]
    return f"{float(one['value']):.2g} [{', '.join(ends)}]"
