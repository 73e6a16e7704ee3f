"""Admin, Figure 4: the change of the output when the weights change, against depth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from ....experiments import Experiment, Recipe, command, sweep
from ....experiments.one_step import from_initialisation
from ... import style
from ...arrange import apart
from ...base import Figure, MissingRuns, Panel, Picture, Series, figure
from ...claims import NAMED_LATER, Effect, claim, together
from ...collection import LAYERS, Record, Runs
from ...measures.by_label import by_label
from ...measures.comparison import comparable, counted, hidden, left_out, nothing_drawn
from ...measures.provenance import provenance
from ...measures.quality import even
from ...statistics import Region, aic, slope
from .figure_3 import FAST

TABLE = "perturbation"
KINDS = {"random": "random, 1e-4", "gradient": "along the gradient, 1e-6"}
PAPERS = ("postln", "preln", "admin")  # the paper's own three
FITTED = (*PAPERS, "deepnorm", "branchnorm T=1")  # one of each initialisation: equal models must not count twice
FEWEST = 4  # depths through which a growth is fitted
DEEPEST = 50  # layers a side up to which all architectures were measured
SUBLAYERS = 2  # of an encoder layer


def output_changes(record: Record) -> dict[str, float]:
    """Return the mean square change of the encoder's normalised output, by kind of perturbation; NaN without an
    encoder."""
    data = record.at(TABLE, 0, [*KINDS])
    data = data[(data["stack_name"] == "encoder") & (data["layer"] == 0)]
    return {kind: float(data[kind].iloc[0]) if len(data) else math.nan for kind in KINDS}


def output_change(record: Record) -> float:
    """Return the change under random perturbation."""
    return output_changes(record)["random"]


def encoder_layers(runs: Runs) -> list[int]:
    return sorted({record.layers[0] for record in runs})


def one_step(runs: Runs) -> tuple[Runs, list[str]]:
    """Return the richest group of one-step runs with perturbed encoders that differ only in depth, architecture and
    seed, and a note on the runs that it leaves out."""
    fit = runs.where(lambda run: run.layers[0] > 0 and even(run), kind="onestep", table=TABLE)
    groups = comparable(fit, *LAYERS)
    if not groups:
        raise MissingRuns("no one-step run with a perturbed encoder", command("admin:4"))
    best = max(groups, key=lambda g: (len(encoder_layers(g)), len(g.labels), len(g)))
    return best, left_out(fit, best)


@figure("admin:4", title="Output change under perturbed weights", source="Admin, Figure 4 and Theorem 2")
class OutputChange(Figure):
    """The squared change of x / std(x) in the encoder, mean over tokens and d, when its weight matrices move by 1e-4
    sign(N(0, 1)) or by 1e-6 sign(gradient): at the final output by depth, and at each sub-layer of the deepest encoder.

    The paper sums over the batch, so its levels are not comparable. Inferred: the paper's points belong to one
    100-layer encoder.
    """

    def picture(self, runs: Runs) -> Picture:
        group, others = one_step(runs)
        changes = {record: output_changes(record) for record in group}
        deepest, along = _deepest(group)
        ticks = [SUBLAYERS * n for n in encoder_layers(group)]
        zero = sorted({style.title(run.label) for run, change in changes.items() if change["random"] == 0})
        panels = [
            *(_final(changes, f"Final output, {name}", kind, ticks) for kind, name in KINDS.items()),
            *(_along(along, f"Along a {deepest}-layer encoder, {name}", kind) for kind, name in KINDS.items()),
        ]
        random = {record: change["random"] for record, change in changes.items()}
        notes = [f"Drawn: {group.describe()}, float64. Lines are geometric means over seeds, bands their range."]
        main, controls = apart(panels, PAPERS)
        return Picture(
            main,
            _finding(random),
            [*notes, *_first_alpha(group), *nothing_drawn(zero), *hidden(panels), *others],
            controls=controls,
            provenance=provenance(group),
        )


def _deepest(group: Runs) -> tuple[int, Runs]:
    """Return the deepest encoders for which most of the paper's architectures exist."""
    by_depth = {n: group.where(lambda run, n=n: run.layers[0] == n) for n in encoder_layers(group)}
    most = max(by_depth, key=lambda n: (len(by_depth[n].where(label=PAPERS).labels), n))
    return most, by_depth[most]


