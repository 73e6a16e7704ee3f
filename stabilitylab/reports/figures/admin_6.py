"""Admin, Figures 6 and 7: how much of each sub-layer's output comes from which branch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...experiments import command
from .. import style
from ..base import NONFINITE, Figure, Map, MissingRuns, Panel, Picture, figure
from ..claims import Effect, claim
from ..collection import LAYERS, Record, Runs, pairs
from ..layerwise import comparable, counted, failed
from ..statistics import Region, signed_rank, slope
from .admin_3 import DEPTH, FAST, at_initialisation, left_out

TABLE = "branch_variance"
PARTS = ("branch", "shortcut", "sum")
SHOWN = ("postln", "preln", "admin", "deepnorm", "branchnorm")
PAPER_DEPTH = 6  # layers of the paper's first maps
MOST_LAYERS = 200  # of a map: more cells than that are no picture


def variances(record: Record, step: int | None) -> dict[str, np.ndarray]:
    """branch, shortcut, sum of the encoder's sub-layers from the bottom up, at ``step`` (None: the last)."""
    data = record.at(TABLE, step, PARTS)
    data = data[data["stack"] == "encoder"]
    return {part: data[part].to_numpy(float) for part in PARTS}


def own_share(record: Record, step: int | None) -> np.ndarray:
    """beta_ii^2 = Var(branch_i) / Var(sum_i) of the encoder's sub-layers."""
    found = variances(record, step)
    return found["branch"] / found["sum"]


def dependency_map(found: dict[str, np.ndarray], *, renormalised: bool) -> np.ndarray:
    """beta_ij, (i, j), of these variances: the share of branch j in the normalised output i; 0 above the diagonal.

    beta_ii^2 = Var(a_i) / Var(s x + a_i); where each sum is ``renormalised`` (Post-LN),
    beta_ij = beta_{i-1,j} sqrt(1 - beta_ii^2); else (Pre-LN) beta_ij = Std(a_j) / Std(sum_i). Branches are taken to be
    uncorrelated.
    """
    branch, total = found["branch"], found["sum"]
    if not renormalised:
        return np.tril(np.sqrt(branch / total[:, None]))
    share = branch / total
    beta = np.diag(np.sqrt(share))
    for i in range(1, len(share)):
        beta[i, :i] = beta[i - 1, :i] * np.sqrt(np.maximum(0.0, 1 - share[i]))
    return beta


def layer_dependency(record: Record, step: int | None) -> np.ndarray:
    """beta_ij of the record's encoder at ``step`` (None: the last)."""
    return dependency_map(variances(record, step), renormalised=style.family(record.label) != "preln")


def measured_over_assumed(record: Record, step: int | None) -> float:
    """(Var(branch) + Var(shortcut)) / Var(sum), mean over sub-layers: 1 where the two are uncorrelated."""
    found = variances(record, step)
    return float(((found["branch"] + found["shortcut"]) / found["sum"]).mean())


@figure("admin:6", title="Layer dependency of the encoder", source="Admin, Figures 6 and 7")
class LayerDependency(Figure):
    """beta_ij: the share (standard deviation) of residual branch j in the normalised output of sub-layer i.

    At initialisation and, where a training run recorded branch_variance, after training. What is missing from
    sum_j beta_ij^2 = 1 is the embedding's share, or correlation between branches, which the definition leaves out.
    """

    def picture(self, runs: Runs) -> Picture:
        fit = runs.where(lambda run: 0 < run.layers[0] <= MOST_LAYERS, table=TABLE)
        groups = comparable(fit)
        if not groups:
            deeper = runs.where(table=TABLE, test=lambda run: run.layers[0] > 0)
            reason = f" of at most {MOST_LAYERS} encoder layers" if deeper else " of an encoder"
            raise MissingRuns(f"no run with {TABLE}{reason}", command("branchnorm:8"))
        trained = comparable(fit.where(_trained))
        rank = trained or groups
        group = max(rank, key=lambda g: (len(g.labels), -abs(g[0].layers[0] - PAPER_DEPTH), len(g)))
        labels = [label for label in SHOWN if label in group.labels] or group.labels
        after: Sequence[int | None] = (0, None) if trained else (0,)
        panels = [_panel(group.where(label=label), label, step) for label in labels for step in after]
        notes = [
            f"Drawn: {group.describe()}; each map is the mean over seeds.",
            _validity(group, labels, after[-1]),
            *left_out(fit, group),
        ]
        return Picture(panels, _finding(group, labels, bool(trained)), notes, columns=2 if trained else 3)


def _trained(run: Record) -> bool:
    """Did it learn, and record the branches after that?"""
    if run.kind != "train" or failed(run):
        return False
    data = run.at(TABLE, None, ["sum"])
    return len(data) > 0 and data["step"].iloc[0] > 0


