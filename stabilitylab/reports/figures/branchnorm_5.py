"""BranchNorm, Figure 5: quality against depth, on three sizes of data."""

from __future__ import annotations

import json
import math

import numpy as np

from ...experiments import command
from .. import style
from ..base import Figure, MissingRuns, Panel, Picture, Series, Spread, figure
from ..collection import LAYERS, Record, Runs
from ..layerwise import last_nll

LEAST_BLEU = 5.0  # below it a model does not translate, and BLEU says nothing
DEPTHS = (*LAYERS, "data.fraction")


@figure(
    "branchnorm:5", title="Quality against depth on three data sizes", source="BranchNorm, Figure 5; DeepNet, Fig. 6"
)
class QualityAgainstDepth(Figure):
    """BLEU of ``stabilitylab evaluate`` where every trained model reaches 5, else held-out cross-entropy: a stand-in.

    Data sizes are shares of one corpus. Runs that diverged or are stuck are crosses, at the depth where they happened.
    """

    def picture(self, runs: Runs) -> Picture:
        group, notes = _group(runs)
        bleu = {record.name: value for record in group if (value := _bleu(record)) is not None}
        use_bleu = len(bleu) == len(group) and max(bleu.values()) >= LEAST_BLEU
        axis = "BLEU" if use_bleu else "held-out cross-entropy [nats/token] (stand-in for BLEU)"
        panels = []
        for share in sorted({_share(record) for record in group}):
            own = group.where(lambda record, share=share: _share(record) == share)
            lines = [line for label in own.labels for line in _lines(own.where(label=label), label, bleu, use_bleu)]
            pairs = next((record.run.manifest.get("data", {}).get("train") for record in own), None)
            size = f", {pairs:,} sentence pairs" if pairs else ""
            title = f"{share:.0%} of the corpus{size}"
            panels.append(
                Panel(title, "layers a side", axis, lines, log_x=True, ticks=sorted({r.depth for r in group}))
            )
        if not use_bleu:
            notes.append("Held-out cross-entropy, since not every run was evaluated and translates: lower is better.")
        return Picture(panels, _finding(group), notes, columns=min(3, len(panels)))


def _group(runs: Runs) -> tuple[Runs, list[str]]:
    """The comparable runs with most depths (and sizes); one depth is no depth sweep."""
    groups = [g for g in runs.where(kind="train").groups(*DEPTHS) if len(g.depths) > 1]
    if not groups:
        raise MissingRuns("no comparable training runs at two depths or more", command("branchnorm:5"))
    best = max(groups, key=lambda g: (len({_share(r) for r in g}), not all(map(failed, g)), len(g.depths), len(g)))
    notes = [f"Drawn: {best.describe()}. Points are means over seeds, bars their range."]
    others = sum(len(g) for g in groups) - len(best)
    return best, notes + ([f"Not drawn: {others} runs with other settings."] if others else [])


def _share(record: Record) -> float:
    return float(record.settings.get("data.fraction", 1.0))


def _bleu(record: Record) -> float | None:
    path = record.run.path / "evaluation.json"
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["bleu"])
    except (OSError, ValueError, KeyError):
        return None


def failed(record: Record) -> bool:
    return record.verdict in ("diverged", "stuck")


def _lines(runs: Runs, label: str, bleu: dict[str, float], use_bleu: bool) -> list[Series]:
    """A line through the runs that learned, and crosses for those that did not."""
    spread, crosses = Spread(), []
    for record in runs:
        value = bleu[record.name] if use_bleu else last_nll(record)
        if failed(record):
            crosses.append((record.depth, value))
        elif math.isfinite(value):
            spread.add([record.depth], [value])
    lines = [spread.series(style.title(label), arch=label)] if spread.points else []
    finite = [value for _, value in crosses if math.isfinite(value)]
    if crosses:
        height = [value if math.isfinite(value) else max(finite, default=0.0) for _, value in crosses]
        name = f"{style.title(label)}: diverged or stuck"
        lines.append(Series(name, [depth for depth, _ in crosses], height, arch=label, kind="crosses"))
    return lines


def _finding(group: Runs) -> str:
    """Where the loss is lowest at the largest data size, and what did not train."""
    share = max(_share(record) for record in group)
    sentences = []
    for label in group.labels:
        own = group.where(lambda record: _share(record) == share, label=label)
        means = {
            depth: float(np.mean([last_nll(record) for record in own.where(layers=(depth, depth))]))
            for depth in own.depths
            if own.where(layers=(depth, depth))
        }
        if means:
            best = min(means, key=lambda depth: means[depth])
            sentences.append(f"{style.title(label)} is best at {best}L-{best}L ({means[best]:.2f} nats)")
    lost = sum(map(failed, group))
    ending = f"; {lost} of {len(group)} runs diverged or stayed stuck" if lost else ""
    return f"On {share:.0%} of the data, {' and '.join(sentences) or 'nothing was measured'}{ending}."
