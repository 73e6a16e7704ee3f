"""The stability table: which architecture trains at which depth. The papers' Tables 1 and 2 for anybody's runs."""

from __future__ import annotations

import math

import numpy as np

from ...experiments import command
from .. import style
from ..base import Figure, Map, MissingRuns, Panel, Picture, figure
from ..collection import Frame, Runs
from ..layerwise import counted, failed, states
from ..stability import brief, judged, layers_in_all, markdown, recipe_notes, stability_table, table_groups
from .branchnorm_5 import Quality, quality
from .outcomes import mark


@figure("table:stability", title="Which architecture trains at which depth",
        source="BranchNorm, Tables 1 and 2; DeepNet, Table 1")  # fmt: skip
class StabilityTable(Figure):
    r"""nll - unigram: held-out cross-entropy after training minus that of the training set's unigram distribution
    [nats/token], mean over seeds, without the runs that diverged; BLEU where all that trained were evaluated alike.

    A cell is marked stuck or diverged where more than half of its seeds are; its text has the counts, and parentheses
    where seeds are not yet "trained", 0.25 nats below the baseline. Depth counts encoder and decoder layers
    together. Inferred: the papers say "diverged" of single runs and name no criterion.
    """

    def picture(self, runs: Runs) -> Picture:
        groups = table_groups(runs)
        if not groups:
            lacking = "has ended with a verdict" if runs.where(kind="train") else "is there"
            raise MissingRuns(f"no training run {lacking}", command("table:stability"))
        group = groups[0]
        table: Frame = stability_table(group)
        measured = quality(group)
        if measured.is_bleu:
            table = with_bleu(table, group, measured)
        panel = Panel("States, and nats below the unigram baseline", "encoder and decoder layers together", "",
                      map=_map(table, measured.is_bleu))  # fmt: skip
        extra = {"table.csv": table.to_csv(index=False), "table.md": markdown(table)}
        return Picture([panel], _finding(group, table), _notes(runs, group, table), columns=1, extra=extra)


def with_bleu(table: Frame, group: Runs, measured: Quality) -> Frame:
    """The table with a column ``bleu``: the mean over the seeds that did not fail; NaN where all did."""

    def mean(row: Frame) -> float:
        own = group.where(lambda run: layers_in_all(run) == row["depth"] and not failed(run), label=row["arch"])
        scores = [measured.gain(run) for run in own]
        return float(np.mean(scores)) if scores else math.nan

    return table.assign(bleu=[mean(row) for _, row in table.iterrows()])


def _map(table: Frame, bleu: bool) -> Map:
    archs, depths = list(dict.fromkeys(table["arch"])), sorted(set(table["depth"]))
    z = np.full((len(archs), len(depths)), np.nan)
    finding, text = np.zeros(z.shape, int), np.full(z.shape, "", object)
    for row in table.to_dict("records"):
        at = archs.index(row["arch"]), depths.index(row["depth"])
        z[at] = row["bleu" if bleu else "nll_gap"]
        finding[at] = mark(row["diverged"], row["stuck"], row["seeds"])
        text[at] = brief(row, f"{z[at]:.1f}" if bleu and math.isfinite(z[at]) else "")
    names = [style.title(arch) for arch in archs]
    return Map(
        [*range(len(depths))], [*range(len(archs))], z, finding, "BLEU" if bleu else "nll - unigram [nats/token]",
        log=False, x_names=[str(depth) for depth in depths], y_names=names, text=text,
    )  # fmt: skip


def _finding(group: Runs, table: Frame) -> str:
    """The deepest depth: who trained there with all seeds, who with none; and how many runs failed in all."""
    depth = int(table["depth"].max())
    deepest = table[table["depth"] == depth]
    whole = [style.title(row.arch) for row in deepest.itertuples() if row.trained + row.learning == row.seeds]
    none = [style.title(row.arch) for row in deepest.itertuples() if row.stuck + row.diverged == row.seeds]
    lost = int(table["stuck"].sum() + table["diverged"].sum())
    few, many = int(deepest["seeds"].min()), int(deepest["seeds"].max())
    seeds = counted(many) if few == many else f"{few} to {many}"
    parts = [
        f"{len(whole)} of {len(deepest)} architectures were below the unigram baseline with every seed ({seeds})",
        *([f"{', '.join(none)} diverged or got stuck with every seed"] if none else []),
    ]
    total = int(table["seeds"].sum())
    return f"At {depth} layers {'; '.join(parts)}. {lost} of {total} runs diverged or are stuck."


def _notes(runs: Runs, group: Runs, table: Frame) -> list[str]:
    seeds = sorted(set(table["seeds"]))
    several = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else counted(seeds[0])
    notes = [f"Drawn: {group.describe()}; {several} a cell. A value is the mean over seeds that did not diverge."]
    notes += states(group)
    notes += recipe_notes(group)
    if others := len(judged(runs)) - len(group):
        notes.append(f"Not drawn: {others} run{'s' * (others > 1)} with other settings.")
    return notes
