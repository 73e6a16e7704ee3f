"""Where a row's numbers add up: boards of additive float64 numbers on the device, and the masks that weight tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...errors import UsageError
from ...schema import Cells, Row
from ..base import Probe
from ..places.sites import Site
from ..rules import Rule

Mask = torch.Tensor | Mapping[str, torch.Tensor]


class Masks:
    """Which tokens of a stack are real: ones without a mask, else the caller's, asked for once per forward pass."""

    def __init__(self, given: Mask | Callable[[], Mask | None] | None, stacks: Iterable[str]) -> None:
        self._given = given
        self._stacks = tuple(stacks)
        self.renew()

    def renew(self) -> None:
        """A new pass begins: the next look-up asks again."""
        self._asked = False
        self._masks: Mask | None = None
        self._found: dict[tuple[str | None, torch.Size], torch.Tensor] = {}

    def __call__(self, stack: str | None, tokens: torch.Size, device: torch.device) -> torch.Tensor:
        """True per real token, of shape ``tokens``; everywhere for the stack None, that of routed tokens."""
        if (found := self._found.get((stack, tokens))) is None:
            found = self._found[stack, tokens] = self._look_up(stack, tokens, device)
        return found

    def _look_up(self, stack: str | None, tokens: torch.Size, device: torch.device) -> torch.Tensor:
        if stack is None:
            return torch.ones(tokens, dtype=torch.bool, device=device)
        if not self._asked:
            self._masks = self._given() if callable(self._given) else self._given
            self._asked = True
            if isinstance(self._masks, Mapping) and (foreign := set(self._masks) - set(self._stacks)):
                known = ", ".join(map(repr, self._stacks)) or "none"
                raise UsageError(f"mask names {sorted(foreign)}, but the model's stacks are {known}.")
        mask = self._masks.get(stack) if isinstance(self._masks, Mapping) else self._masks
        if mask is None:
            return torch.ones(tokens, dtype=torch.bool, device=device)
        if (fitting := _laid_out(mask, tokens)) is None:
            raise UsageError(
                f"mask has shape {tuple(mask.shape)} where stack {stack!r} has tokens {tuple(tokens)}: give one "
                "value per token, in the layout of the hidden states, or a function that returns each pass's own mask, "
                "or leave out the probes that look there (probes='-NAME')."
            )
        return fitting.to(device=device, dtype=torch.bool)


def _laid_out(mask: torch.Tensor, tokens: torch.Size) -> torch.Tensor | None:
    """``mask`` (B, T) for tokens (B, T), flattened ones (B T), or those of each head, (B, T, H) or (B, H, T)."""
    if mask.shape == tokens:
        return mask
    if tokens == (mask.numel(),):
        return mask.reshape(tokens)
    if mask.dim() != 2 or len(tokens) != 3:
        return None
    ends, inner = mask.shape == (tokens[0], tokens[2]), mask.shape == tokens[:2]
    if ends == inner:  # (B, T, T) may be either
        return None
    return (mask[:, None, :] if ends else mask[:, :, None]).expand(tokens)


