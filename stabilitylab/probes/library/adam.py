# pyright: reportPrivateImportUsage=false
"""The state of Adam: how well its second moment follows the gradient, and how many entries its eps dominates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import optim

from ..base import Collected, ParameterProbe, probe, wide
from ..curvature.hessian_products import real
from ..parameters.layouts import local, local_gradient
from ..parameters.pieces import Parameters
from ..parameters.squares import PATTERNS
from ..rules import Mean, Ratio, empty

FLOOR = 10.0  # in units of eps
AT_ONCE = 1 << 25  # entries of parameters that are looked at together
STATE = ("step", "exp_avg", "exp_avg_sq")
OTHERS = (optim.Adamax, optim.SparseAdam)  # Adam by name, not by formula
MOMENTS_ALONE = (optim.NAdam, optim.RAdam)  # the moments are Adam's, the update is not
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class RatioOfAny(Ratio):
    """A ratio that is absent where nothing was summed."""

    def finish(self, parts: torch.Tensor) -> torch.Tensor:
        return torch.where(parts[:, 1] == 0, empty(parts.device), super().finish(parts))


@probe(
    "adam",
    on="update",
    unit={"rms_t": "ratio", "update_rms": "ratio", "eps_floor": "share of entries"},
    columns={"rms_t": RatioOfAny(), "update_rms": RatioOfAny(), "eps_floor": Mean()},
    log=True,
)
class AdamState(ParameterProbe):
    """The state of Adam in each row. ``rms_t``: sqrt(mean(g^2 / max(v, eps^2))) over the entries of a row. Here v is
    the bias-corrected second moment v_t / (1 - beta_2^t) right after this update, so g is already part of it; rms_t is
    at most 1/sqrt(1 - beta_2). At the first update rms_t is 1 if every entry has a gradient above eps. Entries without
    one, such as positions and tokens that are not used, make it smaller: it is then the root of the share of the other
    entries. ``update_rms``: the root mean square of m / (sqrt(v) + eps), with m bias-corrected too, which is the update
    before the learning rate and without weight decay. ``eps_floor``: the share of entries with sqrt(v) < 10 eps.
    Wortsman et al. 2023 (2304.13013: RMS_t of StableAdamW).

    Look for an rms_t well above 1: v is then out of date, and the update is too large. The paper saw rms_t above 2.3 in
    the patch embedding 1 to 8 updates before a loss spike. Where eps_floor is near 1, the entries move by about m /
    eps, so Adam no longer balances them.

    g is the gradient that the optimizer used, after clipping. It does not include Adam's own L2 term (``weight_decay``
    of Adam, not of AdamW). With ``amsgrad``, v is the running maximum that the optimizer divides by. A complex entry
    counts as two real ones.

    A row that was not updated is absent, also where a loss scaler skipped the update. If the Adam keeps another state
    than PyTorch's (8-bit, factored), all of its rows are absent. If there are several optimizers, the rows of those
    that are not Adam are absent. NAdam and RAdam make another update from the same moments, so their ``update_rms`` is
    missing.

    Cost: a dozen operators over lists of all parameters. Meanwhile they hold about three copies of the parameters, or
    of 34 million of their entries if the model has more.
    """

    def __init__(self) -> None:
        # each step count as the update began: on the host where it lies there, else on the device
        self._counts: dict[torch.Tensor, float] = {}
        self._counts_there: dict[torch.Tensor, torch.Tensor] = {}
        self._entries: dict[tuple[int, ...], torch.Tensor] = {}
        self._taken: dict[int, Collected] = {}  # of several optimizers, the numbers of those that have stepped

    def lacks(self, parameters: Parameters) -> str:
        return lacks_adam(parameters.optimizers) or super().lacks(parameters)

    def before(self, parameters: Parameters) -> None:
        here, there = split_counts(states(parameters.optimizers))
        self._counts = read(here)
        copies = torch.stack([*there.values()]).unbind() if there else ()
        self._counts_there = dict(zip(there, copies, strict=True))
        self._taken.clear()

    def after_step(self, parameters: Parameters, number: int) -> None:
        groups = parameters.optimizers[number].param_groups
        self._taken[number] = self._numbers(parameters, {p for group in groups for p in group["params"]})

    def collect(self, parameters: Parameters) -> Collected:
        taken = [*self._taken.values()] or [self._numbers(parameters, set(parameters.originals))]
        self._taken.clear()
        if len(taken) == 1:
            return taken[0]
        columns = {name: torch.stack([each.columns[name] for each in taken]).sum(0) for name in taken[0].columns}
        return Collected(columns, np.logical_or.reduce([each.seen for each in taken]))

    def _numbers(self, parameters: Parameters, own: set[torch.Tensor]) -> Collected:
        """Return the numbers of the parameters in ``own``."""
        state, groups = states(parameters.optimizers), groups_of(parameters.optimizers)
        here, there = split_counts(state)
        # a count that stands still is an update that a scaler skipped: the gradients may be the next row's by now
        still = {p for p, count in read(here).items() if count == self._counts.get(p, 0)}
        places = [
            place
            for place, p in enumerate(parameters.originals)
            if p in own and p in state and p.grad is not None and p not in still
        ]
        updated = self._updated_there(parameters, there)
        others = {
            p for own in map(unwrapped, parameters.optimizers) if isinstance(own, MOMENTS_ALONE) for p in own.state
        }
        adams = [place for place in places if parameters.originals[place] not in others]
        rest = [place for place in places if parameters.originals[place] in others]
        entries, ratio, update, clear = self._sums(parameters, adams, state, groups, updated)
        its_own = entries
        if rest:
            more_entries, more_ratio, _, more_clear = self._sums(parameters, rest, state, groups, updated)
            entries, ratio, clear = entries + more_entries, ratio + more_ratio, clear + more_clear
        sums = {
            "rms_t": torch.cat((ratio, entries), dim=1),
            "update_rms": torch.cat((update, its_own), dim=1),
            "eps_floor": torch.cat((entries - clear, entries), dim=1),
        }
        seen = [self._rows_of(parameters, places if name != "update_rms" else adams) for name in sums]
        return Collected(sums, np.concatenate(seen, axis=1))

    def _updated_there(self, parameters: Parameters, there: Mapping[torch.Tensor, torch.Tensor]) -> torch.Tensor | None:
        """Return True for each piece of a parameter whose step count on the device has changed, or lies on the host,
        (pieces,) bool; None if all counts lie on the host. A fused optimizer counts up and, if a scaler skips, down
        again: only the device knows."""
        if not there:
            return None
        zero = torch.zeros_like(next(iter(there.values())))
        one = torch.ones_like(zero)  # of counts on the host, which were compared there
        now = torch.stack([there.get(p, one).to(zero.device, non_blocking=True) for p in parameters.originals])
        known = [self._counts_there.get(p, zero).to(zero.device, non_blocking=True) for p in parameters.originals]
        return parameters.by_piece(now != torch.stack(known))

    def _rows_of(self, parameters: Parameters, places: Sequence[int]) -> np.ndarray:
        """Return the rows that the parameters at those places stand in, (rows, 1) bool."""
        there = set(places)
        return parameters.seen([p if n in there else None for n, p in enumerate(parameters.originals)], [""])

    def _sums(
        self, parameters: Parameters, places: Sequence[int], state: Any, groups: Any, updated: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return four sums by row, (n, 1), over the parameters at those places: their entries, and the squares of each
        of the three formulas. ``updated``: (pieces,), False for those that do not count; None: all do."""
        originals = parameters.originals

        def squares(some: Sequence[int], values: Sequence[torch.Tensor]) -> torch.Tensor:
            all_of_them: list[torch.Tensor | None] = [None] * len(originals)
            for place, value in zip(some, values, strict=True):
                all_of_them[place] = value
            return parameters.squares(all_of_them)

        def by_row(pieces: torch.Tensor) -> torch.Tensor:
            return parameters.by_row(pieces if updated is None else torch.where(updated, pieces, 0))

        found = []
        for some in parts(places, [local(original).numel() for original in originals]):
            tensors = [originals[place] for place in some]
            held = [{name: local(value) for name, value in state[t].items()} for t in tensors]
            numbers = formulas(
                [local_gradient(t) for t in tensors if t.grad is not None], held, [groups[t] for t in tensors]
            )
            if (entries := self._entries.get(key := (*some,))) is None:
                entries = squares(some, [torch.ones_like(real(own["exp_avg_sq"])) for own in held])
                if len(self._entries) < PATTERNS:
                    self._entries[key] = entries
            sums = (entries, *(squares(some, values) for values in numbers.values()))
            found.append([by_row(each) for each in sums])
        entries, ratio, update, clear = (torch.stack(own).sum(dim=0) for own in zip(*found, strict=True))
        return entries, ratio, update, clear


