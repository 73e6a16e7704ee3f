"""Parameters by row and group: one row per sub-layer if the model names its roles, else one per child of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import UsageError
from ...schema import Row
from ..places.attending import TRANSPOSED, Part, query_key
from ..places.naming import ParameterPlaces, modules_of, unwrapped
from ..places.structure import Places, is_norm
from ..rules import Mean, Norm, Total
from .agreement import Gradient, differing
from .coverage import covered
from .layouts import Layout, local, local_gradient
from .processes import ALONE, Processes
from .squares import Squares, Values, flattened, is_counted

GROUPS = ("vo_ffn", "qk", "bias", "ln")
GROUP_OF: dict[str, str] = {
    **dict.fromkeys(("q", "k"), "qk"),
    **dict.fromkeys(("v", "out", "fc1", "fc2", "gate"), "vo_ffn"),
}


@dataclass(frozen=True)
class Piece:
    """A parameter, or a slice of its rows or columns, with the row and the group in which the piece counts."""

    index: int
    part: Part
    row: Row
    group: str  # one of GROUPS or ""
    branch: bool  # a weight or bias of a residual branch


class Parameters:
    """Every parameter of the model once, cut into pieces; each piece belongs to one row and one group."""

    def __init__(
        self,
        model: nn.Module,
        place: Places,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        ranks: Processes = ALONE,
    ) -> None:
        self._places = ParameterPlaces(model)
        inner, modules, known = unwrapped(model), modules_of(model), self._places()
        self.names = list(known)
        self._ranks = ranks
        self._own: list[torch.Tensor] = list(known.values())
        self.device = self._own[0].device if self._own else torch.device("cpu")
        self.optimizers = tuple(optimizers)
        roles = getattr(inner, "parameter_roles", None) if hasattr(type(inner), "parameter_roles") else None
        found = _by_structure(modules, known, place) if roles is None else _by_role(roles, inner, known)
        self.pieces = _merged(found)
        parts: list[list[Part]] = [[] for _ in known]
        for piece in self.pieces:
            parts[piece.index].append(piece.part)
        self.coverage = covered(model, known, parts, roles is not None)
        self.rows = tuple(dict.fromkeys(piece.row for piece in self.pieces))
        self.each = tuple(Row(name, *place(name)) for name in self.names)  # a row for every single parameter
        self.groups = tuple(group for group in GROUPS if any(piece.group == group for piece in self.pieces))
        self.kinds = tuple(dict.fromkeys(map(_kind, self.pieces)))
        spot = {row: number for number, row in enumerate(self.rows)}
        self.gains = dict(_gains(modules, known, place))  # row -> index of a norm's weight
        self._row = np.array([spot[piece.row] for piece in self.pieces], dtype=np.int64)
        self._member = {g: np.array([g == p.group for p in self.pieces], dtype=bool) for g in self.groups}
        self._rows = {g: self._index(np.where(m, self._row, len(self.rows))) for g, m in self._member.items()}
        self._rows[""] = self._index(self._row)
        self._whose = self._index([piece.index for piece in self.pieces])
        self._kind = self._index([self.kinds.index(_kind(piece)) for piece in self.pieces])
        owners = [type(modules[name.rpartition(".")[0]]).__name__ for name in self.names]
        self._turned = {at for at, kind in enumerate(owners) if kind == TRANSPOSED and self._own[at].dim() == 2}
        if ranks.known:
            self.bind()

    def bind(self) -> None:
        """Read the part of every parameter that this rank holds. With parallel='later' this happens at the first
        forward, since parallelize_module replaces the parameters."""
        ranks = self._ranks
        self._known = self._places()
        self._own = list(self._known.values())
        self._ids = frozenset(map(id, self._own))
        self._sharded = ranks.sharded
        cuts = [(piece.index, self._held(piece)) for piece in self.pieces]
        shares = None if ranks.alone else [ranks.layout(self._own[index]).share for index, _ in cuts]
        # (pieces,): the share that this rank adds of entries which several ranks hold; None in one process
        weights = None if shares is None else torch.tensor(shares, dtype=torch.float64, device=self.device)
        self.weights = weights
        tensors = self.tensors
        self.squares = Squares(cuts, tensors, self.device, weights)  # takes one tensor or None for each parameter
        held = [tensor[part] if part else tensor for i, part in cuts for tensor in (tensors[i],)]
        sizes = [tensor.numel() if is_counted(tensor) else 0 for tensor in held]
        entries = torch.tensor(sizes, dtype=torch.float64, device=self.device)
        self.entries = self.by_row(entries if weights is None else entries * weights)  # (rows, 1)

    def follow(self) -> list[str]:
        """Read the parameters that the model has now. Parameters that stand where others of the same name, shape and
        type stood are bound in their place. If any other parameter came or went, return the names of those; else [].
        With several processes every parameter that came is named, since what each rank holds of it is not known."""
        found = self._places()
        if found is self._known:
            return []
        self._known = found
        bound = dict(zip(self.names, self._own, strict=True))
        now = {name: _as_bound(parameter, bound.get(name)) for name, parameter in found.items()}
        ours, theirs = {*map(id, bound.values())}, {*map(id, now.values())}
        if ours == theirs:
            return []
        if self._ranks.alone and list(now) == self.names and all(_alike(now[name], bound[name]) for name in now):
            self.bind()
            return []
        came = [name for name, parameter in now.items() if id(parameter) not in ours]
        return came or [name for name, parameter in bound.items() if id(parameter) not in theirs]

    @property
    def have_gradients(self) -> bool:
        return any(tensor.grad is not None for tensor in self._own)

    def is_behind(self, row: Row) -> bool:
        """True if all parameters of a row are registered after all layers, as those of a head are; those of an
        embedding are not. False for a model without layers."""
        inside = [piece.index for piece in self.pieces if piece.row.layer]
        return bool(inside) and min(piece.index for piece in self.pieces if piece.row == row) > max(inside)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameters. For sharded parameters this is the local shard, which is read anew at each access since it
        may be replaced."""
        if not self._sharded:
            return self._own
        with torch.no_grad():
            return [local(tensor) for tensor in self._own]

    @property
    def originals(self) -> list[torch.Tensor]:
        """The parameters as the optimizer knows them."""
        return self._own

    def stepped(self) -> Iterator[torch.Tensor]:
        """Yield the parameters that an optimizer of this watch holds; all parameters if none is known to hold any."""
        held = (tensor for group in self.optimizer_groups for tensor in group["params"] if id(tensor) in self._ids)
        if (first := next(held, None)) is None:
            yield from self._own
        else:
            yield first
            yield from held

    @property
    def optimizer_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters of all optimizers, each with its settings."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def measuring(self) -> Any | None:
        """The optimizer, if there is a single one that sums the numbers of probes in its own step: ``measure(cuts)``
        before the step, ``measured()`` after. None for any other optimizer, on several ranks, or if a piece is cut by
        columns."""
        own = self.optimizers[0] if len(self.optimizers) == 1 and self._ranks.alone else None
        by_rows = not any(isinstance(piece.part, tuple) for piece in self.pieces)
        return own if by_rows and hasattr(own, "measured") else None

    @property
    def cuts(self) -> list[tuple[torch.Tensor, Part]]:
        """The pieces, as parts of parameters."""
        return [(self._own[piece.index], piece.part) for piece in self.pieces]

    def in_step(self) -> torch.Tensor | None:
        """Return the sums that the optimizer took in its step for each piece, (pieces, 4): the squares of gradient,
        theta_t and update, and the number of gradient entries below eps. None if the optimizer takes no sums, or did
        not step."""
        return None if self.measuring is None else self.measuring.measured()

    def gradients(self) -> list[torch.Tensor | None]:
        if not self._sharded:
            return [tensor.grad for tensor in self._own]
        return [None if tensor.grad is None else local_gradient(tensor) for tensor in self._own]

    def is_turned(self, number: int) -> bool:
        """True if a parameter is a weight that is stored as (in, out), as Hugging Face's Conv1D stores it."""
        return number in self._turned

    @property
    def shares(self) -> list[float]:
        """The factor of what this rank adds of each parameter, so that entries which several ranks hold count once."""
        return [self._ranks.share(own) for own in self._own]

    def total_norm(self) -> Total | None:
        """Return the L2 norm of all gradients together; None if there is no gradient."""
        gradients = self.gradients()
        if all(gradient is None for gradient in gradients):
            return None
        return Total(Norm(), self.squares(gradients).sum().view(1, 1))

    def apart(self) -> list[str]:
        """Return the names of trained parameters that tensor parallelism did not cut and whose gradients have different
        norms on the ranks of one layer. All these ranks hold copies of such a parameter."""
        found = self._ranks.found
        if found.cuts is None or found.group is None:
            return []
        copies = [index for index, own in enumerate(self._own) if own.requires_grad and own not in found.cuts]
        grads = [None if self._own[i].grad is None else local_gradient(self._own[i]) for i in copies]
        norms = [torch.zeros(()) if g is None else torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]
        apart = self._ranks.differing(torch.stack([n.to(self.device, torch.float64) for n in norms])) if norms else []
        return [self.names[index] for index, differs in zip(copies, apart, strict=True) if differs]

    @property
    def alone(self) -> bool:
        """True if a single process trains the model."""
        return self._ranks.alone

    @property
    def staged(self) -> bool:
        """True if each process trains a stage of a pipeline."""
        return self._ranks.staged

    def place_of(self, number: int) -> Layout:
        """Return where this rank's part of a parameter lies in it."""
        return self._ranks.layout(self._own[number])

    @property
    def split(self) -> bool:
        """True if the caller says that some parameters are split over ranks."""
        ranks = self._ranks
        if not ranks.known or not ranks.found.said:
            return False
        return any(ranks.layout(own).share * ranks.size > 1 for own in self._own)

    def unlike(self) -> list[str]:
        """Return the names of parameters whose gradients differ between ranks that are said to hold copies. Every rank
        must call this. The list is empty for a model of DTensors: a DTensor says itself which part a rank holds."""
        if not self._ranks.replicated:
            return []
        trained = [(name, own) for name, own in zip(self.names, self._own, strict=True) if own.requires_grad]
        return differing([Gradient(name, self._ranks.layout(own).part, own.grad) for name, own in trained])

    def by_row(self, squares: torch.Tensor, group: str = "") -> torch.Tensor:
        """Sum the squares of all pieces, or of one group's pieces, by row: (rows, 1)."""
        return squares.new_zeros(len(self.rows) + 1).index_add_(0, self._rows[group], squares)[:-1, None]

    def by_parameter(self, squares: torch.Tensor) -> torch.Tensor:
        """Sum the squares of all pieces by parameter: (parameters, 1)."""
        return squares.new_zeros(len(self.names)).index_add_(0, self._whose, squares)[:, None]

    def by_piece(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return for each piece the number of its parameter: (parameters,) to (pieces,)."""
        return numbers.to(self.device, non_blocking=True)[self._whose]

    def by_kind(self, squares: torch.Tensor) -> dict[str, Total]:
        """Return the norm over each stack's branch weights, and the norm over all other parameters. The result is empty
        if there is one kind alone, as without roles."""
        sums = squares.new_zeros(len(self.kinds)).index_add_(0, self._kind, squares)
        totals = [Total(Norm(), part) for part in sums.view(-1, 1, 1).unbind()]
        return dict(zip(self.kinds, totals, strict=True)) if len(self.kinds) > 1 else {}

    def seen(self, values: Values, groups: Sequence[str]) -> np.ndarray:
        """Return the rows that have a present value in each group, (rows, groups) bool; group "" takes all pieces."""
        present = self._has(values)
        grid = np.zeros((len(self.rows), len(groups)), dtype=bool)
        for column, group in enumerate(groups):
            grid[self._row[present & self._member.get(group, True)], column] = True
        return grid

    def share_under_eps(self, sums: torch.Tensor | None = None) -> Total | None:
        """Return the share of gradient entries below the eps of their optimizer group. Zeros count too, also those that
        a sparse gradient does not store; parameters of other models do not. None if no group has an eps that is one
        number (Adafactor's are two). ``sums``: the result of :meth:`in_step`, which already has the count."""
        if sums is not None:
            number, held = sums[:, 3].sum(), float(sum(g.numel() for g in self.gradients() if g is not None))
            return Total(Mean(), torch.stack((number, torch.full_like(number, held))).view(1, 2)) if held else None
        below: list[torch.Tensor] = []
        entries = unstored = 0.0
        members = {id(tensor) for group in self.optimizer_groups for tensor in group["params"]}
        ours = members & self._ids or members  # all of them, where the optimizer holds copies of its own
        for group in self.optimizer_groups:
            if not isinstance(group.get("eps"), float):
                continue
            held = [tensor for tensor in group["params"] if tensor.grad is not None and id(tensor) in ours]
            for share, tensors in self._by_share(held).items():
                gradients: list[Any] = [local_gradient(t) if self._sharded else t.grad for t in tensors]
                left = size = sum(gradient.numel() for gradient in gradients)
                for flat in flattened(gradients):
                    left -= flat.numel()
                    below.append(share * _below(flat, group["eps"]))
                entries += share * size
                unstored += share * left * (group["eps"] > 0)  # the zeros of sparse gradients
        if not entries:
            return None
        number = torch.stack(below).sum()
        if unstored:
            number = number + unstored
        return Total(Mean(), torch.stack((number, torch.full_like(number, entries))).view(1, 2))

    def _by_share(self, tensors: Sequence[torch.Tensor]) -> dict[float, list[torch.Tensor]]:
        """Group parameters by this rank's share: the factor of the part that the rank adds."""
        groups: dict[float, list[torch.Tensor]] = {}
        for tensor in tensors:
            groups.setdefault(self._ranks.share(tensor), []).append(tensor)
        return groups

    def _held(self, piece: Piece) -> Part:
        """Return the part of this rank's shard that belongs to ``piece``; an empty slice if the shard has none of
        it."""
        if not self._sharded or piece.part is None:
            return piece.part
        own = self._own[piece.index]
        layout, shape = self._ranks.layout(own), local(own).shape

        def held(part: slice, dim: int, first: int) -> slice:
            ends = part.indices(own.shape[dim])[:2]
            return slice(*(min(max(at - first, 0), shape[dim]) for at in ends))

        if isinstance(piece.part, tuple):
            return held(piece.part[0], 0, layout.start), held(piece.part[1], 1, layout.left)
        return held(piece.part, 0, layout.start)

    def _has(self, values: Values) -> np.ndarray:
        return np.array([is_counted(values[piece.index]) for piece in self.pieces], dtype=bool)

    def _index(self, numbers: Sequence[int] | np.ndarray) -> torch.Tensor:
        return torch.as_tensor(np.asarray(numbers, dtype=np.int64)).to(self.device)


def _as_bound(parameter: torch.Tensor, bound: torch.Tensor | None) -> torch.Tensor:
    """Return a parameter as it was bound: between passes FSDP2 may show the whole parameter in place of its shards."""
    return bound if hasattr(bound, "placements") and not hasattr(parameter, "placements") else parameter  # pyright: ignore


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _below(flat: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the number of entries whose size is below ``eps``. A count in float32 is exact for chunks of this size,
    and faster. A comparison in float16 would round an eps of 1e-8 to 0."""
    return flat.abs().to(torch.promote_types(flat.dtype, torch.float32)).lt_(eps).sum(dtype=torch.float32).double()


def _kind(piece: Piece) -> str:
    return f"branch_{piece.row.stack}" if piece.branch else "nonbranch"


def _by_role(roles: Callable[[], Any], inner: nn.Module, known: Mapping[str, nn.Parameter]) -> Iterator[Piece]:
    """Yield the pieces by the model's own roles. A role has the name of its parameter in ``named_parameters()``, and
    the part."""
    indices = {parameter: index for index, parameter in enumerate(known.values())}
    names = {name: indices[p] for name, p in inner.named_parameters(remove_duplicate=False) if p in indices}
    for role, (name, part) in roles().items():
        if name not in names:
            raise UsageError(f"parameter_roles() names {name!r}, which named_parameters() does not have.")
        parts = role.split(".")
        if len(parts) > 3 and parts[1].isdigit():
            row, leaf = Row(".".join(parts[:3]), parts[0], int(parts[1]), parts[2]), parts[3:]
        else:
            site = role.removesuffix(".weight").removesuffix(".bias")
            row, leaf = Row(site, parts[0] if "." in role else "", 0, site.rpartition(".")[2]), parts[1:]
        matrix = leaf[0] if leaf and leaf[0] in GROUP_OF else ""
        is_ln = bool(leaf) and leaf[0].endswith("norm")
        group = "ln" if is_ln else "bias" if matrix and leaf[-1] == "bias" else GROUP_OF.get(matrix, "")
        yield Piece(names[name], part, row, group, bool(matrix))


def _by_structure(
    modules: Mapping[str, nn.Module], known: Mapping[str, nn.Parameter], place: Places
) -> Iterator[Piece]:
    for index, (name, parameter) in enumerate(known.items()):
        owner, _, leaf = name.rpartition(".")
        row = place.row(name)
        if not row.layer:  # outside the layers: one row a module
            row = place.row(owner or leaf)
        group = "ln" if is_norm(modules[owner]) else "bias" if leaf.endswith("bias") else ""
        if group or not row.layer:
            yield Piece(index, None, row, group, False)
            continue
        for part in query_key(name, modules, parameter.shape):
            yield Piece(index, part.part, row, "qk" if part.apart else "", False)


def _gains(
    modules: Mapping[str, nn.Module], known: Mapping[str, nn.Parameter], place: Places
) -> Iterator[tuple[Row, int]]:
    indices = {parameter: index for index, parameter in enumerate(known.values())}
    for path, module in modules.items():
        if is_norm(module) and (index := indices.get(module._parameters.get("weight"))) is not None:  # pyright: ignore
            yield Row(path, *place(path)), index


def _merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Join neighbouring rows of a parameter that count in the same row and group into one piece."""
    merged: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.index, _start(piece.part))):
        if merged and (rows := _joined(merged[-1].part, piece.part)) is not None:
            joined = replace(merged[-1], part=rows)
            if joined == replace(piece, part=rows):
                merged[-1] = joined
                continue
        merged.append(piece)
    return tuple(merged)


def _start(part: Part) -> int:
    own = part[1] if isinstance(part, tuple) else part
    return 0 if own is None else own.start or 0


def _joined(first: Part, second: Part) -> slice | None:
    """Return both parts as one slice if they are neighbouring rows; else None."""
    if isinstance(first, slice) and isinstance(second, slice) and first.stop == second.start:
        return slice(first.start, second.stop)
    return None
