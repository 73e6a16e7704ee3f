"""The fingerprint of a row: sums with random signs of each sub-layer's values and gradients, and of all parameters."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ...schema import Row
from ..base import Collected, Numbers, ParameterProbe, Probe, probe
from ..parameters.pieces import Parameters
from ..parameters.squares import is_counted
from ..places.sites import Site, modules_of_layers
from ..rules import ROWS, Max, Mean, Norm, Rule, Sketch

SKETCH = Sketch(k=16)
COLUMNS: Mapping[str, Rule] = {"norm": Norm(), "call": Mean(), "ulp": Max(), **SKETCH.columns}
OF_PARAMETERS: Mapping[str, Rule] = {"norm": Norm(), "ulp": Max(), **SKETCH.columns}
OF_DIRECTIONS: Mapping[str, Rule] = {**OF_PARAMETERS, "eps": Max()}
EPS = 1e-8  # of Adam in PyTorch, if no other is known
UNITS = dict.fromkeys(OF_PARAMETERS, "units of the value") | {"ulp": "relative"}
DIRECTION_UNITS = dict.fromkeys(OF_PARAMETERS, "ratio") | {"ulp": "relative", "eps": "units of the gradient"}
SAMPLE = 40  # bits of a token's logical index behind the number of its sample
POSITION = 16  # bits behind its position in the sample
GOLDEN_RATIO = 5**0.5 / 2 - 0.5
MULTIPLIED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # dtypes that a CPU multiplies

_module_table = partial(
    probe, at=modules_of_layers, unit=UNITS | {"call": "number of the call"}, columns=COLUMNS, log=True
)
_parameter_table = partial(probe, on="step", unit=UNITS, columns=OF_PARAMETERS, log=True)


class _OfModules(Probe):
    """Sums of what a module takes or yields; the token's logical index is (sample of the row, position among the real
    tokens of the sample)."""

    in_one_stage = by_name = True

    def __init__(self) -> None:
        self._order: dict[str, int] = {}
        self._samples: dict[str, int] = {}  # of the row so far, by site
        self._kept: dict[str, int] = {}  # those of passes that count
        self._signs = _Signs()
        self._recent = _Recent()

    def begin_row(self) -> None:
        self._samples, self._kept = {}, {}
        self._forget()

    def end_pass(self, kept: bool) -> None:
        if kept:
            self._kept = dict(self._samples)
        else:
            self._samples = dict(self._kept)
        self._forget()

    def _forget(self) -> None:
        self._signs = _Signs()
        self._recent = _Recent()

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        if self.of_batch.tensor > 1 and (why := self._unlike(site, weight)):
            self.missed[site.name] = why
            return self.unmeasured(y.device)
        turned, part = self.is_sequence_first(site, weight), self.of_batch
        count = weight.shape[turned] if weight.dim() else 1
        before = self._samples.get(site.name, 0)
        first = before + part.index * count
        self._samples[site.name] = before + part.parts * count
        order = self._order.setdefault(site.name, len(self._order))
        call, ulp = (
            torch.full((), number, dtype=torch.float64, device=y.device) for number in (order, torch.finfo(y.dtype).eps)
        )
        sums, square = self._recent(y, self._signs(weight, first, turned), weight.reshape(-1))
        return dict(zip(COLUMNS, (square.sqrt(), call, ulp, *sums.unbind()), strict=True))

    def unmeasured(self, device: torch.device) -> Numbers:
        """Return zeros, also for ulp, since an empty cell would mean that the place was not reached."""
        return dict.fromkeys(COLUMNS, torch.zeros((), dtype=torch.float64, device=device))

    def _unlike(self, site: Site, weight: torch.Tensor) -> str:
        """Return why a value of a tensor-parallel model is not that of one process, as a verb and its object."""
        return "has other heads on each rank" if weight.dim() > 2 else ""


class _Signs:
    """The signs of the tokens of a pass, by their mask and the number of the first sample: few, for all places."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, bool], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, weight: torch.Tensor, first: int, turned: bool) -> torch.Tensor:  # (tokens, k) float64
        known = self._known.get((id(weight), first, turned))
        if known is None:  # the mask is kept, so that nobody else gets its id
            signs = SKETCH.signs(_logical(weight, first, turned), ROWS)
            known = self._known[id(weight), first, turned] = (weight, signs)
        return known[1]