def parts(places: Sequence[int], entries: Sequence[int]) -> list[list[int]]:
    """Return ``places`` in order, in parts of ``AT_ONCE`` entries or fewer, but of one place at least; [[]] for
    none."""
    found: list[list[int]] = [[]]
    room = AT_ONCE
    for place in places:
        if found[-1] and entries[place] > room:
            found.append([])
            room = AT_ONCE
        found[-1].append(place)
        room -= entries[place]
    return found


def formulas(
    gradients: Sequence[Any], states: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Tensors]:
    """Return of each tensor g / max(sqrt(v), eps), m / (sqrt(v) + eps), and 1 where sqrt(v) >= 10 eps, else 0."""
    if not gradients:
        return {"rms_t": [], "update": [], "clear": []}
    device = gradients[0].device
    counts = [state["step"] for state in states]  # on the CPU, or with the rest
    if len({count.device for count in counts}) > 1:  # of one optimizer here, of another there
        counts = [count.to(device, non_blocking=True) for count in counts]
    steps = torch.stack(counts).to(device, torch.float64, non_blocking=True)
    betas = _on_device(tuple((float(first), float(second)) for first, second in (g["betas"] for g in groups)), device)
    corrections = 1 - betas.mT**steps  # (2, n)
    eps = [float(group["eps"]) for group in groups]
    moments = [
        real(state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"])
        for state, group in zip(states, groups, strict=True)
    ]
    root = torch._foreach_div(torch._foreach_sqrt(_wide(moments)), _scalars(corrections[1].sqrt(), moments))
    ratio = torch._foreach_div(_wide(gradients), torch._foreach_clamp_min(root, eps))
    mean = torch._foreach_div(_wide([state["exp_avg"] for state in states]), _scalars(corrections[0], moments))
    torch._foreach_div_(mean, torch._foreach_add(root, eps))
    torch._foreach_div_(root, [FLOOR * each for each in eps])
    torch._foreach_clamp_max_(root, 1.0)
    torch._foreach_floor_(root)
    return {"rms_t": list(ratio), "update": list(mean), "clear": list(root)}


@cache
def _on_device(betas: tuple[tuple[float, float], ...], device: torch.device) -> torch.Tensor:
    """Return the betas on the device, (n, 2), copied once and kept: a CUDA graph reads them, and cannot copy from the
    host."""
    return torch.tensor(betas, dtype=torch.float64, device=device)


def is_adam(optimizer: optim.Optimizer) -> bool:
    """Return True if it updates as Adam or AdamW do, by its name and its settings: its state is empty at first."""
    named = "adam" in type(optimizer).__name__.lower() and not isinstance(optimizer, OTHERS)
    return named and all("betas" in group and isinstance(group.get("eps"), float) for group in optimizer.param_groups)


def lacks_adam(optimizers: Sequence[Any]) -> str:
    """Return the reason if none of the given optimizers is an Adam, as a verb and its object; else ""."""
    inner = list(map(unwrapped, optimizers))
    if not inner or any(map(is_adam, inner)):
        return ""
    kinds = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in inner))
    return f"needs an Adam or AdamW as optimizer=, not {kinds}"


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer without wrappers that keep it as ``optimizer``, such as Accelerate's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), optim.Optimizer):
        optimizer = inner
    return optimizer


