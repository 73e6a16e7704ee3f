"""Probes of backpropagation: the gradient norms of parameters and of activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..base import Collected, Numbers, ParameterProbe, Probe, probe
from ..parameters.pieces import GROUPS, Parameters
from ..parameters.squares import WideNorm
from ..places.sites import Site, stream
from ..rules import Norm, Total


@probe(
    "grad_norm",
    on="step",
    unit="L2 norm",
    total="norm",
    columns={"value": Norm(), **{group: Norm() for group in GROUPS}},
    default=True,
    log=True,
)
class GradNorm(ParameterProbe):
    """The gradient norm ||dE/dtheta||_2 of each sub-layer, its norm and omega included (``value``), and of four groups
    of its parameters: the weights of v, out and FFN (``vo_ffn``), the weights of q and k (``qk``), biases (``bias``),
    and the gains and biases of norms (``ln``). Gradients are taken before clipping and after unscaling, for the loss E
    as the caller normalised it. DeepNet, Figs. 3, 4d.

    If a model does not name the roles of its parameters, ``vo_ffn`` is missing, and ``qk`` is there only where queries
    and keys can be told from the rest. Look for an attention whose qk is far below its value: its attention is uniform,
    since the keys are nearly identical (rank collapse).
    """

    in_step = True

    def fitting(self, parameters: Parameters) -> Sequence[str]:
        return ("value", *filter(self.keeps, parameters.groups))

    def collect(self, parameters: Parameters) -> Collected:
        gradients = parameters.gradients()
        sums = parameters.in_step()
        squares = parameters.squares(gradients) if sums is None else sums[:, 0].contiguous()
        metrics: dict[str, Total] = {}
        if any(gradient is not None for gradient in gradients):
            metrics["grad_norm_total"] = Total(Norm(), squares.sum().view(1, 1))
            metrics |= {f"grad_norm_{kind}": norm for kind, norm in parameters.by_kind(squares).items()}
        # which takes longer than the norms, so the standard set goes without
        if self.kept is None and (share := parameters.share_under_eps(sums)) is not None:
            metrics["grad_under_eps"] = share
        groups = ("", *filter(self.keeps, parameters.groups))  # "": all of a row
        columns = {group or "value": parameters.by_row(squares, group) for group in groups}
        return Collected(columns, parameters.seen(gradients, groups), metrics, {"gradient": squares})


@probe(
    "activation_grad_norm",
    on="backward",
    at=stream,
    unit="Frobenius norm",
    columns={"value": Norm()},
    default=True,
    log=True,
)
class ActivationGradNorm(Probe):
    """The gradient norm ||dE/dx_l||_F of the stream, over the whole (batch, tokens, width) tensor that enters the stack
    (layer 0) or leaves each sub-layer (or layer, where sub-layers are not known). Micro-batches add their squares.
    Where layers return a branch that the model adds to the stream, it is the gradient of the branch.
    Admin, Fig. 3 (there relative to the largest)."""

    together = True

    def __init__(self) -> None:
        self._norm = WideNorm()

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        return self._norm(y)

    def measure_together(self, values: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(torch._foreach_norm(values, 2, dtype=torch.float64))  # pyright: ignore
