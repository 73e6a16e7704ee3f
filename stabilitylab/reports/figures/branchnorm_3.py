"""BranchNorm, Figure 3: gradient norm and loss at the very beginning, and what makes the gradient smooth."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .. import style
from ..base import Figure, MissingRuns, Panel, Picture, Series, Spread, figure
from ..claims import Effect, claim
from ..collection import Record, Runs, pairs
from ..layerwise import STACKS, largest_group, layer_values
from ..statistics import Region, signed_rank

LEAST = 200  # updates that the decomposition needs one by one
BEGINNING = 500  # updates that are drawn; the paper says "the very beginning" and no number
PROFILE_STEPS = (1, 10, 100)
PROFILE_DASHES = ("dotted", "dashed", "solid")
METRICS = ("grad_norm_total", "nll")


def non_branch(record: Record) -> np.ndarray:
    """(i) The norm over the parameters outside the branches, undivided."""
    return _column(record, "grad_norm_nonbranch")


def decoder_branches(record: Record) -> np.ndarray:
    """(ii) The decoder's branch weights over alpha, to which their gradient is proportional; NaN where alpha is 0."""
    return _column(record, "grad_norm_branch_decoder") / _alpha(record)


def encoder_branches(record: Record) -> np.ndarray:
    """(iii) The encoder's branch weights over alpha squared: cross-attention multiplies by alpha once more."""
    return _column(record, "grad_norm_branch_encoder") / _alpha(record) ** 2


PARTS: dict[str, tuple[Callable[[Record], np.ndarray], str]] = {
    "not in a branch": (non_branch, "solid"),
    "decoder branches / alpha": (decoder_branches, "dashed"),
    "encoder branches / alpha²": (encoder_branches, "dotted"),
}


def _column(record: Record, name: str) -> np.ndarray:
    data = record.metrics
    return data[name].to_numpy(float) if name in data else np.full(len(data), np.nan)


def _alpha(record: Record) -> np.ndarray:
    """alpha_t of BranchNorm, 1 for every other architecture."""
    alpha = np.nan_to_num(_column(record, "alpha"), nan=1.0)
    return np.where(alpha == 0, np.nan, alpha)


def _steps(record: Record) -> np.ndarray:
    return record.metrics["step"].to_numpy(int)


def complete(record: Record, last: int) -> bool:
    """Is the norm without the branch weights on record at each of the steps 0 to ``last``?"""
    here = _steps(record) <= last
    return bool(here.sum() == last + 1 and np.isfinite(_column(record, "grad_norm_nonbranch")[here]).all())


@figure("branchnorm:3", title="Gradient norm and loss at the beginning", source="BranchNorm, Figure 3")
class Beginning(Figure):
    """Global L2 norm of the gradient over all parameters before clipping, and the unsmoothed training loss in bits.

    Inferred from the labels (fairseq's gnorm and nll_loss): the paper states neither model nor data nor range. The norm
    holds branch weights, whose gradient alpha_t multiplies; the third panel takes that apart.
    """

    def picture(self, runs: Runs) -> Picture:
        fit = runs.where(lambda run: {*METRICS} <= {*run.metrics} and len(run.metrics) > 1)
        whole = fit.where(lambda run: complete(run, min(LEAST, len(run.metrics) - 1)))
        group, notes = largest_group(whole or fit, ["grad_norm"], self.id)
        panels = [_beginning(group), *_profiles(group), _parts(group)]
        return Picture(panels, _finding(group), notes)


def _beginning(group: Runs) -> Panel:
    lines: list[Series] = []
    for label in group.labels:
        norm, loss = Spread(log=True), Spread()
        for record in group.where(label=label):
            here = _steps(record) < BEGINNING
            steps = _steps(record)[here].tolist()
            norm.add(steps, _column(record, "grad_norm_total")[here].tolist())
            loss.add(steps, (_column(record, "nll")[here] / math.log(2)).tolist())
        name = style.title(label)
        lines += [
            norm.series(name, arch=label, dash="solid", detail="gradient norm"),
            loss.series(name, arch=label, dash="dotted", right=True, detail="loss"),
        ]
    return Panel(
        "Gradient norm and training loss", "update", "global gradient norm (L2)", lines,
        log_y=True, right="training nll [bits/token]",
    )  # fmt: skip


