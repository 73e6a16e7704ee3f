"""The schedule of alpha: a buffer that checkpoints carry, with a copy on the host, which is read without the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class HostScalar(nn.Module):
    """A 0-dim buffer and its value on the host: checkpoints carry it, and ``get`` never reads the device."""

    def __init__(self, name: str, value: float | bool, dtype: torch.dtype) -> None:
        super().__init__()
        self._name = name
        self._value = value
        self.register_buffer(name, torch.tensor(value, dtype=dtype))
        self.register_load_state_dict_post_hook(_read_back)

    def get(self) -> Any:
        return self._value

    def set(self, value: float | bool) -> None:
        self._value = value
        getattr(self, self._name).fill_(value)


def _read_back(scalar: HostScalar, _keys: object) -> None:
    scalar._value = getattr(scalar, scalar._name).item()


def linear(s: float) -> float:
    return s


def exponential(s: float, k: float = 5.0) -> float:
    return min(1.0, math.expm1(-k * s) / math.expm1(-k))


def sigmoid(s: float, u: float = 10.0) -> float:
    def logistic(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    return (logistic(u * (s - 0.5)) - logistic(-u / 2)) / (logistic(u / 2) - logistic(-u / 2))


GROWTH: dict[str, Callable[[float], float]] = {"linear": linear, "exp": exponential, "sigmoid": sigmoid}


class RampOptions(Protocol):
    """The options of an arch whose alpha grows."""

    @property
    def T(self) -> int: ...
    @property
    def growth(self) -> str: ...
    @property
    def t0(self) -> int: ...


class Schedule(HostScalar):
    r"""alpha_t = g(t / T) for t < T, then exactly 1; row t of a run uses alpha_{t + t0}.  BranchNorm, Eq. 8 (linear g).

    Ours, since Figure 7 names exponential and sigmoid growth without a formula:
    g(s) = (1 - e^{-ks}) / (1 - e^{-k}), k = 5, and the logistic function of u (s - 1/2), u = 10, mapped onto [0, 1].
    """

    alpha: Tensor

    def __init__(self, ramp: RampOptions, constant: float | None = None) -> None:
        super().__init__("alpha", 0.0, torch.float32)
        self.growth, self.T, self.t0 = ramp.growth, ramp.T, ramp.t0
        self.constant = constant
        self.final = HostScalar("flag", False, torch.bool)
        self.set(self.at(0))

    def at(self, row: int) -> float:
        if self.constant is not None:
            return self.constant
        t = row + self.t0
        if self.final.get() or t >= self.T:
            return 1.0
        return GROWTH[self.growth](t / self.T)

    def smallest(self, row: int) -> float:
        """Return the smallest alpha of row ``row``: there is one for all layers."""
        return self.at(row)

    @property
    def least(self) -> float:
        """The alpha at present."""
        return self.get()

    def finalize(self) -> None:
        """Set alpha to its final value for every row from now on; a constant stays as it is."""
        self.final.set(True)
        self.set(self.at(0))