def states(optimizers: Sequence[Any]) -> dict[torch.Tensor, Mapping[str, Any]]:
    """Return the state of each parameter that an Adam has updated, without those of 8-bit or factored variants."""
    adams = [optimizer for optimizer in map(unwrapped, optimizers) if is_adam(optimizer)]
    state = [item for optimizer in adams for item in optimizer.state.items()]
    return {p: own for p, own in state if all(isinstance(own.get(name), torch.Tensor) for name in STATE)}


def split_counts(
    states: Mapping[torch.Tensor, Mapping[str, Any]],
) -> tuple[dict[torch.Tensor, torch.Tensor], dict[torch.Tensor, torch.Tensor]]:
    """Return the step counts of parameters, those that lie on the host and those on a device."""
    counts = {p: local(own["step"]) for p, own in states.items()}
    here = {p: count for p, count in counts.items() if is_on_host(count)}
    return here, {p: count for p, count in counts.items() if p not in here}


def is_on_host(count: torch.Tensor) -> bool:
    return count.device.type == "cpu"


def read(counts: Mapping[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, float]:
    """Return the numbers of step counts that lie on the host."""
    return dict(zip(counts, torch.stack([*counts.values()]).tolist(), strict=True)) if counts else {}


def groups_of(optimizers: Sequence[Any]) -> dict[torch.Tensor, Mapping[str, Any]]:
    """Return the settings with which each parameter is updated."""
    return {p: group for own in map(unwrapped, optimizers) for group in own.param_groups for p in group["params"]}


def _wide(tensors: Sequence[torch.Tensor]) -> Tensors:
    return [own.to(wide(own)) for own in map(real, tensors)]


def _scalars(values: torch.Tensor, like: Sequence[torch.Tensor]) -> Tensors:
    dtypes = {tensor.dtype for tensor in like}
    cast = {dtype: values.to(torch.float64 if dtype is torch.float64 else torch.float32).unbind() for dtype in dtypes}
    return [cast[tensor.dtype][place] for place, tensor in enumerate(like)]