def _panel(runs: Runs, label: str, step: int | None) -> Panel:
    beta = np.mean([layer_dependency(record, step) for record in runs], axis=0)
    places = list(range(1, len(beta) + 1))
    below = np.tri(len(beta), dtype=bool)
    lost = np.where(below & ~np.isfinite(beta), NONFINITE, 0).astype(np.int8)
    heat = Map(places, places, np.where(below, beta, np.nan), lost, "beta", log=False)
    return Panel(f"{style.title(label)}, {'initial' if step == 0 else 'trained'}", "branch j", "output i", map=heat)


def _sums(record: Record, step: int | None) -> float:
    """Mean over the upper half of outputs of sum_j beta_ij^2."""
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


def _upper(record: Record, step: int | None) -> float:
    """Mean beta_ii^2 over the last half of the sub-layers."""
    share = own_share(record, step)
    return float(share[len(share) // 2 :].mean())


def _finding(group: Runs, labels: Sequence[str], trained: bool) -> str:
    words = []
    for label in labels:
        own = group.where(label=label)
        steps: Sequence[int | None] = (0, None) if trained else (0,)
        means = [f"{np.mean([_upper(record, step) for record in own]):.2g}" for step in steps]
        words.append(f"{style.title(label)} {' to '.join(means)}")
    when = "from initialisation to the end of training" if trained else "at initialisation"
    found, seeds = ", ".join(words), counted(len(group.seeds))
    return f"Share (beta_ii^2) of a sub-layer's own branch in the upper half, {when}: {found} ({seeds})."


@claim(
    "C30",
    figure="admin:6",
    paper="Admin",
    sentence="Admin sets beta_ii^2 to about 1/i",
    source="Admin, Sec. 4.3",
    statistic="slope of log beta_ii^2 on log i over the encoder's sub-layers at initialisation, deepest model",
    threshold="R: in [-1.2, -.8]; X: > -.5 (the plan names no X: ours)",
    sweep=FAST,
)
def admin_shares(runs: Runs) -> list[Effect]:
    fit = runs.where(lambda run: run.layers[0] > 1, label="admin", table=TABLE)
    groups = fit.where(kind="onestep").groups(*LAYERS) or fit.where(kind="train").groups(*LAYERS)
    if not groups:
        raise MissingRuns("needs admin with branch_variance at initialisation")
    group = max(groups, key=lambda g: max(run.layers[0] for run in g))
    most = max(run.layers[0] for run in group)
    found = {}
    for seed, record in group.where(lambda run: run.layers[0] == most).by_seed().items():
        share = own_share(record, 0)
        found[seed] = slope(np.log(np.arange(1, len(share) + 1)).tolist(), np.log(share).tolist())
    return [Effect(f"slope, {most}L", found, Region(-1.2, -0.8), Region(low=-0.5))]


@claim(
    "C31",
    figure="admin:6",
    paper="Admin",
    sentence="Post-LN relies on its own branch more than Pre-LN, at initialisation and after training",
    source="Admin, Figs. 6 and 7",
    statistic="mean beta_ii^2 of the last half of the encoder's sub-layers, Post-LN / Pre-LN, 18L at initialisation "
    "and in models that trained",
    threshold="R: > 2 at initialisation and > 1.2 trained; X: < 1 at either (the plan names no X: ours)",
    sweep="branchnorm:8",
    pilot="4.2 at initialisation (18L)",
)
def own_branch(runs: Runs) -> list[Effect]:
    fresh = [at_initialisation(runs, label, DEPTH, TABLE) for label in ("postln", "preln")]
    seeds = sorted(fresh[0].keys() & fresh[1].keys())
    initial = {seed: _upper(fresh[0][seed], 0) / _upper(fresh[1][seed], 0) for seed in seeds}
    fit = runs.where(lambda run: run.verdict == "trained" and _trained(run), label=("postln", "preln"), table=TABLE)
    trained: dict[int, float] = {}
    for group in fit.groups():
        both = pairs(group.where(label="postln"), group.where(label="preln"))
        trained = max(trained, {seed: _upper(a, None) / _upper(b, None) for seed, a, b in both}, key=len)
    if not initial or not trained:
        missing = "18 layers a side, one-step" if not initial else f"one depth that trained, with {TABLE}"
        raise MissingRuns(f"needs postln and preln of the same seeds: {missing}")
    return [
        _effect("at initialisation, 18L", initial, Region(low=2)),
        _effect("trained", trained, Region(low=1.2)),
    ]


def _effect(name: str, ratio: dict[int, float], reproduced: Region) -> Effect:
    p = signed_rank(np.log([*ratio.values()]).tolist())
    return Effect(name, ratio, reproduced, Region(high=1), log=True, p=p)
