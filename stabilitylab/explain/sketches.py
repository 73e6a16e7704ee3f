"""Sketches of tensors: a digest, which sees each bit, and three linear or quadratic numbers that say how two differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..probes.parameters.layouts import local
from ..probes.state import Digester, multipliers

CHUNK = 1 << 20


@dataclass(frozen=True)
class Sketches:
    """Sketches of n tensors, on their device.

    ``digests``: (n,) int64. ``numbers``: (n, 3) float64: ||x||^2, and two projections sum_i s_i x_i with signs s_i that
    depend on i alone. The projections are linear in x: those of a sum are the sums of those of its parts. ``there``:
    False where there is no tensor (no gradient).
    """

    digests: Tensor
    numbers: Tensor
    there: tuple[bool, ...]

    def read(self) -> Sketches:
        return Sketches(self.digests.cpu(), self.numbers.cpu(), self.there)

    def as_dict(self) -> dict[str, object]:
        """Return them on the host, in types that a file may hold."""
        return {"digests": self.digests.cpu(), "numbers": self.numbers.cpu(), "there": list(self.there)}

    @classmethod
    def of(cls, kept: dict[str, object]) -> Sketches:
        there: object = kept["there"]
        assert isinstance(there, list), "sketches are damaged"
        digests, numbers = kept["digests"], kept["numbers"]
        assert isinstance(digests, Tensor), "sketches are damaged"
        assert isinstance(numbers, Tensor), "sketches are damaged"
        return cls(digests, numbers, tuple(there))

    def differing(self, other: Sketches) -> list[int]:
        """Return the numbers of the tensors of which a bit differs, or of which only one exists."""
        alike = (self.digests == other.digests).tolist()
        pairs = zip(alike, self.there, other.there, strict=True)
        return [at for at, (same, mine, theirs) in enumerate(pairs) if not same or mine != theirs]


class Sketcher:
    """Computes sketches."""

    def __init__(self) -> None:
        self.digester = Digester()
        self._signs: dict[torch.device, Tensor] = {}

    def of(self, tensors: Sequence[Tensor | None]) -> Sketches:
        """Return the sketches of the tensors; of None zeros."""
        device = next((one.device for one in tensors if one is not None), torch.device("cpu"))
        digests, numbers = [], []
        for one in tensors:
            if one is None:
                digests.append(torch.zeros((), dtype=torch.int64, device=device))
                numbers.append(torch.zeros(3, dtype=torch.float64, device=device))
            else:
                digests.append(self.digester.of(one).to(device))
                numbers.append(self._numbers(local(one.detach())).to(device))
        if not tensors:
            return Sketches(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.float64), ())
        return Sketches(torch.stack(digests), torch.stack(numbers), tuple(one is not None for one in tensors))

    def _numbers(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            tensor = tensor.coalesce().values() if tensor.layout == torch.sparse_coo else tensor.values()
        flat = tensor.reshape(-1)
        total = torch.zeros(3, dtype=torch.float64, device=flat.device)
        signs = self._signs_of(min(CHUNK, flat.numel()), flat.device)
        for number, start in enumerate(range(0, flat.numel(), CHUNK)):
            part = flat[start : start + CHUNK].double()
            own = signs[:, : part.numel()] @ part
            turn = 1.0 if number % 2 == 0 else -1.0  # so that equal chunks that change places are seen
            total = total + torch.stack([part @ part, own[0] * turn, own[1]])
        return total

    def _signs_of(self, count: int, device: torch.device) -> Tensor:
        known = self._signs.get(device)
        if known is None or known.shape[1] < count:
            bits = multipliers(max(count, 1 << 10), device)
            both = torch.stack([(bits >> 20) & 1, (bits >> 40) & 1])
            known = self._signs[device] = both.double() * 2 - 1
        return known
