"""Layer dependency, the subject of Admin's maps: the share of each branch in the output of each sub-layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from ....arch_notes import note
from ....experiments import SEEDS, Experiment, Recipe, command, probing
from ....experiments.recipe import AUTHORS
from ... import style
from ...base import NONFINITE, Figure, Map, MissingRuns, Panel, Picture, compared
from ...collection import Record, Runs, pairs
from ...measures.comparison import Pairs, comparable, counted, failed, grouped, left_out
from ...measures.provenance import provenance

TABLE = "branch_variance"
PARTS = ("branch", "shortcut", "total")
MAPPED = (6, 18)  # layers of the paper's maps
MOST_LAYERS = 200  # layers of a map: a map with more cells cannot be read


def variances(record: Record, step: int | None) -> dict[str, np.ndarray]:
    """Return branch, shortcut, total of the encoder's sub-layers from the bottom up, at ``step`` (None: the last)."""
    data = record.at(TABLE, step, PARTS)
    data = data[data["stack_name"] == "encoder"]
    return {part: data[part].to_numpy(float) for part in PARTS}


def own_share(record: Record, step: int | None) -> np.ndarray:
    """Return beta_ii^2 = Var(branch_i) / Var(sum_i) of the encoder's sub-layers."""
    found = variances(record, step)
    return found["branch"] / found["total"]


def dependency_map(found: dict[str, np.ndarray], *, renormalised: bool) -> np.ndarray:
    """Return beta_ij, (i, j), of these variances: the share of branch j in the normalised output i; 0 above the
    diagonal.

    beta_ii^2 = Var(a_i) / Var(s x + a_i). If each sum is ``renormalised`` (Post-LN), beta_ij = beta_{i-1,j} sqrt(1 -
    beta_ii^2); else (Pre-LN) beta_ij = Std(a_j) / Std(sum_i). Branches are assumed to be uncorrelated.
    """
    branch, total = found["branch"], found["total"]
    if not renormalised:
        return np.tril(np.sqrt(branch / total[:, None]))
    share = branch / total
    beta = np.diag(np.sqrt(share))
    for i in range(1, len(share)):
        beta[i, :i] = beta[i - 1, :i] * np.sqrt(np.maximum(0.0, 1 - share[i]))
    return beta


def layer_dependency(record: Record, step: int | None) -> np.ndarray:
    """Return beta_ij of the record's encoder at ``step`` (None: the last)."""
    return dependency_map(variances(record, step), renormalised=_stream(record) != "sum")


def _stream(record: Record) -> str:
    """Return the kind of the record's residual stream; that of Post-LN for an unknown architecture."""
    known = note(style.family(record.label))
    return "norm" if known is None else known.stream


def measured_over_assumed(record: Record, step: int | None) -> float:
    """Return (Var(branch) + Var(shortcut)) / Var(sum), mean over sub-layers: 1 if the two are uncorrelated."""
    found = variances(record, step)
    return float(((found["branch"] + found["shortcut"]) / found["total"]).mean())


class LayerDependency(Figure):
    """Maps of encoders whose depth is nearer to ``layers`` than to the other of MAPPED, as a ratio."""

    layers: ClassVar[int]
    shown: ClassVar[Sequence[str]]  # these labels, if any is there; else all
    papers: ClassVar[Sequence[str]]  # the paper's own among ``shown``; the others are controls

    def picture(self, runs: Runs) -> Picture:
        fit = runs.where(self._is_mapped, table=TABLE)
        groups = comparable(fit)
        if not groups:
            low, high = self._range()
            raise MissingRuns(f"no run with {TABLE} of an encoder of {low} to {high} layers", command(self.id))
        ended = comparable(fit.where(trained))
        group = max(ended or groups, key=self._worth)
        labels = [label for label in self.shown if label in group.labels] or group.labels
        after: Sequence[int | None] = (0, None) if ended else (0,)
        drawn = [(label, step) for label in labels for step in after]
        maps = compared(_panel(group.where(label=label), label, step) for label, step in drawn)
        first = {*self.papers} & {*labels} or {*labels}
        panels, controls = (
            [panel for (label, _), panel in zip(drawn, maps, strict=True) if (label in first) == wanted]
            for wanted in (True, False)
        )
        others = [style.title(label) for label in group.labels if label not in labels]
        notes = [
            f"Drawn: {group.describe()}; each map is the mean over seeds.",
            _validity(group, labels, after[-1]),
            *([f"Not drawn, though there: {', '.join(others)}."] if others else []),
            *left_out(fit, group),
        ]
        return Picture(
            panels, _finding(group, labels, bool(ended)), notes, columns=len(after), controls=controls,
            provenance=provenance(group),
        )  # fmt: skip

    def _worth(self, group: Runs) -> tuple[int, int, float, int]:
        """Return the sort key of a group: the paper's architectures first, then any."""
        papers = len({*self.papers} & {*group.labels})
        return papers, len(group.labels), -_apart(group[0].layers[0], self.layers), len(group)

    def _is_mapped(self, run: Record) -> bool:
        return self._fits(run.layers[0]) and _stream(run) != "mixed"

    def _fits(self, layers: int) -> bool:
        return 0 < layers <= MOST_LAYERS and min(MAPPED, key=lambda n: _apart(layers, n)) == self.layers

    def _range(self) -> tuple[int, int]:
        fitting = [layers for layers in range(1, MOST_LAYERS + 1) if self._fits(layers)]
        return fitting[0], fitting[-1]


