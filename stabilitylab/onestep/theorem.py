"""DeepNet's Theorems 4.2 and 4.3: their prediction from the weights, beside the measured change of one update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..models.archs.postln import PostLN
from ..models.base import Trunk
from ..probes import Site
from ..probes.places.sites import tensor_of
from ..schema import Row
from .initial_model import Filled, Hook, Subject, filled, part_of
from .rates import Direction

DEFINITION = """For one update of the v, out, fc1 and fc2 weights, over the learning rate: measured = ||dF|| / sqrt(d),
estimate = sum_j v_j w_j c_j over cross-attention, times sum_i sqrt(v_i^2 + w_i^2) c_i ||dtheta_i|| over the encoder,
plus the same sum over the decoder (a single stack: its own sum alone, Thm. 4.2). c = 1 / alpha as measured: the factor
on the branch over that on x. v, w: rms of a matrix over Xavier's; ||dtheta||: Frobenius norm over that of a Xavier
matrix, v and w in quadrature. The theory has d = 1, so this is an estimate, not a bound. spectral: the same with
operator norms of W and dW: the bound, as ||d(W V x)|| <= sqrt(v^2 + w^2) ||dtheta|| ||x|| (Cauchy and Schwarz).
DeepNet, Thms. 4.2 and 4.3; both normalisations are Inferred."""
PAIRS = {"self_attn": ("v", "out"), "cross_attn": ("v", "out"), "ffn": ("fc1", "fc2")}


class Connections:
    """The factor c of each sub-layer, rms(branch as added) / rms(F) over rms(s x) / rms(x), from one forward pass."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._squares: dict[tuple[str, str], float] = {}

    def hooks(self) -> Iterator[tuple[nn.Module, Hook]]:
        for site in self._subject.sites.branches:
            yield site.module, partial(self._hear, site, "x")
            for name, tap in site.taps.items():
                yield tap, partial(self._hear, site, name)

    def _hear(self, site: Site, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        value = tensor_of(args if name == "x" else output)
        assert value is not None
        squares = value[self._subject.real(site.stack)].square().sum().item()
        self._squares[f"{site.stack}.{site.layer}.{site.sublayer}", name] = squares

    def __getitem__(self, role: str) -> float:
        """Return c; 0 if F is 0 or is multiplied by 0, inf if x is multiplied by 0."""
        added, branch, kept, x = (self._squares[role, n] for n in ("scaled_branch", "branch", "shortcut", "x"))
        return math.sqrt(added / branch * x / kept) if branch and kept else 0.0 if kept else math.inf


@dataclass
class Sums:
    """The theorem's three sums over sub-layers."""

    cross: float = 0.0
    stack: dict[str, float] = field(default_factory=lambda: {"encoder": 0.0, "decoder": 0.0})

    def total(self, kind: str) -> float:
        if kind != "encoder-decoder":
            return self.stack[kind]
        return self.cross * self.stack["encoder"] + self.stack["decoder"]


def applies(subject: Subject) -> bool:
    """True if every sub-layer is LN(s x + F), with feed-forward blocks of two matrices: the theorems cover no other
    form."""
    if subject.config.model.activation == "swiglu":
        return False
    archs = [stack.arch for stack in subject.model.stacks.values()]
    return all(issubclass(arch, PostLN) and arch.trunk is Trunk for arch in archs)


def theorem(
    subject: Subject, connections: Connections, directions: Mapping[str, Direction], rates: dict[str, float]
) -> Filled:
    """Return the table theorem43, or theorem42 for a single stack; ``rates``: the numbers of update_rate by site."""
    width, kind = subject.config.model.d_model, subject.config.model.stack
    named = subject.names
    weights = dict(zip(named, subject.parameters.tensors, strict=True))
    columns: dict[str, list[float]] = {"measured": [], "estimate": [], "spectral": []}
    sizes = {"estimate": _relative(_cut(subject, weights)), "spectral": _spectral(_cut(subject, weights))}
    for optimizer, direction in directions.items():
        update = _cut(subject, {name: direction(index) for index, name in enumerate(named)})
        columns["measured"].append(rates[f"{optimizer}.vo_ffn"] / math.sqrt(width))
        for column, steps in (("estimate", _relative(update)), ("spectral", _spectral(update))):
            columns[column].append(_sums(subject, connections, sizes[column], steps).total(kind))
    return filled(
        "theorem43" if kind == "encoder-decoder" else "theorem42",
        [Row(f"{optimizer}.vo_ffn") for optimizer in directions],
        columns,
        unit="L2 norm per token, over sqrt(d), and learning rate",
        definition=DEFINITION,
        phase="update",
        log=True,
    )


def _sums(subject: Subject, connections: Connections, sizes: dict[str, float], steps: dict[str, float]) -> Sums:
    sums = Sums()
    for residual in subject.model.residuals():
        role = str(residual.place)
        v, w = (sizes[f"{role}.{matrix}"] for matrix in PAIRS[residual.place.sublayer])
        step = math.hypot(*(steps[f"{role}.{matrix}"] for matrix in PAIRS[residual.place.sublayer]))
        sums.stack[residual.place.stack] += math.hypot(v, w) * connections[role] * step
        if residual.place.sublayer == "cross_attn":
            sums.cross += v * w * connections[role]
    return sums


def _cut(subject: Subject, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return role -> its rows of its parameter, for the matrices of the theorem."""
    wanted = {matrix for pair in PAIRS.values() for matrix in pair}
    matrices = {r: where for r, where in subject.matrices().items() if r.rpartition(".")[2] in wanted}
    return {role: part_of(tensors[name].detach(), rows) for role, (name, rows) in matrices.items()}


def _relative(matrices: dict[str, Tensor]) -> dict[str, float]:
    """Return the Frobenius norm of each matrix over that of a Xavier matrix of gain 1. This equals the rms of the
    matrix over sqrt(2 / (d_in + d_out))."""
    norms = torch.stack([torch.linalg.matrix_norm(matrix) for matrix in matrices.values()]).tolist()
    xavier = [math.sqrt(2 * m.shape[0] * m.shape[1] / sum(m.shape)) for m in matrices.values()]
    return {role: norm / unit for role, norm, unit in zip(matrices, norms, xavier, strict=True)}


def _spectral(matrices: dict[str, Tensor]) -> dict[str, float]:
    """Return the operator norms; matrices of one shape are computed together."""
    norms: dict[str, float] = {}
    for shape in {matrix.shape for matrix in matrices.values()}:
        like = {role: matrix for role, matrix in matrices.items() if matrix.shape == shape}
        norms |= dict(zip(like, torch.linalg.matrix_norm(torch.stack([*like.values()]), 2).tolist(), strict=True))
    return norms
