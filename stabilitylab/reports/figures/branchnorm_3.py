"""BranchNorm, Figure 3: gradient norm and loss at the very beginning, and what makes the gradient smooth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .. import style
from ..base import Figure, Panel, Picture, Series, Spread, figure
from ..collection import Record, Runs, pairs
from ..layerwise import STACKS, counted, hidden, largest_group

LEAST = 200  # updates that the comparison of roughness needs one by one
BEGINNING = 500  # updates that are drawn; the paper says "the very beginning" and no number
PROFILES = {1: "dotted", 10: "dashed", 100: "solid"}
NEAR = 0.1  # a profile is drawn at a probed step at most this share away from the one that is meant
TOTAL, LOSS, OUTSIDE = "grad_norm_total", "nll", "grad_norm_nonbranch"
Values = Callable[[Record], np.ndarray]


def total(record: Record) -> np.ndarray:
    """The global gradient norm."""
    return column(record, TOTAL)


def non_branch(record: Record) -> np.ndarray:
    """(i) The norm over the parameters outside the branches, undivided."""
    return column(record, OUTSIDE)


def decoder_branches(record: Record) -> np.ndarray:
    """(ii) The decoder's branch weights over alpha, to which their gradient is proportional; NaN where alpha is 0."""
    return column(record, "grad_norm_branch_decoder") / _alpha(record)


def encoder_branches(record: Record) -> np.ndarray:
    """(iii) The encoder's branch weights over alpha squared: cross-attention multiplies by alpha once more."""
    return column(record, "grad_norm_branch_encoder") / _alpha(record) ** 2


PARTS: dict[str, tuple[Values, str]] = {
    "not in a branch": (non_branch, "solid"),
    "decoder branches / alpha": (decoder_branches, "dashed"),
    "encoder branches / alpha²": (encoder_branches, "dotted"),
}


def column(record: Record, name: str) -> np.ndarray:
    """A metric of every row; NaN where the run does not have it."""
    data = record.metrics
    return data[name].to_numpy(float) if name in data else np.full(len(data), np.nan)


def _alpha(record: Record) -> np.ndarray:
    """alpha_t of BranchNorm, 1 for every other architecture."""
    alpha = np.nan_to_num(column(record, "alpha"), nan=1.0)
    return np.where(alpha == 0, np.nan, alpha)


def steps_of(record: Record) -> np.ndarray:
    return record.metrics["step"].to_numpy(int)


def complete(record: Record, name: str, last: int) -> bool:
    """Is this metric on record, and finite, at each of the steps 0 to ``last``?"""
    here = steps_of(record) <= last
    return bool(here.sum() == last + 1 and np.isfinite(column(record, name)[here]).all())


def roughness(record: Record, values: Values) -> float:
    """Standard deviation of successive differences of the log norm over steps 1 to 200; NaN where it is undefined."""
    steps = steps_of(record)
    with np.errstate(divide="ignore", invalid="ignore"):
        moves = np.diff(np.log(values(record)[(steps >= 1) & (steps <= LEAST)]))
    moved = float(moves.std(ddof=1)) if len(moves) > 1 and np.isfinite(moves).all() else 0.0
    return moved or math.nan


@figure("branchnorm:3", title="Gradient norm and loss at the beginning", source="BranchNorm, Figure 3")
class Beginning(Figure):
    """Global L2 norm of the gradient over all parameters before clipping, and the unsmoothed training loss in bits.

    Inferred from the labels (fairseq's gnorm and nll_loss): the paper states neither model nor data nor range. The norm
    holds branch weights, whose gradient alpha_t multiplies; the third panel takes that apart.
    """

    def picture(self, runs: Runs) -> Picture:
        fit = runs.where(lambda run: {TOTAL, LOSS} <= {*run.metrics} and len(run.metrics) > 1)
        dense = fit.where(lambda run: complete(run, OUTSIDE, LEAST))
        group, notes = largest_group(dense or fit, ["grad_norm"], self.id, between=("deepnorm", "branchnorm"))
        if dense and len(fit) > len(dense):
            notes.append(f"Not drawn: {len(fit) - len(dense)} without the norm of each of the first {LEAST} updates.")
        panels = [panel for panel in (_beginning(group), *_profiles(group), _parts(group)) if panel.series]
        return Picture(panels, _finding(group), [*notes, *hidden(panels)])


