"""Admin folded into Post-LN: the same function without omega."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from ..errors import UsageError
from .archs import Admin, PostLN

if TYPE_CHECKING:
    from .transformer import Stack


@torch.no_grad()
def fold_admin(stack: Stack) -> None:
    r"""LN(omega_i x_{i-1} + f_i(x_{i-1})) as Post-LN over the stream omega_i x_{i-1}, exactly.  Admin, App. C.

    The norm below takes omega_i into its gain and bias, and the columns of the matrices that the stream feeds are
    divided by it. Below the first sub-layer there is no norm, and neither a tied embedding nor sinusoidal positions
    can absorb a factor: omega_1 stays, as the stack's explicit ``input_scale``.
    """
    admins = [residual for residual in stack.residuals() if isinstance(residual, Admin)]
    if not all(bool(admin.omega.all()) for admin in admins):
        raise UsageError("an omega of this Admin model is 0, so it has no Post-LN form: use it unfolded.")
    stack.input_scale = admins[0].omega.detach().clone()
    for below, above in pairwise(admins):
        for parameter in below.norm.parameters():
            parameter.mul_(above.omega)
    for admin in admins:
        admin.f.get_submodule(admin.f.entry).get_parameter("weight").div_(admin.omega)
    for layer in stack.layers:
        for name, admin in list(layer.named_children()):
            assert isinstance(admin, Admin)
            folded = PostLN(admin.f, admin.place)
            folded.norm = admin.norm
            setattr(layer, name, folded.train(admin.training))
    stack.arch = PostLN