def _apart(layers: int, other: int) -> float:
    return abs(math.log(layers / other))


def trained(run: Record) -> bool:
    """True if the run trained without failing, has an encoder, and recorded the branches after step 0."""
    if run.kind != "train" or failed(run) or not run.layers[0]:
        return False
    data = run.at(TABLE, None, ["total"])
    return len(data) > 0 and data["step"].iloc[0] > 0


def _panel(runs: Runs, label: str, step: int | None) -> Panel:
    beta = np.mean([layer_dependency(record, step) for record in runs], axis=0)
    places = list(range(1, len(beta) + 1))
    below = np.tri(len(beta), dtype=bool)
    lost = np.where(below & ~np.isfinite(beta), NONFINITE, 0).astype(np.int8)
    z = np.where(below, beta, np.nan)
    heat = Map(places, places, z, lost, "beta", log=False, seeds=len(runs.seeds), square=True)
    return Panel(f"{style.title(label)}, {'initial' if step == 0 else 'trained'}", "branch j", "output i", map=heat)


def _sums(record: Record, step: int | None) -> float:
    """Return the mean of sum_j beta_ij^2 over the upper half of outputs."""
    squares = (layer_dependency(record, step) ** 2).sum(1)
    return float(squares[len(squares) // 2 :].mean())


def _validity(group: Runs, labels: Sequence[str], step: int | None) -> str:
    own = {label: group.where(label=label) for label in labels}
    words = [
        f"{style.title(label)} {np.mean([_sums(run, step) for run in of]):.2f} and "
        f"{np.mean([measured_over_assumed(run, step) for run in of]):.2f}"
        for label, of in own.items()
    ]
    when = "at initialisation" if step == 0 else "after training"
    return (
        "Sum of beta^2 over branches in the upper half (1 less the embedding's share), and (branch + shortcut) / sum "
        f"(1 where they do not correlate), {when}: {'; '.join(words)}."
    )


def upper(record: Record, step: int | None) -> float:
    """Return the mean of beta_ii^2 over the last half of the sub-layers."""
    share = own_share(record, step)
    return float(share[len(share) // 2 :].mean())


def _finding(group: Runs, labels: Sequence[str], trained: bool) -> str:
    words = []
    for label in labels:
        own = group.where(label=label)
        steps: Sequence[int | None] = (0, None) if trained else (0,)
        means = [f"{np.mean([upper(record, step) for record in own]):.2g}" for step in steps]
        words.append(f"{style.title(label)} {' to '.join(means)}")
    when = "from initialisation to the end of training" if trained else "at initialisation"
    found, seeds = ", ".join(words), counted(len(group.seeds))
    return f"Share (beta_ii^2) of a sub-layer's own branch in the upper half, {when}: {found} ({seeds})."


def trained_pairs(runs: Runs, first: str, second: str) -> Pairs:
    """Return the pairs of runs of two labels, by seed, that trained; of all comparable groups that with most pairs."""
    fit = runs.where(lambda run: run.verdict == "trained" and trained(run), label=(first, second), table=TABLE)
    found = [pairs(group.where(label=first), group.where(label=second)) for group in grouped(fit)]
    return max(found, key=len, default=[])


ARCHS = ("postln", "preln", "admin")
WMT = {"train": {"lr": 1e-3, "warmup": 8000, "steps": 500_000, "accumulate": 8, "weight_decay": 0.0}}


def trained_branches(ask: Recipe, layers: int) -> Iterator[Experiment]:
    """Trains ``layers`` a side, recording the variance of every branch."""
    probes = probing(TABLE)
    if ask.tiny:
        recipe = {"train": {"lr": 7e-4, "warmup": 150, "steps": 600}}
        yield from ask.runs(ARCHS, [layers], recipe, probes, seeds=SEEDS[:3])
    else:
        yield from ask.runs(ARCHS, [layers], AUTHORS, WMT, probes, tag="radam")