def _profiles(group: Runs) -> list[Panel]:
    """Each layer's gradient norm at steps 1, 10 and 100, a panel a stack."""
    panels = []
    for stack in STACKS:
        lines = []
        for label in group.labels:
            for step, dash in zip(PROFILE_STEPS, PROFILE_DASHES, strict=True):
                spread = Spread(log=True)
                for record in group.where(label=label):
                    values = layer_values(record, "grad_norm", "value", stack, step)
                    spread.add([*values], [*values.values()])
                if spread.points:
                    lines.append(spread.series(style.title(label), arch=label, dash=dash, detail=f"step {step}"))
        if lines:
            title = f"{stack.capitalize()} layers at steps {', '.join(map(str, PROFILE_STEPS))}"
            panels.append(Panel(title, f"{stack} layer", "gradient norm (L2)", lines, log_y=True))
    return panels


def _parts(group: Runs) -> Panel:
    lines = []
    for label in group.labels:
        if style.family(label) not in ("branchnorm", "deepnorm"):
            continue
        for part, (values, dash) in PARTS.items():
            spread = Spread(log=True)
            for record in group.where(label=label):
                known = np.isfinite(values(record)) & (_steps(record) < BEGINNING)
                spread.add(_steps(record)[known].tolist(), values(record)[known].tolist())
            if spread.points:
                lines.append(spread.series(style.title(label), arch=label, dash=dash, detail=part))
    return Panel("Taken apart", "update", "gradient norm (L2)", lines, log_y=True)


def _finding(group: Runs) -> str:
    dense = group.where(lambda run: complete(run, LEAST))
    compared = pairs(dense.where(label="branchnorm"), dense.where(label="deepnorm"))
    if not compared:
        names = ", ".join(map(style.title, group.labels))
        return f"The first updates of {names}; whether BranchNorm is smoother than DeepNorm needs {LEAST} of both, each recorded."
    seeds = "one seed" if len(compared) == 1 else f"{len(compared)} seeds"
    whole, part = (
        math.exp(np.mean([math.log(roughness(a, values) / roughness(b, values)) for _, a, b in compared]))
        for values in (total, non_branch)
    )
    return (
        f"From step to step BranchNorm's log gradient norm moves {whole:.2f} times as much as DeepNorm's, and "
        f"{part:.2f} times without the branch weights ({seeds})."
    )


def total(record: Record) -> np.ndarray:
    """The global gradient norm."""
    return _column(record, "grad_norm_total")


def roughness(record: Record, values: Callable[[Record], np.ndarray]) -> float:
    """Standard deviation of successive differences of the log norm over steps 1 to 200."""
    steps = _steps(record)
    here = (steps >= 1) & (steps <= 200)
    moves = np.diff(np.log(values(record)[here]))
    return float(moves.std(ddof=1)) if len(moves) > 1 else math.nan


def _early(runs: Runs, least: int) -> list[tuple[int, Record, Record]]:
    """BranchNorm and DeepNorm by seed, where every one of the first updates is on record."""
    both = runs.where(kind="train", label=("branchnorm", "deepnorm"))
    groups = both.where(lambda run: complete(run, least)).groups()
    found = max((pairs(g.where(label="branchnorm"), g.where(label="deepnorm")) for g in groups), key=len, default=[])
    if not found:
        raise MissingRuns(f"needs runs of branchnorm and deepnorm of more than {least} updates, every step recorded")
    return found


@claim(
    "C09",
    figure="branchnorm:3",
    paper="BranchNorm",
    sentence="BranchNorm's gradient norm is smoother than DeepNorm's at the very beginning",
    source="BranchNorm, Fig. 3",
    statistic="standard deviation of successive differences of the log gradient norm over steps 1-200, "
    "BranchNorm / DeepNorm; of all parameters and of those outside the branches",
    threshold="R: ratio < .8 in both; X: > 1 in either",
    sweep="branchnorm:3",
)
def smoother_gradients(runs: Runs) -> list[Effect]:
    compared = _early(runs, 200)
    found = []
    for name, values in (("all parameters", total), ("outside the branches", non_branch)):
        ratio = {seed: roughness(a, values) / roughness(b, values) for seed, a, b in compared}
        p = signed_rank([math.log(each) for each in ratio.values()])
        found.append(Effect(f"ratio, {name}", ratio, Region(high=0.8), Region(low=1), log=True, p=p))
    return found


