"""How a sub-layer joins the residual stream: one class an architecture, with all that defines it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..errors import UsageError
from ..registry import Registry, spelling
from .schedules import Schedule
from .sublayers import SubLayer


@dataclass(frozen=True)
class Place:
    """Where a sub-layer stands: all that an architecture may know of its model."""

    stack: str  # encoder | decoder
    layer: int  # from 1
    sublayer: str  # self_attn | cross_attn | ffn
    width: int
    encoder_layers: int
    decoder_layers: int

    @property
    def layers(self) -> int:
        return self.encoder_layers if self.stack == "encoder" else self.decoder_layers

    def __str__(self) -> str:
        return f"{self.stack}.{self.layer}.{self.sublayer}"


def deepnorm_constants(stack: str, encoder_layers: int, decoder_layers: int) -> tuple[float, float]:
    r"""(alpha, beta).  DeepNet, Figure 2, with its 0.87 (torchscale's encoder has 1.15 there).

    Encoder-decoder: .81 (N^4 M)^{1/16}, .87 (N^4 M)^{-1/16} and (3M)^{1/4}, (12M)^{-1/4}; a single stack of L
    layers: (2L)^{1/4}, (8L)^{-1/4}.
    """
    n, m = encoder_layers, decoder_layers
    if not (n and m):
        return (2 * (n + m)) ** 0.25, (8 * (n + m)) ** -0.25
    if stack == "encoder":
        return 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
    return (3 * m) ** 0.25, (12 * m) ** -0.25


def xavier_gain(place: Place, matrix: str) -> float:
    """The base of all architectures: q, k, v as one fused (3d, d) Xavier matrix would have them."""
    return math.sqrt(0.5) if matrix in ("q", "k", "v") else 1.0


def deepnorm_gain(place: Place, matrix: str) -> float:
    """DeepNet, Figure 2: beta on v, out, fc1 and fc2 of every sub-layer; q and k keep 1."""
    if matrix in ("q", "k"):
        return 1.0
    return deepnorm_constants(place.stack, place.encoder_layers, place.decoder_layers)[1]


class Residual(nn.Module):
    """One sub-layer: F and its norm, joined to the stream by ``forward``; the rest are neutral answers of an arch.

    Every arch writes shortcut(s * x) + branch(F): one form, so that equal constants give equal bits.
    The identities are taps: ``shortcut`` carries s * x, ``branch`` carries F.
    """

    final_norm = False  # does each stack end with a norm of its own?
    takes_alpha = False  # does model.alpha replace a constant of this arch?
    scheduled = False  # does a Schedule drive it?
    needs_calibration = False  # does it need a calibration pass before step 0?

    def __init__(self, f: SubLayer, place: Place, *, alpha: float | None = None, schedule: Schedule | None = None):
        super().__init__()
        self.place = place
        self.f = f
        self.norm = nn.LayerNorm(place.width, eps=1e-5)
        self.shortcut = nn.Identity()
        self.branch = nn.Identity()

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:  # (B, T, D) -> (B, T, D)
        raise NotImplementedError

    def gain(self, matrix: str) -> float:
        """Initial gain of q, k, v, out, fc1 or fc2, as a multiple of Xavier's standard deviation."""
        return xavier_gain(self.place, matrix)

    @staticmethod
    def calibrating(residuals: Sequence[Any]) -> AbstractContextManager[None]:
        """Within it, one forward pass through these residuals of a stack sets what they calibrate."""
        return nullcontext()


class _Archs(Registry[type[Residual]]):
    def resolve(self, name: str) -> str:
        if spelling(name) == "mixnorm":
            raise UsageError(
                "no paper defines 'mixnorm': BranchNorm's Table 2 names it in one row and says nothing else about it; "
                f"choose one of {', '.join(sorted(self))}."
            )
        return super().resolve(name)


ARCHS = _Archs("architecture")
R = TypeVar("R", bound=type[Residual])


def arch(name: str) -> Callable[[R], R]:
    """Registers a residual as an architecture: ``@arch("name")``."""

    def decorate(entry: R) -> R:
        ARCHS.register(name)(entry)
        return entry

    return decorate


@arch("postln")
class PostLN(Residual):
    r"""x_{l+1} = LN(x_l + F(x_l)).  Vaswani et al. 2017; initialised with Xavier, q, k, v with gain 1/sqrt(2)."""

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        return self.norm(self.shortcut(x) + self.branch(self.f(x, *context)))


@arch("preln")
class PreLN(Residual):
    r"""x_{l+1} = x_l + F(LN(x_l)), and a norm after the last layer of each stack.  Xiong et al. 2020."""

    final_norm = True

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        return self.shortcut(x) + self.branch(self.f(self.norm(x), *context))


@arch("postln-init")
class PostLNInit(PostLN):
    r"""Post-LN, all matrices of layer l drawn 1 / k_l smaller, k_l = N - l + 1.  DeepNet, Figure 3.

    Inferred: "the weights of the l-th layer" are all of them, q and k too, and N is the depth of the layer's own stack.
    """

    def gain(self, matrix: str) -> float:
        return super().gain(matrix) / (self.place.layers - self.place.layer + 1)


@arch("deepnorm")
class DeepNorm(PostLN):
    r"""x_{l+1} = LN(alpha x_l + F(x_l)); v, out, fc1, fc2 drawn with gain beta.  DeepNet, Figure 2."""

    takes_alpha = True

    def __init__(self, f: SubLayer, place: Place, *, alpha: float | None = None, schedule: Schedule | None = None):
        super().__init__(f, place)
        own, _ = deepnorm_constants(place.stack, place.encoder_layers, place.decoder_layers)
        self.alpha = own if alpha is None else alpha

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        return self.norm(self.shortcut(self.alpha * x) + self.branch(self.f(x, *context)))

    def gain(self, matrix: str) -> float:
        return deepnorm_gain(self.place, matrix)


@arch("branchnorm")
class BranchNorm(PostLN):
    r"""x_{l+1} = LN(x_l + alpha_t F(x_l)),  alpha_t = min(1, t / T).  BranchNorm, Eqs. 7-8; drawn as DeepNorm.

    The tap ``scaled_branch`` carries alpha_t F. At alpha_t = 0 the branch is multiplied, not skipped: a NaN in it
    shows, and its parameters have a gradient (of exactly 0), so that Adam's state exists from the first update.
    """

    takes_alpha = True
    scheduled = True

    def __init__(self, f: SubLayer, place: Place, *, alpha: float | None = None, schedule: Schedule | None = None):
        super().__init__(f, place)
        self.scaled_branch = nn.Identity()
        assert schedule is not None
        self._schedule = (schedule,)  # in a tuple: the model registers it once, not every sub-layer again

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        (schedule,) = self._schedule
        return self.norm(self.shortcut(x) + self.scaled_branch(schedule.alpha * self.branch(self.f(x, *context))))

    def gain(self, matrix: str) -> float:
        return deepnorm_gain(self.place, matrix)


@arch("admin")
class Admin(PostLN):
    r"""x_i = LN(omega_i x_{i-1} + f_i(x_{i-1})), omega_i a trained vector.  Admin (Liu et al. 2020).

    Calibration as in the authors' code, in one pass: omega_i <- r; r <- sqrt(Var(omega_i x_{i-1}) + Var(f_i)),
    r = 1 before the first sub-layer of each stack. Var is the population variance over all elements, padding too.
    """

    needs_calibration = True
    omega: Tensor

    def __init__(self, f: SubLayer, place: Place, *, alpha: float | None = None, schedule: Schedule | None = None):
        super().__init__(f, place)
        self.omega = nn.Parameter(torch.ones(place.width))

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        return self.norm(self.shortcut(self.omega * x) + self.branch(self.f(x, *context)))

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


def stack_archs(config: ModelConfig) -> dict[str, type[Residual]]:
    """Stack -> its architecture; refuses a ``model.alpha`` that none of them has."""
    names = {
        "encoder-decoder": {"encoder": config.arch, "decoder": config.decoder_arch or config.arch},
        "encoder": {"encoder": config.arch},
        "decoder": {"decoder": config.arch},
    }[config.stack]
    archs = {stack: ARCHS[name] for stack, name in names.items()}
    if config.alpha is not None and not any(entry.takes_alpha for entry in archs.values()):
        have = ", ".join(name for name, entry in ARCHS.items() if entry.takes_alpha)
        raise UsageError(f"architecture {config.arch!r} has no alpha to replace: leave model.alpha out, or use {have}.")
    return archs
