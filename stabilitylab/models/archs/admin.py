"""Admin: a trained vector on the shortcut, set by a calibration pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UsageError
from ..base import Place, arch
from ..sublayers import SubLayer
from .postln import PostLN


@arch("admin", title="Admin", colour="#009E73", marker="P", rank=60, gains="base", family="The papers' own")
class Admin(PostLN):
    r"""x_i = LN(omega_i x_{i-1} + f_i(x_{i-1})), omega_i a trained vector.  Admin (Liu et al. 2020).

    omega_i is set by a calibration in one pass, as in the authors' code: omega_i <- r, then r <- sqrt(Var(omega_i
    x_{i-1}) + Var(f_i)), with r = 1 before the first sub-layer of each stack. Var is the population variance over all
    elements, those of padding included.
    """

    needs_calibration = True
    learns = "omega: d a sub-layer"
    omega: Tensor

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        self.omega = nn.Parameter(torch.ones(place.width))

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        return self.norm(self.shortcut(self.omega * x) + self.branch(self.f(x, *context)))

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        """Return the constant that the package admin-torch has in the place of the profiled omega, sqrt((n + 1) / ln(n
        + 1) - 1) for n sub-layers of a stack; nothing here uses it."""
        n = place.stack_sublayers
        return {"omega of admin-torch, not used here": math.sqrt((n + 1) / math.log(n + 1) - 1)}

    @staticmethod
    @contextmanager
    def calibrating(residuals: Sequence[Admin]) -> Iterator[None]:
        variance = torch.ones((), dtype=torch.float64, device=residuals[0].omega.device)

        def enter(residual: nn.Module, _inputs: Any) -> None:
            nonlocal variance
            assert isinstance(residual, Admin)
            residual.omega.copy_(variance.sqrt())
            variance = torch.zeros_like(variance)

        def tap(_tap: nn.Module, _inputs: Any, output: Tensor) -> None:
            nonlocal variance
            variance = variance + output.double().var(correction=0)

        with ExitStack() as hooks:
            for residual in residuals:
                for handle in (
                    residual.register_forward_pre_hook(enter),
                    residual.shortcut.register_forward_hook(tap),
                    residual.branch.register_forward_hook(tap),
                ):
                    hooks.callback(handle.remove)
            yield

    @staticmethod
    @torch.no_grad()
    def finalize(stack: Any) -> None:
        r"""Turn LN(omega_i x_{i-1} + f_i(x_{i-1})) into Post-LN over the stream omega_i x_{i-1}, exactly.  Admin, App.
        C.

        The norm below takes omega_i into its gain and bias, and the columns of the matrices that read the stream are
        divided by omega_i. Below the first sub-layer there is no norm, and neither a tied embedding nor sinusoidal
        positions can absorb a factor. So omega_1 stays, as the stack's explicit ``input_scale``. Raises UsageError if
        an omega is 0.
        """
        admins = [residual for residual in stack.residuals() if isinstance(residual, Admin)]
        if not all(bool(admin.omega.all()) for admin in admins):
            raise UsageError("an omega of this Admin model is 0, so it has no Post-LN form: use it unfolded.")
        stack.input_scale = admins[0].omega.detach().clone()
        for below, above in pairwise(admins):
            for parameter in below.norm.parameters():
                parameter.mul_(above.omega)
        for admin in admins:
            for entry in admin.f.entries:
                admin.f.get_submodule(entry).get_parameter("weight").div_(admin.omega)
        for layer in stack.layers:
            for name, admin in list(layer.named_children()):
                assert isinstance(admin, Admin)
                folded = PostLN(admin.f, admin.place)
                folded.norm = admin.norm
                setattr(layer, name, folded.train(admin.training))
        stack.arch = PostLN
