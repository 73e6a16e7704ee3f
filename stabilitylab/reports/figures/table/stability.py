"""The stability table: the depths at which each architecture trains. The papers' Tables 1 and 2 for any runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import numpy as np

from ....experiments import Experiment, Recipe, command, sweep, table_runs
from ... import style
from ...arrange import signs
from ...base import Figure, Map, MissingRuns, Panel, Picture, figure
from ...claims import NAMED_LATER, Share, claim
from ...collection import LAYERS, Frame, Record, Runs
from ...measures.comparison import (
    comparable,
    counted,
    decided,
    failed,
    judged,
    lost_by_seed,
    not_drawn,
    states,
    with_the_protocols_ramp,
)
from ...measures.gains import by_gain
from ...measures.outcomes import mark
from ...measures.provenance import provenance
from ...measures.quality import Quality, quality
from ...stability import (
    brief,
    layers_in_all,
    markdown,
    own_recipes,
    recipe_notes,
    stability_table,
    table_groups,
)
from ...statistics import Region

MARK = "*"  # marks an architecture with a recipe of its own
LONG, DEEP = 3000, 50  # updates, and layers a side, from which divergence is judged
COMMAND = f"stabilitylab sweep --grid arch=postln,deepnorm,branchnorm,admin depth=36,100 seed=3..8 steps={LONG}"


@figure("table:stability", title="Which architecture trains at which depth",
        source="BranchNorm, Tables 1 and 2; DeepNet, Table 1")  # fmt: skip
class StabilityTable(Figure):
    r"""The gap nll - unigram: held-out cross-entropy after training minus that of the training set's unigram
    distribution [nats/token], mean over seeds, without the runs that diverged. BLEU instead, if all trained runs were
    evaluated alike.

    A cell is marked stuck or diverged if more than half of its seeds are. Its text has the counts, in parentheses if
    seeds are not "trained": not yet 0.25 nats below the baseline, or without use of their source. Depth counts encoder
    and decoder layers together. Inferred: the papers say "diverged" of single runs and name no criterion.
    """

    def picture(self, runs: Runs) -> Picture:
        groups = table_groups(runs)
        if not groups:
            lacking = "has ended with a verdict" if runs.where(kind="train") else "is there"
            raise MissingRuns(f"no run of `probe` {lacking}", command("table:stability"))
        group = groups[0]
        table: Frame = stability_table(group)
        measured = quality(group)
        if measured.is_bleu:
            table = with_bleu(table, group, measured)
        panel = table_panel(table_map(table, measured.is_bleu, own_recipes(group)), measured.is_bleu)
        extra = {"table.csv": table.to_csv(index=False), "table.md": markdown(table)}
        return Picture(
            [panel], _finding(table), _notes(runs, group, table), columns=1, extra=extra,
            provenance=provenance(group), key=_key(panel, group),
        )  # fmt: skip


def table_panel(cells: Map, bleu: bool) -> Panel:
    """Return the panel of the table, whose title says what the sign of a number means."""
    told = "BLEU" if bleu else "nats above (+) or below (-) the unigram baseline"
    return Panel(f"States, and {told}", "encoder and decoder layers together", "", map=cells)


def with_bleu(table: Frame, group: Runs, measured: Quality) -> Frame:
    """Return the table with a column ``bleu``: the mean over the seeds that did not fail; NaN if all did."""

    def mean(row: Frame) -> float:
        own = group.where(lambda run: layers_in_all(run) == row["depth"] and not failed(run), label=row["arch"])
        scores = [measured.gain(run) for run in own]
        return float(np.mean(scores)) if scores else math.nan

    return table.assign(bleu=[mean(row) for _, row in table.iterrows()])


def _key(panel: Panel, group: Runs) -> str:
    """Explain the content of cells, and footnote recipes."""
    means = {
        "(": "(in parentheses): a seed not 0.25 nats below the baseline, or one that ignores its source",
        "/": "1/3 stuck: one of three seeds",
    }
    recipes = [f"{MARK} {style.title(label)}: {recipe}" for label, recipe in own_recipes(group).items()]
    return " · ".join([*signs([panel], means), *recipes])


def table_map(table: Frame, bleu: bool, apart: Collection[str] = ()) -> Map:
    """Lay out the cells; architectures ``apart`` have a recipe of their own and a mark."""
    archs, depths = list(dict.fromkeys(table["arch"])), sorted(set(table["depth"]))
    z = np.full((len(archs), len(depths)), np.nan)
    finding, text, seeds = np.zeros(z.shape, int), np.full(z.shape, "", object), np.zeros(z.shape, int)
    for row in table.to_dict("records"):
        at = archs.index(row["arch"]), depths.index(row["depth"])
        z[at] = row["bleu" if bleu else "nll_gap"]
        seeds[at] = row["seeds"]
        finding[at] = mark(row["diverged"], row["stuck"], row["seeds"])
        text[at] = brief(row, f"{z[at]:.1f}" if bleu and math.isfinite(z[at]) else "")
    names = [style.title(arch) + (f" {MARK}" if arch in apart else "") for arch in archs]
    return Map(
        [*range(len(depths))], [*range(len(archs))], z, finding, "BLEU" if bleu else "nll - unigram [nats/token]",
        log=False, x_names=[str(depth) for depth in depths], y_names=names, text=text, seeds=seeds,
        centre=None if bleu else 0.0,
    )  # fmt: skip


def _finding(table: Frame) -> str:
    """Say how many architectures came below the baseline at the deepest depth with all seeds, and which failed with
    all; and how many runs failed."""
    depth = int(table["depth"].max())
    deepest = table[table["depth"] == depth]
    below = deepest["trained"] + deepest["learning"] + deepest["ignores_its_source"]  # a language model is below too
    whole = int((below == deepest["seeds"]).sum())
    none = [style.title(row.arch) for row in deepest.itertuples() if row.stuck + row.diverged == row.seeds]
    lost = int(table["stuck"].sum() + table["diverged"].sum())
    seeds = counted([*map(int, deepest["seeds"])])
    parts = [
        f"{whole} of {len(deepest)} architectures were below the unigram baseline with every seed ({seeds})",
        *([f"{', '.join(none)} diverged or got stuck with every seed"] if none else []),
    ]
    total = int(table["seeds"].sum())
    return f"At {depth} layers {'; '.join(parts)}. {lost} of {total} runs diverged or are stuck."


def _notes(runs: Runs, group: Runs, table: Frame) -> list[str]:
    seeds = counted(table["seeds"].tolist())
    notes = [f"Drawn: {group.describe()}; {seeds} a cell. A value is the mean over seeds that did not diverge."]
    notes += states(group)
    notes += recipe_notes(group)
    notes += not_drawn(len(judged(runs)) - len(group), "with other settings")
    return notes


def _long(runs: Runs) -> Runs:
    """Return runs with a verdict of the richest comparable group that were trained long enough, with the protocol's
    ramp."""
    groups = comparable(with_the_protocols_ramp(judged(runs).where(lambda run: run.updates >= LONG)), *LAYERS)
    return groups[0] if groups else Runs([])


def _arm(runs: Runs, label: str, exactly: int | None = None) -> Runs:
    """Return the runs of an architecture with ``exactly`` so many layers a side. None: as deep as divergence is judged
    at, of each seed the shallowest."""
    found = runs.where(lambda run: run.depth >= DEEP if exactly is None else run.depth == exactly, label=label)
    if not found:
        depth = f"{DEEP} layers a side or more" if exactly is None else f"{exactly} layers a side"
        raise MissingRuns(f"needs {label} of {depth}, trained for {LONG:,} updates", COMMAND)
    return Runs({run.seed: run for run in sorted(found, key=lambda run: -run.depth)}.values())


@claim(
    "C34",
    figure="table:stability",
    stage="after training",
    must_read=False,
    paper="DeepNet",
    sentence="A deep Post-LN diverges where DeepNorm, BranchNorm and (18L) Admin train",
    source="DeepNet, BranchNorm and Admin, Tables 1 and 2",
    statistic="share of seeds at which after 3,000 updates Post-LN diverged or is stuck and none of the others is: "
    "Post-LN, DeepNorm and BranchNorm at 50 layers a side or the next depth there is, Admin at 18; beside it each "
    "one's share",
    threshold="R: more than half; X: less than half",
    sweep="table:stability",
    after=NAMED_LATER,
)
@by_gain
def deep_postln_diverges(runs: Runs, gain: str) -> list[Share]:
    labels = (f"postln{gain}", "deepnorm", "branchnorm", "admin")
    long = _long(runs.where(label=labels))
    arms = {label: _arm(long, label, 18 if label == "admin" else None) for label in labels}
    known = {label: {run.seed: run for run in decided(arm)} for label, arm in arms.items()}
    found: dict[int, tuple[int, int]] = {}
    of: list[Record] = []
    for seed in sorted(set.intersection(*({*own} for own in known.values()))):
        postln, *others = (known[label][seed] for label in labels)
        found[seed] = int(failed(postln) and not any(map(failed, others))), 1
        of += [postln, *others]
    deep = [Share(f"{style.title(label)}, {'18L' if label == 'admin' else f'{DEEP}L or more'}, failed",
                  lost_by_seed(arm), of=arm) for label, arm in arms.items()]  # fmt: skip
    alone = "Post-LN failed and none of the others did"
    return [Share(alone, found, Region(low=0.5), Region(high=0.5), of=of), *deep]


@claim(
    "C35",
    figure="table:stability",
    stage="after training",
    must_read=False,
    paper="DeepNet",
    sentence="Admin diverges at 50L-50L",
    source="DeepNet and BranchNorm, Table 1; the Admin repository's 100L-100L recipe says otherwise",
    statistic="share of Admin runs, one a seed, of 50 layers a side or the next depth there is, that diverged or are "
    "stuck after 3,000 updates",
    threshold="R: more than half; X: less than half",
    sweep="table:stability",
)
def admin_diverges(runs: Runs) -> list[Share]:
    own = _arm(_long(runs.where(label="admin")), "admin")
    name = f"Admin, {DEEP}L or more, failed"
    return [Share(name, lost_by_seed(own), Region(low=0.5), Region(high=0.5), of=own)]


@sweep("table:stability", minutes=97, folder="table", command="stabilitylab sweep table")
def every_architecture(ask: Recipe) -> Iterator[Experiment]:
    """Trains every architecture, 6, 18 and 50 layers a side, with the defaults of its preset; at full size with
    BranchNorm's recipe, up to 100 layers a side."""
    yield from table_runs(ask)
