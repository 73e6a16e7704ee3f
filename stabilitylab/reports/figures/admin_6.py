"""Admin, Figures 6 and 7: how much of each sub-layer's output comes from which branch."""

from __future__ import annotations

import math

import numpy as np

from ...experiments import command
from .. import style
from ..base import Figure, Map, MissingRuns, Panel, Picture, figure
from ..claims import Effect, claim
from ..collection import Record, Runs
from ..statistics import Region, slope

TABLE = "branch_variance"
SHOWN = ("postln", "preln", "admin", "deepnorm", "branchnorm")
WIDEST = 48  # sub-layers of a map that a reader can still tell apart


def variances(record: Record, step: int | None) -> dict[str, np.ndarray]:
    """branch, shortcut, sum of the encoder's sub-layers from the bottom up, at ``step`` (None: the last)."""
    data = record.at(TABLE, step, ["branch", "shortcut", "sum"])
    data = data[data["stack"] == "encoder"]
    return {column: data[column].to_numpy(float) for column in ("branch", "shortcut", "sum")}


def own_share(record: Record, step: int | None) -> np.ndarray:
    """beta_ii^2 = Var(branch_i) / Var(sum_i) of the encoder's sub-layers."""
    found = variances(record, step)
    return found["branch"] / found["sum"]


def dependency_map(record: Record, step: int | None) -> np.ndarray:
    """beta_ij, (i, j): the share of branch j in the normalised output i; 0 above the diagonal.

    beta_ii^2 = Var(a_i) / Var(s x + a_i); Post-LN: beta_ij = beta_{i-1,j} sqrt(1 - beta_ii^2); Pre-LN, whose stream is
    never renormalised: beta_ij = Std(a_j) / Std(sum_i). Branches are taken to be uncorrelated.
    """
    found = variances(record, step)
    count = len(found["sum"])
    beta = np.zeros((count, count))
    for i in range(count):
        beta[i, i] = math.sqrt(found["branch"][i] / found["sum"][i])
        if style.family(record.label) == "preln":
            beta[i, :i] = np.sqrt(found["branch"][:i] / found["sum"][i])
        elif i:
            beta[i, :i] = beta[i - 1, :i] * math.sqrt(max(0.0, 1 - beta[i, i] ** 2))
    return beta


@figure("admin:6", title="Layer dependency of the encoder", source="Admin, Figures 6 and 7")
class LayerDependency(Figure):
    """beta_ij: the share (standard deviation) of residual branch j in the normalised output of sub-layer i.

    At initialisation and, where a training run recorded branch_variance, after training. What is missing from
    sum_j beta_ij^2 = 1 is the embedding's share, or correlation between branches, which the definition leaves out.
    """

    def picture(self, runs: Runs) -> Picture:
        fit = runs.where(lambda run: 0 < 2 * run.layers[0] <= WIDEST, table=TABLE)
        trained, fresh = fit.where(kind="train").groups(), fit.groups()
        if not fresh:
            raise MissingRuns("no run with branch_variance", command("branchnorm:8"))
        group = trained[0] if trained else max(fresh, key=lambda g: (len(g.labels), -abs(g[0].depth - 6), len(g)))
        panels = []
        for label in (label for label in SHOWN if label in group.labels):
            own = group.where(label=label)
            panels.append(_panel(own, f"{style.title(label)}, initial", 0))
            if trained:
                panels.append(_panel(own, f"{style.title(label)}, trained", None))
        if not panels:
            raise MissingRuns("no run of postln, preln, admin, deepnorm or branchnorm with branch_variance")
        notes = [f"Drawn: {group.describe()}; each map is the mean over seeds.", _validity(group, bool(trained))]
        return Picture(panels, _finding(group, bool(trained)), notes, columns=4 if trained else 3)


def _panel(runs: Runs, title: str, step: int | None) -> Panel:
    beta = np.mean([dependency_map(record, step) for record in runs], axis=0)
    places = list(range(1, len(beta) + 1))
    shown = np.where(np.tri(len(beta), dtype=bool), beta, np.nan)
    heat = Map(places, places, shown, np.zeros(shown.shape, np.int8), "beta", log=False)
    return Panel(title, "branch j", "output i", map=heat)


