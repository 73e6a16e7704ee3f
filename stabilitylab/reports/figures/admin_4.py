"""Admin, Figure 4: how far the output moves when the weights do, against depth."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...experiments import command
from .. import style
from ..base import Figure, MissingRuns, Panel, Picture, Spread, figure
from ..claims import Effect, claim
from ..collection import LAYERS, Record, Runs
from ..statistics import Region, slope

TABLE = "perturbation"
KINDS = {"random": "random, 1e-4", "gradient": "along the gradient, 1e-6"}
PAPERS = ("postln", "preln", "admin")  # the paper's own three
SUBLAYERS = 2  # of an encoder layer
FAST = "claims:fast"


def output_change(record: Record, column: str = "random") -> float:
    """Mean square change of the encoder's normalised output; NaN without an encoder."""
    data = record.at(TABLE, 0, [column])
    found = data.loc[(data["stack"] == "encoder") & (data["layer"] == 0), column].to_numpy(float)
    return float(found[0]) if len(found) else math.nan


def one_step(runs: Runs) -> Runs:
    """The richest group of one-step runs with perturbations that differ in depth, architecture and seed alone."""
    groups = runs.where(kind="onestep", table=TABLE).groups(*LAYERS)
    if not groups:
        raise MissingRuns("no one-step run with perturbations", command("admin:4"))
    return max(groups, key=lambda g: (len(g.depths), len(g.labels), len(g)))


@figure("admin:4", title="Output change under perturbed weights", source="Admin, Figure 4 and Theorem 2")
class OutputChange(Figure):
    """Mean over tokens and d of the squared change of x / std(x) in the encoder when its weight matrices move by
    1e-4 sign(N(0, 1)), or 1e-6 sign(gradient): final output by depth, and at each sub-layer of the deepest encoder.

    The paper sums over the batch, so its levels are not comparable. Inferred: its points are one 100-layer encoder's.
    """

    def picture(self, runs: Runs) -> Picture:
        group = one_step(runs)
        panels = [
            Panel(
                f"Final output, {name}", "encoder sub-layers", "mean square change",
                [_by_depth(group.where(label=label), label, column) for label in group.labels],
                log_x=True, log_y=True, ticks=[SUBLAYERS * n for n in group.depths],
            )
            for column, name in KINDS.items()
        ]  # fmt: skip
        most = max(len(group.where(lambda run, n=n: run.depth == n, label=PAPERS).labels) for n in group.depths)
        deepest = max(
            n for n in group.depths if len(group.where(lambda run, n=n: run.depth == n, label=PAPERS).labels) == most
        )
        panels.append(_along(group.where(lambda run: run.depth == deepest), deepest))
        notes = [f"Drawn: {group.describe()}, float64. Lines are geometric means over seeds, bands their range."]
        return Picture(panels, _finding(group), notes, columns=3)


def _by_depth(runs: Runs, label: str, column: str):
    spread = Spread(log=True)
    for record in runs:
        spread.add([SUBLAYERS * record.depth], [output_change(record, column)])
    return spread.series(style.title(label), arch=label)


def _along(runs: Runs, depth: int) -> Panel:
    lines = []
    for label in runs.labels:
        spread = Spread(log=True)
        for record in runs.where(label=label):
            data = record.at(TABLE, 0, ["random"])
            data = data[(data["stack"] == "encoder") & (data["layer"] > 0)]
            spread.add(list(range(1, len(data) + 1)), data["random"].tolist())
        lines.append(spread.series(style.title(label), arch=label))
    title = f"Along a {depth}-layer encoder, random"
    return Panel(title, "sub-layer", "mean square change", lines, log_x=True, log_y=True)


def growth(group: Runs, label: str) -> dict[int, dict[str, float]]:
    """Seed -> exponent of N, and AIC of a + b N and of a + b log N, of the final output's change (random)."""
    found = {}
    for seed in group.seeds:
        points = sorted((r.depth, output_change(r)) for r in group if r.label == label and r.seed == seed)
        if len(points) > 3:
            depth, change = (np.array(values, float) for values in zip(*points, strict=True))
            power = slope(np.log(depth).tolist(), np.log(change).tolist())
            found[seed] = {"power": power, "linear": aic(depth, change), "log": aic(np.log(depth), change)}
    return found


def aic(x: Sequence[float] | np.ndarray, y: np.ndarray) -> float:
    """n log(residual variance) + 2 k of the least-squares line of y on x, k = 3 (two coefficients and the variance)."""
    residual = y - np.polyval(np.polyfit(x, y, 1), x)
    return float(len(y) * math.log(max(np.mean(residual**2), 1e-300)) + 2 * 3)


def _finding(group: Runs) -> str:
    found = {label: growth(group, label) for label in ("postln", "preln", "admin", "deepnorm")}
    words = [
        f"{style.title(label)} as N^{np.mean([fit['power'] for fit in by_seed.values()]):.2f}"
        for label, by_seed in found.items()
        if by_seed
    ]
    return (
        f"The output's change grows with depth: {', '.join(words)}." if words else "Growth needs four depths or more."
    )