def _logical(weight: torch.Tensor, first: int, turned: bool = False) -> torch.Tensor:
    """Return the logical index of each token, (tokens,) int64: padding does not count, on either side. ``turned``: the
    tokens are (positions, samples)."""
    if turned:
        own = weight.transpose(0, 1)
        return _logical(own, first).view(own.shape).transpose(0, 1).reshape(-1)
    if not weight.dim():
        return torch.zeros(1, dtype=torch.int64, device=weight.device)
    if weight.dim() == 1:  # tokens of all samples in one dimension
        return (weight.cumsum(0) - 1 + first) << POSITION
    samples = torch.arange(first, first + len(weight), device=weight.device).view(-1, *[1] * (weight.dim() - 1))
    index = (samples << SAMPLE) + ((weight.cumsum(1) - 1).clamp(min=0) << POSITION)
    if weight.dim() > 2:
        inner = torch.arange(weight[0, 0].numel(), device=weight.device).view(weight.shape[2:])
        index = index + inner
    return index.reshape(-1)


class _Recent:
    """Sums of values of this pass. What leaves a module is often the tensor that enters the next: on a CPU it is read
    in full once.

    A kernel may write into a tensor without counting a version, so that a product with a fixed vector, which takes a
    tenth of the time, has to be equal bit for bit as well. On a GPU the comparison would wait for the device."""

    def __init__(self) -> None:
        self._known: dict[int, _Read] = {}
        self._vectors: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def __call__(self, y: torch.Tensor, signs: torch.Tensor, counted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = y.detach()
        values = values.reshape(-1, values.shape[-1]) if values.dim() else values.view(1, 1)
        if not y.is_cpu or y.is_inference() or y.dtype not in MULTIPLIED:  # inference tensors count no versions
            return SKETCH.sums_and_square(values, signs, counted)
        check, known = values @ self._vector(values), self._known.get(id(y))
        if known is None or not known.is_of(y, signs, check):
            numbers = SKETCH.sums_and_square(values, signs, counted)
            known = self._known[id(y)] = _Read(weakref.ref(y), y._version, signs, check, numbers)
        return known.numbers

    def _vector(self, values: torch.Tensor) -> torch.Tensor:
        key = (values.shape[1], values.dtype)
        if (vector := self._vectors.get(key)) is None:
            steps = torch.arange(1, key[0] + 1, dtype=torch.float64)
            vector = self._vectors[key] = (0.5 + (steps * GOLDEN_RATIO).frac()).to(key[1])
        return vector


@dataclass(frozen=True)
class _Read:
    """Numbers that were read of a tensor, and the state that it had then."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    signs: torch.Tensor
    check: torch.Tensor
    numbers: tuple[torch.Tensor, torch.Tensor]

    def is_of(self, y: torch.Tensor, signs: torch.Tensor, check: torch.Tensor) -> bool:
        same = self.tensor() is y and self.version == y._version and self.signs is signs
        return same and torch.equal(self.check, check)


@_module_table("fingerprint", on="forward")
class FingerprintForward(_OfModules):
    """Sixteen sums with random signs (``s0`` to ``s15``) of each value that enters or leaves a sub-layer: z_j =
    sum_{t,f} r_j(t) c_j(f) x_{t,f}. ``norm``: ||x||_F. ``call``: the place of this call in the order of calls. ``ulp``:
    the spacing of the dtype at 1. Alon, Matias, Szegedy 1996.

    For two runs with the same batch, the mean of (z_j - z'_j)^2 over j estimates ||x - x'||_F^2, which norms do not
    show. ``compare`` and ``bisect`` read it. The sums of micro-batches add up to those of one batch, and padding
    changes nothing (``mask=`` says where the padding is; the first dimension is the batch, or the
    second with ``batch_first=False``). This probe brings ``fingerprint_gradient``, ``fingerprint_weight``,
    ``fingerprint_weight_gradient`` and ``fingerprint_weight_direction`` with it. The group "all" does not include these
    five.

    The sums of several ranks add up to those of one process whose batch holds the samples of all ranks, one rank after
    the other. Each rank must have as many samples as the others. The stages of a pipeline are refused, and so is a
    model that the caller's own code splits (``share=``).

    Cost: two thin products in float64 per module of a layer, in each forward of a probed row. On a CPU, a tensor that
    leaves one module and enters the next is read in full once.
    """

    brings = (
        "fingerprint_gradient",
        "fingerprint_weight",
        "fingerprint_weight_gradient",
        "fingerprint_weight_direction",
    )


@_module_table("fingerprint_gradient", on="backward")
class FingerprintGradient(_OfModules):
    """The sums of ``fingerprint`` for dE/dx, the gradient of each value that enters or leaves a sub-layer. ``call``:
    the place of this call in the order of the backward pass.

    Cost: the cost of ``fingerprint``, in each backward of a probed row.
    """

    def _unlike(self, site: Site, weight: torch.Tensor) -> str:
        if site.take == "input":  # in one process the gradient comes by way of all modules that take the tensor
            return "has the gradient by way of one module alone under tensor parallelism"
        return super()._unlike(site, weight)


class _OfParameters(ParameterProbe):
    """Sums of every single parameter, of its gradient, or of the gradient's direction; the logical indices are the
    output and the input of a weight, whichever way it is stored."""

    in_one_stage = by_name = True

    def values(self, parameters: Parameters) -> Sequence[torch.Tensor | None]:
        raise NotImplementedError

    def rows(self, parameters: Parameters) -> Sequence[Row]:
        return parameters.each

    def collect(self, parameters: Parameters) -> Collected:
        values, all_eps = self.values(parameters), self.all_eps(parameters)
        width = {column: rule.width for column, rule in self.columns.items()}
        empty = [torch.zeros(1, dtype=torch.float64, device=parameters.device)] * len(width)
        taken: list[list[torch.Tensor]] = []
        for number, value in enumerate(values):
            counted = is_counted(value)
            taken.append(list(self._numbers(parameters, number, value, all_eps[number])) if counted else empty)
        columns = {
            column: torch.stack([numbers[place] for numbers in taken]).view(len(values), width[column])
            for place, column in enumerate(self.columns)
        }
        seen = np.array([is_counted(value) for value in values], dtype=bool)
        return Collected(columns, np.repeat(seen[:, None], len(width), axis=1))

    def all_eps(self, parameters: Parameters) -> Sequence[float | None]:
        """Return eps for each value x that is read as x / (|x| + eps), None for each that is read as it is."""
        return [None] * len(parameters.each)

    def _numbers(
        self, parameters: Parameters, number: int, value: torch.Tensor, eps: float | None
    ) -> Sequence[torch.Tensor]:
        value = value.detach().to_dense() if value.is_sparse else value.detach()
        value = torch.view_as_real(value).flatten(-2) if value.is_complex() else value
        matrix = value.flatten(1) if value.dim() > 1 else value.view(-1, 1)
        part = parameters.place_of(number)
        row, feature = part.start, part.left * math.prod(value.shape[2:])
        if parameters.is_turned(number):
            matrix, row, feature = matrix.T, feature, row
        signs = SKETCH.signs_of_range(len(matrix), value.device, row)
        sums, square = SKETCH.sums_and_square(matrix, signs, first=feature, eps=eps)
        ulp = torch.full((1,), torch.finfo(value.dtype).eps, dtype=torch.float64, device=value.device)
        numbers = ((square * part.share).view(1), ulp, *(sums * part.share).view(-1, 1).unbind())
        return numbers if eps is None else (*numbers, torch.full_like(ulp, eps))


@_parameter_table("fingerprint_weight", phase="step")
class FingerprintWeight(_OfParameters):
    """The sums of ``fingerprint`` for every single parameter theta_t, by its name. The two indices of a weight are its
    output and its input, so that Hugging Face's Conv1D and a Linear with the same weights agree.

    Cost: two thin products in float64 per parameter of a probed row.
    """

    def values(self, parameters: Parameters) -> Sequence[torch.Tensor | None]:
        return parameters.tensors


@_parameter_table("fingerprint_weight_gradient")
class FingerprintWeightGradient(_OfParameters):
    """The sums of ``fingerprint`` for the gradient of every single parameter, before clipping. A parameter without a
    gradient is absent.

    Cost: the cost of ``fingerprint_weight``.
    """

    def values(self, parameters: Parameters) -> Sequence[torch.Tensor | None]:
        return parameters.gradients()


@_parameter_table("fingerprint_weight_direction", columns=OF_DIRECTIONS, unit=DIRECTION_UNITS)
class FingerprintWeightDirection(FingerprintWeightGradient):
    """The sums of ``fingerprint`` for g / (|g| + eps), entry by entry, of the gradient g of every single parameter,
    before clipping. Adam's first update is this times minus the learning rate. Rounding turns the sign of an entry
    whose gradient is no larger than its rounding. ``bisect`` takes the control of updates from this table. ``eps``:
    that of the parameter's optimizer, or 1e-8 if none is known.

    Cost: the cost of ``fingerprint_weight``.
    """

    def all_eps(self, parameters: Parameters) -> Sequence[float | None]:
        known = {
            id(tensor): group["eps"]
            for group in parameters.optimizer_groups
            if isinstance(group.get("eps"), float) and group["eps"] > 0
            for tensor in group["params"]
        }
        return [known.get(id(tensor), EPS) for tensor in parameters.originals]