class Board:
    """One probe's numbers for one row: views of shared buffers, (rows, width) for each column.

    Numbers from hooks wait, one small tensor each, until ``reduce`` adds equal shapes up in a few operators.
    """

    def __init__(self, probe: Probe, rows: Sequence[Row], columns: Sequence[str], sites: Sequence[Site] = ()) -> None:
        self.probe = probe
        self.sites = sites
        self.table = probe.table(rows, columns)
        self.rules = {column: probe.columns[column] for column in columns}
        self.parts: dict[str, torch.Tensor] = {}
        self._waiting: dict[str, list[tuple[int, torch.Tensor]]] = {}
        self._values: dict[Any, tuple[list[int], list[torch.Tensor]]] = {}
        self._index: dict[tuple[int, ...], torch.Tensor] = {}
        self._seen = np.zeros((len(rows), len(columns)), dtype=bool)

    @property
    def main(self) -> str:
        """The raw number that a lone tensor from ``measure`` is."""
        return self.reads(next(iter(self.rules)))

    def reads(self, column: str) -> str:
        return self.rules[column].of or column

    def hold(self, raw: str, row: int, value: torch.Tensor) -> None:
        self._waiting.setdefault(raw, []).append((row, value))

    def hold_value(self, raw: str, row: int, value: torch.Tensor) -> None:
        """A value that is measured later, with others of its shape; it must not be written to until then."""
        key = raw, self.sites[row].mask, value.shape, value.dtype
        rows, values = self._values.setdefault(key, ([], []))
        rows.append(row)
        values.append(value.detach())

    def reduce(self, masks: Masks) -> None:
        """Adds what waits to the columns, equal shapes of one stack together."""
        for (raw, stack, shape, _), (rows, values) in self._values.items():
            numbers = self.probe.measure_together(values)
            self.add(raw, rows, numbers, masks(stack, shape[:-1], numbers.device) if numbers.dim() > 1 else None)
        self._values.clear()
        for raw, entries in self._waiting.items():
            if raw not in (known := {self.reads(column) for column in self.rules}):
                measured = f"probe {self.table.name!r} measures {raw!r}"
                raise UsageError(f"{measured}, but its columns read {', '.join(map(repr, sorted(known)))}.")
            groups: dict[tuple[str | None, torch.Size], tuple[list[int], list[torch.Tensor]]] = {}
            for row, value in entries:
                stack = self.sites[row].mask if value.dim() else None
                rows, values = groups.setdefault((stack, value.shape), ([], []))
                rows.append(row)
                values.append(value)
            for (stack, shape), (rows, values) in groups.items():
                stacked = torch.stack(values)  # (n, *tokens)
                self.add(raw, rows, stacked, masks(stack, shape, stacked.device) if shape else None)
        self._waiting.clear()

    def add(self, raw: str, rows: Sequence[int], values: torch.Tensor, weight: torch.Tensor | None) -> None:
        index = self._rows(tuple(rows), values.device)
        for place, (column, rule) in enumerate(self.rules.items()):
            if self.reads(column) == raw:
                rule.add(self.parts[column], index, values, weight)
                self._seen[rows, place] = True

    def collect(self, parts: Mapping[str, torch.Tensor], seen: np.ndarray) -> None:
        """Takes the numbers of all rows at once, from a probe of parameters."""
        for column, values in parts.items():
            own = self.parts[column]
            own.add_(values) if self.rules[column].additive else torch.maximum(own, values, out=own)
        self._seen |= seen

    @property
    def is_empty(self) -> bool:
        return not self._seen.any()

    def take(self) -> tuple[torch.Tensor, np.ndarray]:
        """The columns one after the other, on the device, and which cells anything was recorded for; then empty."""
        finished = torch.cat([rule.finish(self.parts[column]) for column, rule in self.rules.items()])
        seen = self._seen.copy()
        self.clear()
        return finished, seen

    def hand_over(self) -> tuple[list[tuple[Rule, torch.Tensor]], np.ndarray]:
        """Instead of :meth:`take`, what several ranks must add up first: the columns before their rules finish them."""
        columns = [(rule, self.parts[column].clone()) for column, rule in self.rules.items()]
        seen = self._seen.copy()
        self.clear()
        return columns, seen

    def forget(self) -> np.ndarray:
        """Which cells anything was recorded for; as if it had not been."""
        seen = self._seen.copy()
        self._seen[:] = False
        return seen

    def recall(self, seen: np.ndarray) -> None:
        """A replay has filled the columns for these cells."""
        self._seen |= seen

    def clear(self) -> None:
        self._waiting.clear()
        self._values.clear()
        self._seen[:] = False
        for column, rule in self.rules.items():
            self.parts[column].fill_(0 if rule.additive else -torch.inf)

    def _rows(self, rows: tuple[int, ...], device: torch.device) -> torch.Tensor:
        if (index := self._index.get(rows)) is None:
            index = self._index[rows] = torch.tensor(rows, device=device)
        return index


def allocate(boards: Iterable[Board], device: torch.device) -> torch.Tensor:
    """One float64 buffer for all sums, which is returned, and one for all maxima."""
    boards = list(boards)
    buffer = torch.empty(0)
    for additive in (False, True):
        columns = [(b, c, rule.width) for b in boards for c, rule in b.rules.items() if rule.additive is additive]
        sizes = [len(board.table.rows) * width for board, _, width in columns]
        buffer = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        for (board, column, width), piece in zip(columns, buffer.split(sizes), strict=True):
            board.parts[column] = piece.view(-1, width)
    for board in boards:
        board.clear()
    return buffer


class CleanPasses:
    """How many micro-batches of a row left each number finite: two operator calls for each but the last."""

    def __init__(self, sums: torch.Tensor) -> None:
        self._sums, self._clean = sums, torch.zeros(sums.shape, dtype=torch.int16, device=sums.device)
        self.passes = 0

    def count(self) -> None:
        self._clean.add_(self._sums.isfinite())
        self.passes += 1

    def take(self, boards: Sequence[Board]) -> dict[str, torch.Tensor]:
        """(rows,) by table, and then begins anew; empty where there was one micro-batch."""
        if not self.passes:
            return {}
        taken = {}
        for board in boards:
            parts = next((p for c, p in board.parts.items() if board.rules[c].additive), None)
            if parts is not None:
                piece = self._clean[parts.storage_offset() :][: parts.numel()]
                taken[board.table.name] = piece.view(parts.shape).amin(dim=1).double()
        self._clean.zero_()
        self.passes = 0
        return taken


def cells(values: np.ndarray, seen: np.ndarray) -> Cells:
    """A board's columns as the sink's cells: missing where nothing was recorded, absent where a whole row is empty."""
    grid: Any = values.reshape(seen.shape[1], seen.shape[0]).T
    missing = None if seen.all() else np.logical_not(seen)
    return Cells(np.where(seen, grid, np.nan), np.logical_not(seen.any(axis=1)), missing)
