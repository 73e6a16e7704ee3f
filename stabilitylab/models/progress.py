"""ProRes: residuals that open layer by layer, an option of some architectures."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import ModelConfig
from .schedules import HostScalar


class Progress(HostScalar):
    r"""alpha(l, t) = min(1, t / (T l)) on the branches of layer l, t = row + t0.  ProRes, Chen et al. 2026.

    2603.05369, Eqs. 2-3; the architectures of its Table 1 and code say so (``prores=True`` of ``@arch``). ``equal``:
    min(1, t / T) in every layer, which is BranchNorm's ramp; their ``equal`` ends at T times the number of layers. This
    scalar is t, and ``alphas`` holds the alpha of each number l. LayerNorm scaling with ProRes has a constant 1/sqrt(l)
    here, where the authors' code has it as the initial value of the norm's gain. t0 = 0, as in the authors' code, where
    the first forward pass has alpha = 0 in all layers. Inferred: ``restart`` counts l from 1 in each stack of an
    encoder-decoder, ``through`` counts on from the encoder through the decoder.
    """

    alphas: Tensor  # (layers,)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__("clock", 0.0, torch.float64)
        layers = config.encoder_layers, config.decoder_layers
        self._encoder = config.encoder_layers if config.prores_order == "through" else 0
        self.equal, self.T, self.t0 = config.prores == "equal", config.prores_T, config.prores_t0
        self.register_buffer("alphas", torch.zeros(sum(layers) if self._encoder else max(layers)))
        self.final = HostScalar("flag", False, torch.bool)
        self.set(self.at(0))

    def place(self, stack: str, layer: int) -> int:
        """Return the index of a layer in ``alphas``."""
        return layer - 1 + (self._encoder if stack == "decoder" else 0)

    def of(self, t: float) -> list[float]:
        """Return the alpha of each layer number at time ``t``."""
        ends = [self.T if self.equal else self.T * number for number in range(1, len(self.alphas) + 1)]
        return [1.0 if t >= end else t / end for end in ends]

    def at(self, row: int) -> float:
        """Return t in row ``row``; once final, the t at which every alpha is 1."""
        return float(self.T * len(self.alphas) if self.final.get() else row + self.t0)

    def smallest(self, row: int) -> float:
        """Return the smallest alpha of row ``row``, that of the last layer: the number that a run records."""
        return min(self.of(self.at(row)))

    def set(self, value: float | bool) -> None:
        super().set(value)
        self.alphas.copy_(torch.tensor(self.of(float(value)), dtype=torch.float64))

    @property
    def least(self) -> float:
        """The smallest alpha at present."""
        return min(self.of(self.get()))

    def finalize(self) -> None:
        """Set every alpha to 1 for every row from now on."""
        self.final.set(True)
        self.set(self.at(0))