@claim(
    "C10",
    figure="branchnorm:3",
    paper="BranchNorm",
    sentence="BranchNorm's loss falls as fast as DeepNorm's or faster at the beginning",
    source="BranchNorm, Fig. 3",
    statistic="mean training nll over steps 1-499, BranchNorm - DeepNorm [nats/token]",
    threshold="R: < 0; X: > 0",
    sweep="branchnorm:3",
    pilot="8.08 against 7.39 at step 12 (24L, T = 4000)",
)
def faster_loss(runs: Runs) -> list[Effect]:
    gap = {
        seed: float(np.mean(_column(a, "nll")[1:BEGINNING]) - np.mean(_column(b, "nll")[1:BEGINNING]))
        for seed, a, b in _early(runs, BEGINNING - 1)
    }
    return [Effect("difference of the mean nll", gap, Region(high=0), Region(low=0), p=signed_rank([*gap.values()]))]


def _unevenness(record: Record) -> float:
    """max / min over the decoder's layers of ||dE/dx_l|| at initialisation, x_l the layer's output.

    Without the top layer: its gradient has not passed a LayerNorm, which removes two directions once for all below.
    """
    data = record.at("activation_grad_norm", 0, ["value"])
    data = data[(data["stack"] == "decoder") & (data["sublayer"] == "ffn")]
    values = data.loc[data["layer"] < data["layer"].max(), "value"].to_numpy(float)
    return float(values.max() / values.min()) if len(values) else float("nan")


def _at_initialisation(runs: Runs, label: str) -> dict[int, Record]:
    """By seed, the one-step runs (float64) of ``label`` with the depth at which most seeds have alpha = 0."""
    ready = runs.where(kind="onestep", table="activation_grad_norm")
    depths = [run.layers for run in ready.where(label="branchnorm alpha=0")]
    if not depths:
        raise MissingRuns("needs one-step runs with alpha = 0")
    found = ready.where(label=label, layers=max(set(depths), key=depths.count)).by_seed()
    if not found:
        raise MissingRuns(f"needs one-step runs of {label!r} at the depth of those with alpha = 0")
    return found


@claim(
    "C07",
    figure="branchnorm:3",
    paper="BranchNorm",
    sentence="At alpha = 0 the gradient dE/dx_l is the same in all layers",
    source="BranchNorm, Eq. 9",
    statistic="max / min over decoder layers of ||dE/dx_l|| in float64, at alpha = 0 and at alpha = 1/4000",
    threshold="R: < 1.0001; X: > 1.05",
    sweep="claims:fast",
    pilot="1.0000 at alpha = 0; 1.000003 at 1/4000",
)
def identical_gradients(runs: Runs) -> list[Effect]:
    found = {
        name: {seed: _unevenness(run) for seed, run in _at_initialisation(runs, label).items()}
        for name, label in (("alpha = 0", "branchnorm alpha=0"), ("alpha = 1/T", "branchnorm"))
    }
    return [
        Effect(f"max / min at {name}", values, Region(high=1.0001), Region(low=1.05), log=True)
        for name, values in found.items()
    ]


@claim(
    "C08",
    figure="branchnorm:3",
    paper="BranchNorm",
    sentence="... and it is alpha_t that does it, not the initialisation",
    source="implied by BranchNorm, Sec. 3.2",
    statistic="max / min of ||dE/dx_l|| at alpha = 1 with the same initialisation, minus that at alpha = 0",
    threshold="R: > .5; X: < .1",
    sweep="claims:fast",
    pilot=".015",
)
def due_to_alpha(runs: Runs) -> list[Effect]:
    still, full = (_at_initialisation(runs, label) for label in ("branchnorm alpha=0", "branchnorm T=1"))
    gap = {seed: _unevenness(full[seed]) - _unevenness(still[seed]) for seed in sorted(full.keys() & still.keys())}
    return [Effect("difference of max / min", gap, Region(low=0.5), Region(high=0.1), p=signed_rank([*gap.values()]))]
