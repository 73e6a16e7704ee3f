"""Leaks: outputs that depend on inputs after them, or on inputs of other samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .bounds import BOUNDS, not_checked, weigh
from .result import Check
from .seen import UNSEEN, Seen

FUTURE, SAMPLE = "future leak", "sample leak"
STILL = "the output does not depend on the input yet, as above a layer of zeros"
EITHER = (
    "outputs depend on each other along the first dimension and not along the second: say batch_first=False if samples "
    "lie along the second; with batch_first=True this is a leak"
)


@dataclass(frozen=True)
class Axes:
    """The dimension along which samples lie, in the output and in the inputs."""

    output: int
    input: int


def samples(seen: Seen, batch_first: bool | None) -> tuple[Check, Axes | None]:
    """Check the gradient of each end of the batch with respect to the inputs of all samples; return the axes of
    samples, too.

    ``batch_first``: True if samples lie along the first of an output's three dimensions, False for the second; None if
    unknown. The axes are None if they could not be found.
    """
    output, leaves = seen.output, seen.leaves
    if output is None:
        return not_checked(SAMPLE, "the model returns no tensor beside its loss"), None
    if not leaves:
        return not_checked(SAMPLE, f"{UNSEEN}, and it has no floating-point inputs"), None
    if not torch.isfinite(output).all():
        return not_checked(SAMPLE, "the output is not finite"), None
    if output.dim() == 2 and output.shape[0] == output.shape[1] and _compares(seen):
        return not_checked(SAMPLE, f"the output is {output.shape[0]} x {output.shape[1]}: it compares samples"), None
    known = batch_first is not None and output.dim() > 2
    tried: dict[Axes, float] = {}
    for axes in (Axes(0, 0), Axes(1, 1), Axes(0, 1), Axes(1, 0)):
        if known and axes.output == batch_first:
            continue
        share = _between_samples(output, leaves, axes)
        if share is not None:
            tried[axes] = share
            if share <= BOUNDS[SAMPLE, "fail"].limit:
                if axes.output and not known and Axes(0, 0) in tried:
                    return not_checked(SAMPLE, EITHER), None
                where = f" along dimension {axes.output} of the output" if axes.output else ""
                return weigh(SAMPLE, share, f"samples{where} do not depend on each other"), axes
    if not tried:
        sizes = "x".join(map(str, output.shape))
        return not_checked(SAMPLE, f"an output of {sizes} does not have the samples of the inputs, or {STILL}"), None
    axes, share = next(iter(tried.items()))
    n = output.shape[axes.output]
    return weigh(SAMPLE, share, f"{share:.2g} of the gradient of one sample's output is of the other {n - 1}"), None


def _compares(seen: Seen) -> bool:
    """True if a square output is a table of samples against samples: the n-th belongs to the n-th."""
    call = seen.main
    if call is None or call.target.is_floating_point():
        return True
    return torch.equal(call.target, torch.arange(len(call.target), device=call.target.device))


def _between_samples(output: Tensor, leaves: Sequence[Tensor], axes: Axes) -> float | None:
    """Return the largest gradient of other samples over the largest of all; None without two samples, or without a
    gradient."""
    if axes.output == 1 and output.dim() < 3:
        return None
    n = output.shape[axes.output]
    own = [leaf for leaf in leaves if leaf.dim() > max(axes.input, 1) and leaf.shape[axes.input] == n]
    if n < 2 or not own:
        return None
    worst = None
    for place in (0, n - 1):
        norms = _norms(output.select(axes.output, place), own, axes.input)
        if norms is None:
            continue
        others = torch.cat([norms[:place], norms[place + 1 :]])
        share = float(others.max() / norms.max())
        worst = share if worst is None else max(worst, share)
    return worst


def future(
    seen: Seen, axes: Axes | None, predicts_next: Sequence[Tensor], causal: bool | None
) -> tuple[Check, bool | None]:
    """Check the gradient of outputs at up to four places with respect to inputs after them, over that of all inputs.

    ``predicts_next``: the leaves whose next token is the label. The check is made if there are any, or if the caller
    says ``causal``. Returns also True if the output depends on no later input; None if that is unknown.
    """
    output = seen.output
    if causal is False:
        return not_checked(FUTURE, "causal=False was given"), None
    if output is None or axes is None:
        return not_checked(FUTURE, "the dimension of the samples was not found (see sample leak)"), None
    time_out, time_in = 1 - axes.output, 1 - axes.input
    leaves = predicts_next or seen.leaves
    shares = [share for leaf in leaves if (share := _ahead(output, leaf, time_out, time_in)) is not None]
    if not shares:
        sizes = "x".join(map(str, output.shape))
        return not_checked(FUTURE, f"an output of {sizes} does not have the places of the inputs, or {STILL}"), None
    least = min(shares)  # an encoder-decoder may see the encoder's inputs whole
    found = least <= BOUNDS[FUTURE, "fail"].limit
    if not predicts_next and causal is None:
        why = "the labels are not the next tokens of the input: say causal=True if outputs must not see later inputs"
        return not_checked(FUTURE, why), found
    share = f"{least:.2g} of the gradient of an output is of inputs after it"
    return weigh(FUTURE, least, share if least else "no output depends on a later input"), found


def _ahead(output: Tensor, leaf: Tensor, time_out: int, time_in: int) -> float | None:
    if output.dim() < 3 or leaf.dim() < 3:
        return None
    n = output.shape[time_out]
    if n < 2 or leaf.shape[time_in] != n:
        return None
    worst = None
    for place in sorted({0, n // 3, min(2 * n // 3, n - 2), n - 2}):
        norms = _norms(output.select(time_out, place), [leaf], time_in)
        if norms is not None:
            share = float(norms[place + 1 :].max() / norms.max())
            worst = share if worst is None else max(worst, share)
    return worst


def _norms(part: Tensor, leaves: Sequence[Tensor], axis: int) -> Tensor | None:
    """Return ||dS/dx|| by place along ``axis``, all leaves together, of a random sum S of a part of the output; None if
    all are 0, or if one is not finite."""
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(part.shape, generator=draw, dtype=torch.float64).to(part.device, part.dtype)
    gradients = torch.autograd.grad((part * weights).sum(), leaves, retain_graph=True, allow_unused=True)
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            own = gradient.detach().double().movedim(axis, 0).flatten(1).square().sum(dim=1)
            total = own if total is None else total + own
    if total is None or not torch.isfinite(total).all() or not total.max() > 0:
        return None
    return total.sqrt()