def _sums(record: Record, step: int | None) -> float:
    """Mean over the upper half of outputs of sum_j beta_ij^2."""
    squares = (dependency_map(record, step) ** 2).sum(1)
    return float(squares[len(squares) // 2 :].mean())


def _validity(group: Runs, trained: bool) -> str:
    step = None if trained else 0
    means = {label: np.mean([_sums(r, step) for r in group.where(label=label)]) for label in group.labels}
    return "Sum of beta^2 over branches, upper half: " + ", ".join(
        f"{style.title(label)} {value:.2f}" for label, value in means.items()
    )


def _upper(record: Record, step: int | None) -> float:
    """Mean beta_ii^2 over the last half of the sub-layers."""
    share = own_share(record, step)
    return float(share[len(share) // 2 :].mean())


def _finding(group: Runs, trained: bool) -> str:
    words = []
    for label in (label for label in SHOWN if label in group.labels):
        first = np.mean([_upper(record, 0) for record in group.where(label=label)])
        text = f"{style.title(label)} {first:.2f}"
        if trained:
            text += f" to {np.mean([_upper(record, None) for record in group.where(label=label)]):.2f}"
        words.append(text)
    when = "from initialisation to the end of training" if trained else "at initialisation"
    return f"Share (beta_ii^2) of a sub-layer's own branch in the upper half, {when}: {', '.join(words)}."


@claim(
    "C30",
    figure="admin:6",
    paper="Admin",
    sentence="Admin sets beta_ii^2 to about 1/i",
    source="Admin, Sec. 4.3",
    statistic="slope of log beta_ii^2 on log i over the encoder's sub-layers at initialisation, deepest model",
    threshold="R: in [-1.2, -.8]; X: > -.5 (the plan names no X: ours)",
    sweep="claims:fast",
)
def admin_shares(runs: Runs) -> list[Effect]:
    fit = runs.where(label="admin", table=TABLE)
    chosen = fit.where(kind="onestep") or fit
    if not chosen:
        raise MissingRuns("needs one-step runs of admin")
    deepest = chosen.where(lambda run: run.depth == max(chosen.depths))
    found = {}
    for seed, record in deepest.by_seed().items():
        share = own_share(record, 0)
        found[seed] = slope(np.log(np.arange(1, len(share) + 1)).tolist(), np.log(share).tolist())
    return [Effect(f"slope, {deepest[0].depth}L", found, Region(-1.2, -0.8), Region(low=-0.5))]


@claim(
    "C31",
    figure="admin:6",
    paper="Admin",
    sentence="Post-LN relies on its own branch more than Pre-LN, at initialisation and after training",
    source="Admin, Figs. 6 and 7",
    statistic="mean beta_ii^2 of the last half of the encoder's sub-layers, Post-LN / Pre-LN, 18L at initialisation "
    "and the trained models",
    threshold="R: > 2 at initialisation and > 1.2 trained; X: < 1 at either (the plan names no X: ours)",
    sweep="branchnorm:8",
    pilot="4.2 at initialisation (18L)",
)
def own_branch(runs: Runs) -> list[Effect]:
    fit = runs.where(label=("postln", "preln"), table=TABLE)
    fresh, trained = fit.where(kind="onestep", layers=(18, 18)), fit.where(kind="train").groups()
    found = [Effect("at initialisation, 18L", _ratio(fresh, 0), Region(low=2), Region(high=1), log=True)]
    ratio = _ratio(trained[0], None) if trained else {}
    if not found[0].values or not ratio:
        raise MissingRuns("needs postln and preln with branch_variance, as one-step runs of 18 layers and trained")
    return [*found, Effect("trained", ratio, Region(low=1.2), Region(high=1), log=True)]


def _ratio(runs: Runs, step: int | None) -> dict[int, float]:
    first, second = (runs.where(label=label).by_seed() for label in ("postln", "preln"))
    return {
        seed: _upper(first[seed], step) / _upper(second[seed], step) for seed in sorted(first.keys() & second.keys())
    }