def _final(changes: Mapping[Record, Mapping[str, float]], title: str, kind: str, ticks: list[int]) -> Panel:
    def place(record: Record) -> dict[float, float]:
        return {SUBLAYERS * record.layers[0]: found} if (found := changes[record][kind]) != 0 else {}

    return _panel(title, "encoder sub-layers", by_label(Runs(changes), place, log=True), ticks)


def _along(runs: Runs, title: str, kind: str) -> Panel:
    def values(record: Record) -> dict[float, float]:
        data = record.at(TABLE, 0, [kind])
        found = data.loc[(data["stack_name"] == "encoder") & (data["layer"] > 0), kind].tolist()
        return dict(enumerate(found, 1)) if any(found) else {}

    return _panel(title, "sub-layer", by_label(runs, values, log=True))


def _first_alpha(group: Runs) -> list[str]:
    """Return a note on BranchNorm's alpha: at the first row its branches are nearly closed, so it lies far below the
    others."""
    known = (run.metrics["alpha"].iloc[0] for run in group.where(label="branchnorm") if "alpha" in run.metrics)
    alphas = sorted({float(alpha) for alpha in known if alpha == alpha})
    return [f"BranchNorm stands at alpha = {', '.join(f'{alpha:.2g}' for alpha in alphas)}."] if alphas else []


def _panel(title: str, x: str, lines: list[Series], ticks: list[int] | None = None) -> Panel:
    return Panel(title, x, "mean square change", lines, log_x=True, log_y=True, ticks=ticks or ())


def growth(changes: Mapping[Record, float]) -> dict[int, dict[str, float]]:
    """Fit the output's change in runs that differ only in depth and seed, seed by seed: the exponent of N ("power"),
    and the AIC of a + b N ("linear") and of a + b log N ("log"), N the encoder's layers. Seeds with too few depths are
    left out."""
    found = {}
    for seed in {record.seed: None for record in changes}:
        own = {record.layers[0]: change for record, change in changes.items() if record.seed == seed and change > 0}
        if len(own) >= FEWEST:
            depth, change = (np.array(values, float) for values in zip(*sorted(own.items()), strict=True))
            power = slope(np.log(depth).tolist(), np.log(change).tolist())
            found[seed] = {"power": power, "linear": aic(depth, change), "log": aic(np.log(depth), change)}
    return found


def _finding(changes: Mapping[Record, float]) -> str:
    group = Runs(changes)
    words, seeds = [], counted(len(group.seeds))
    for label in (*PAPERS, "deepnorm", "branchnorm"):
        fits = growth({record: change for record, change in changes.items() if record.label == label}).values()
        if fits:
            words.append(f"{style.title(label)} as N^{np.mean([fit['power'] for fit in fits]):.2f}")
    if words:
        return f"Under random perturbation the output's change goes with depth: {', '.join(words)} ({seeds})."
    deepest, own = _deepest(group)
    levels = [
        f"{style.title(label)} {np.mean([changes[record] for record in own.where(label=label)]):.1e}"
        for label in own.labels
    ]
    return (
        f"Mean square change of a {deepest}-layer encoder's output under random perturbation: {', '.join(levels)} "
        f"({seeds})."
    )


def _growth_of(runs: Runs, label: str) -> tuple[dict[int, dict[str, float]], Runs]:
    group = one_step(runs)[0].where(label=label)
    found = growth({record: output_change(record) for record in group})
    if not found:
        raise MissingRuns(f"needs one-step runs of {label} at {FEWEST} depths or more")
    return found, group


def _advantage(found: dict[int, dict[str, float]], winner: str, loser: str) -> dict[int, float]:
    return {seed: fit[loser] - fit[winner] for seed, fit in found.items()}


@claim(
    "C27",
    figure="admin:4",
    stage="initialisation",
    paper="Admin",
    sentence="Post-LN's output change is O(N)",
    source="Admin, Corollary 2 and Fig. 4",
    statistic="exponent of N in the output's change; beside it the AIC of a + b log N minus that of a + b N",
    threshold="R: exponent in [.8, 1.3]; X: > 1.3 (the plan names no X: ours)",
    sweep=FAST,
    pilot="exponent 1.5",
)
def postln_is_linear(runs: Runs) -> list[Effect]:
    found, group = _growth_of(runs, "postln")
    power = {seed: fit["power"] for seed, fit in found.items()}
    return [
        Effect("exponent", power, Region(0.8, 1.3), Region(low=1.3), of=group),
        Effect("AIC(log) - AIC(linear)", _advantage(found, "linear", "log"), of=group),
    ]