def _line(group: Runs, label: str, values: Values, log: bool, **look: object) -> Series | None:
    """The first updates of all runs of a label; rows without the value (the one after training) are left out."""
    spread = Spread(log=log)
    for record in group.where(label=label):
        found, steps = values(record), steps_of(record)
        known = ~np.isnan(found) & (steps < BEGINNING)
        spread.add(steps[known].tolist(), found[known].tolist())
    return spread.series(style.title(label), arch=label, **look) if spread.points else None


def _beginning(group: Runs) -> Panel:
    lines = []
    for label in group.labels:
        lines += [
            _line(group, label, total, True, dash="solid", detail="gradient norm"),
            _line(group, label, bits, False, dash="dotted", right=True, detail="loss"),
        ]
    return Panel(
        "Gradient norm and training loss", "update", "global gradient norm (L2)", [line for line in lines if line],
        log_y=True, right="training nll [bits, base 2]",
    )  # fmt: skip


def bits(record: Record) -> np.ndarray:
    """The training nll a token in bits, as fairseq's nll_loss; the store has nats."""
    return column(record, LOSS) / math.log(2)


def _profiles(group: Runs) -> list[Panel]:
    """Each layer's gradient norm at steps 1, 10 and 100, or at probed steps next to them; a panel a stack."""
    found: dict[tuple[str, str, int, int], Spread] = {}
    for record in group:
        data = record.frame("grad_norm", ["value"], by="layer")
        data = data.loc[data["layer"] > 0]
        for meant, step in _probed(np.unique(data["step"].to_numpy())).items():
            for stack, own in data.loc[data["step"] == step].groupby("stack_name", observed=True):
                spread = found.setdefault((str(stack), record.label, meant, step), Spread(log=True))
                spread.add(own["layer"].tolist(), own["value"].tolist())
    panels = []
    for stack in STACKS:
        lines = [
            spread.series(style.title(label), arch=label, dash=PROFILES[meant], detail=f"step {step}")
            for (place, label, meant, step), spread in found.items()
            if place == stack
        ]
        steps = sorted({step for place, _, _, step in found if place == stack})
        title = f"{stack.capitalize()} layers at step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
        panels.append(Panel(title, f"{stack} layer", "gradient norm (L2)", lines, log_y=True))
    return panels


def _probed(steps: Sequence[int] | np.ndarray) -> Mapping[int, int]:
    """The step that is meant -> the probed step that stands for it, where there is one."""
    nearest = {meant: int(min(steps, key=lambda step: abs(step - meant))) for meant in PROFILES if len(steps)}
    return {meant: step for meant, step in nearest.items() if abs(step - meant) <= NEAR * meant}


def _parts(group: Runs) -> Panel:
    lines = [
        _line(group, label, values, True, dash=dash, detail=part)
        for label in group.labels
        if style.family(label) in ("branchnorm", "deepnorm")
        for part, (values, dash) in PARTS.items()
    ]
    return Panel("Taken apart", "update", "gradient norm (L2)", [line for line in lines if line], log_y=True)


def _finding(group: Runs) -> str:
    dense = group.where(lambda run: complete(run, OUTSIDE, LEAST))
    compared = pairs(dense.where(label="branchnorm"), dense.where(label="deepnorm"))
    moved = {
        values: [roughness(a, values) / roughness(b, values) for _, a, b in compared] for values in (total, non_branch)
    }
    known = [both for both in zip(*moved.values(), strict=True) if np.isfinite(both).all()]
    if not known:
        return _course(group)
    whole, part = np.exp(np.mean(np.log(known), axis=0))
    return (
        f"From step to step BranchNorm's log gradient norm moves {whole:.2f} times as much as DeepNorm's, and "
        f"{part:.2f} times without the branch weights ({counted(len(known))})."
    )


def _course(group: Runs) -> str:
    """Where gradient norm and loss begin and where they get to, for runs that leave nothing to compare."""
    parts = []
    for label in group.labels:
        norm, loss = _line(group, label, total, True), _line(group, label, bits, False)
        if norm and loss:
            parts.append(
                f"{style.title(label)} goes from {norm.y[0]:.3g} to {norm.y[-1]:.3g} in gradient norm and from "
                f"{loss.y[0]:.2f} to {loss.y[-1]:.2f} bits within {loss.x[-1]:g} updates ({counted(norm.seeds)})"
            )
    return f"{'; '.join(parts) or 'No gradient norm is on record'}."