def _growth_of(runs: Runs, label: str) -> dict[int, dict[str, float]]:
    found = growth(one_step(runs), label)
    if not found:
        raise MissingRuns(f"needs one-step runs of {label} at four depths or more")
    return found


def _advantage(found: dict[int, dict[str, float]], winner: str, loser: str) -> dict[int, float]:
    return {seed: fit[loser] - fit[winner] for seed, fit in found.items()}


@claim(
    "C27",
    figure="admin:4",
    paper="Admin",
    sentence="Post-LN's output change is O(N)",
    source="Admin, Corollary 2 and Fig. 4",
    statistic="AIC of a + b log N minus that of a + b N for the output's change against depth; exponent of N",
    threshold="R: > 4, and exponent in [.8, 1.3]; X: < -4, or exponent > 1.3 (the plan names no X: ours)",
    sweep=FAST,
    pilot="exponent 1.5",
)
def postln_is_linear(runs: Runs) -> list[Effect]:
    found = _growth_of(runs, "postln")
    return [
        Effect("AIC(log) - AIC(linear)", _advantage(found, "linear", "log"), Region(low=4), Region(high=-4)),
        Effect("exponent", {seed: fit["power"] for seed, fit in found.items()}, Region(0.8, 1.3), Region(low=1.3)),
    ]


@claim(
    "C28",
    figure="admin:4",
    paper="Admin",
    sentence="Pre-LN's and Admin's output change is O(log N)",
    source="Admin, Corollary 1",
    statistic="AIC of a + b N minus that of a + b log N for the output's change against depth; exponent of N",
    threshold="R: > 4 for both; X: exponent > .7 for either",
    sweep=FAST,
    pilot="exponents .59 and .43",
)
def preln_and_admin_are_logarithmic(runs: Runs) -> list[Effect]:
    effects = []
    for label in ("preln", "admin"):
        found, name = _growth_of(runs, label), style.title(label)
        power = {seed: fit["power"] for seed, fit in found.items()}
        effects.append(Effect(f"AIC(linear) - AIC(log), {name}", _advantage(found, "log", "linear"), Region(low=4)))
        effects.append(Effect(f"exponent, {name}", power, Region(high=0.7), Region(low=0.7)))
    return effects


def deepnorm_beta(n: int, m: int) -> float:
    """DeepNet, Figure 2, for the encoder; written once more here, since reports import no model."""
    return 0.87 * (n**4 * m) ** (-1 / 16)


def dependency(record: Record) -> float:
    """sum_i beta_ii^2 of the encoder at initialisation, beta_ii^2 = Var(branch) / Var(sum)."""
    data = record.at("branch_variance", 0, ["branch", "sum"])
    data = data[data["stack"] == "encoder"]
    return float((data["branch"] / data["sum"]).sum())


@claim(
    "C29",
    figure="admin:4",
    paper="Admin",
    sentence="The output's change is proportional to the sum of beta_ii^2",
    source="Admin, Theorem 2",
    statistic="change = C sum beta_ii^2 / g^2 through the origin over architectures and depths, g the initial gain "
    "(DeepNorm's beta, or 1): R^2, and coefficient of variation of C",
    threshold="R: R^2 > .9 and variation < .3; X: variation > 1 (the plan names no X: ours)",
    sweep=FAST,
    pilot="C d = 1.0e-4 to 1.6e-4, Post-LN up to 2.7e-4; closed form .8e-4",
)
def change_follows_dependency(runs: Runs) -> list[Effect]:
    group = one_step(runs.where(lambda run: run.label != "postln-init", table="branch_variance"))
    fit: dict[int, float] = {}
    variation: dict[int, float] = {}
    for seed in group.seeds:
        points = []
        for record in group.where(lambda run, seed=seed: run.seed == seed):
            drawn_small = style.family(record.label) in ("deepnorm", "branchnorm") or record.label.endswith("+beta")
            gain = deepnorm_beta(*record.layers) if drawn_small else 1.0
            total = dependency(record)
            if total > 0 and record.label != "branchnorm alpha=0":
                points.append((total / gain**2, output_change(record)))
        if len(points) > 3:
            x, y = (np.array(values) for values in zip(*points, strict=True))
            constant = float(x @ y / (x @ x))
            fit[seed] = 1 - float(((y - constant * x) ** 2).sum() / (y**2).sum())
            variation[seed] = float((y / x).std(ddof=1) / (y / x).mean())
    if not fit:
        raise MissingRuns("needs one-step runs of several architectures and depths")
    return [
        Effect("R^2 through the origin", fit, Region(low=0.9)),
        Effect("variation of C", variation, Region(high=0.3), Region(low=1)),
    ]