@claim(
    "C28",
    figure="admin:4",
    stage="initialisation",
    paper="Admin",
    sentence="Pre-LN's and Admin's output change is O(log N)",
    source="Admin, Corollary 1",
    statistic="AIC of a + b N minus that of a + b log N for the output's change against depth, the smaller of Pre-LN's "
    "and Admin's; beside it each, and the exponents of N",
    threshold="R: > 4; X: < -4 (the plan names another X, an exponent > .7: ours)",
    sweep=FAST,
    pilot="exponents .59 and .43",
    after=NAMED_LATER,
)
def preln_and_admin_are_logarithmic(runs: Runs) -> list[Effect]:
    apart, exponents = [], []
    for label in ("preln", "admin"):
        found, group = _growth_of(runs, label)
        name, power = style.title(label), {seed: fit["power"] for seed, fit in found.items()}
        apart.append(Effect(f"AIC(linear) - AIC(log), {name}", _advantage(found, "log", "linear"), of=group))
        exponents.append(Effect(f"exponent, {name}", power, of=group))
    smaller = together("AIC(linear) - AIC(log), the smaller", apart, np.min, Region(low=4), Region(high=-4))
    return [smaller, *apart, *exponents]


def deepnorm_beta(n: int, m: int) -> float:
    """Return beta of DeepNet, Figure 2, for an encoder of n layers below m of a decoder; repeated here, since reports
    import no model."""
    return 0.87 * (n**4 * m) ** (-1 / 16) if m else (8 * n) ** -0.25


def dependency(record: Record) -> float:
    """Return the sum of beta_ii^2 of the encoder at initialisation, beta_ii^2 = Var(branch) / Var(sum)."""
    data = record.at("branch_variance", 0, ["branch", "total"])
    data = data[data["stack_name"] == "encoder"]
    return float((data["branch"] / data["total"]).sum())


def relative_dependency(record: Record) -> float:
    """Return the sum of beta_ii^2 / g^2, g the gain of the branches' initial weights. The relative change of the
    weights moves a branch, and equal steps change small weights by more."""
    drawn_small = style.family(record.label) in ("deepnorm", "branchnorm")
    return dependency(record) / (deepnorm_beta(*record.layers) if drawn_small else 1.0) ** 2


@claim(
    "C29",
    figure="admin:4",
    stage="initialisation",
    paper="Admin",
    sentence="The output's change is proportional to the sum of beta_ii^2",
    source="Admin, Theorem 2",
    statistic="change = C sum beta_ii^2 / g^2 through the origin over Post-LN, Pre-LN, Admin, DeepNorm and BranchNorm "
    "at alpha = 1 and depths up to 50 layers, g the initial gain (DeepNorm's beta, or 1): coefficient of variation of "
    "C; beside it R^2 = 1 - RSS / sum of squares",
    threshold="R: variation < .3; X: > 1 (the plan names no X: ours)",
    sweep=FAST,
    pilot="C d = 1.0e-4 to 1.6e-4, Post-LN up to 2.7e-4; closed form .8e-4",
)
def change_follows_dependency(runs: Runs) -> list[Effect]:
    fit = runs.where(lambda run: run.depth <= DEEPEST, label=FITTED, table="branch_variance")
    group, _ = one_step(fit)
    share: dict[int, float] = {}
    variation: dict[int, float] = {}
    for seed in group.seeds:
        own = group.where(seed=seed)
        if len(own.labels) < 2 or len(own) < FEWEST:
            continue
        x, y = (np.array([measure(run) for run in own]) for measure in (relative_dependency, output_change))
        constant = float(x @ y / (x @ x))
        share[seed] = 1 - float(((y - constant * x) ** 2).sum() / (y**2).sum())
        variation[seed] = float((y / x).std(ddof=1) / (y / x).mean())
    if not share:
        raise MissingRuns("needs one-step runs of several architectures and depths")
    return [
        Effect("variation of C", variation, Region(high=0.3), Region(low=1), of=group),
        Effect("R^2 through the origin", share, of=group),
    ]


@sweep("admin:4", minutes=26, folder="claims:fast", command="stabilitylab claims --fast")
def perturbed_models(ask: Recipe) -> Iterator[Experiment]:
    """Steps once with eight architectures, and two with gain 1, 3 to 50 layers a side; at full size up to 100."""
    yield from from_initialisation(ask)
