"""A snapshot of a model before a pass. After the pass it finds the tensors that changed, and puts back what it can."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..parameters.copies import kept
from .bits import Layout, Span, layout, same_bits, spans, version
from .holders import HeldTensor, Kind, Random, survey

SAMPLE = 64  # words that are compared of each tensor without a copy
ROOM = 2  # a copy on the host needs so many times its size of free memory


@dataclass(frozen=True)
class TensorChange:
    """A tensor that a pass changed. ``undone``: the tensor has its earlier bits again."""

    name: str
    kind: Kind
    undone: bool


@dataclass(frozen=True)
class Found:
    """The changes that a pass made to the model.

    ``changes``: tensors that the pass changed, as far as the host knows. ``sampled``: tensors of which a sample alone
    was compared. ``flags``: for each of them the number of sampled words that differ, a tensor on the device, so that
    nothing waits for it; None if all tensors were copied. ``rewritten``: names of tensors that were written with the
    bits they had. ``rebound``: names of attributes and entries that were bound anew, and were put back. ``unseen``:
    names of tensors and containers that cannot be looked into. ``tensors``: the number of tensors that were looked at.
    """

    changes: Sequence[TensorChange]
    rebound: Sequence[str]
    rewritten: Sequence[str]
    unseen: Sequence[str]
    tensors: int
    sampled: Sequence[HeldTensor]
    flags: Tensor | None

    def read(self) -> list[TensorChange]:
        """Return all changes; the call waits for the device."""
        if self.flags is None:
            return merged(self.changes)
        pairs = zip(self.sampled, self.flags.tolist(), strict=True)  # no copy was kept of these: none is undone
        sampled = [TensorChange(held.name, held.kind, undone=False) for held, flag in pairs if flag]
        return merged([*self.changes, *sampled])


def merged(changes: Iterable[TensorChange]) -> list[TensorChange]:
    """Return each changed tensor once, as undone if all its changes are."""
    found: dict[str, TensorChange] = {}
    for change in changes:
        known = found.get(change.name, change)
        found[change.name] = TensorChange(change.name, change.kind, known.undone and change.undone)
    return list(found.values())


@dataclass(frozen=True)
class _Look:
    """A plain tensor as it was: a whole tensor, or the part ``number`` of a tensor that is made of several. ``alias``
    shares the tensor's memory, and so keeps the memory where it is."""

    held: HeldTensor
    number: int
    tensor: Tensor
    alias: Tensor
    layout: Layout
    version: int | None
    span: Span


class StateSnapshot:
    """The state of ``model`` now; :meth:`compare` finds the changes since.

    ``copied``: True keeps a copy of all tensors, by which every change is found and undone; a collection of names keeps
    copies of these tensors alone. For the other tensors the snapshot keeps the version, the address and a sample of
    :data:`SAMPLE` words, another sample each ``turn``. A copy that does not fit into memory is not made (``complete``
    is False then). ``apart``: names of tensors that are not looked at.

    An object that a pass binds anew (an attribute, a buffer, an entry of a list or dictionary) is put back without a
    copy. The state of a random generator that the model has is put back too.
    """

    def __init__(
        self, model: nn.Module, copied: bool | Collection[str] = True, turn: int = 0, apart: Collection[str] = ()
    ) -> None:
        found = survey(model)
        self._holders = [(holder, holder.entries()) for holder in found.holders]
        self._generators = [(generator, state_of(generator)) for _, generator in found.generators]
        self._unseen = list(found.unseen)
        self._looks: list[_Look] = []
        for held in found.tensors:
            if held.name in apart:
                continue
            parts = spans(held.tensor)
            if parts is None:
                self._unseen.append(held.name)
            for number, (part, span) in enumerate(parts or ()):
                self._looks.append(_Look(held, number, part, part.detach(), layout(part), version(part), span))
        wanted = (lambda name: copied) if isinstance(copied, bool) else set(copied).__contains__
        distinct = {look.span.key: look.span for look in self._looks if wanted(look.held.name)}
        copies = _copies(list(distinct.values()))
        self.complete = copies is not None
        self._copies = dict(zip(distinct, zip(distinct.values(), copies, strict=True), strict=True)) if copies else {}
        rest = {look.span.key: look for look in self._looks if look.span.key not in self._copies}
        self._sample = Sample(list(rest.values()), turn)

    def compare(self) -> Found:
        """Put back what was bound anew, restore the tensors of which a copy was kept, and return the changes."""
        changes, rebound = self._put_back()
        written = {key for key, (span, copy) in self._copies.items() if _restored(span, copy)}
        rewritten: list[str] = []
        for look in self._looks:
            name, kind, key = look.held.name, look.held.kind, look.span.key
            now = _part(look)
            if layout(now) != look.layout and not same_bits(now, look.alias):
                changes.append(TensorChange(name, kind, undone=_moved_back(now, look)))
            bumped = version(look.tensor) != look.version
            if key in written or (bumped and key not in self._copies):
                changes.append(TensorChange(name, kind, undone=key in written))
            elif bumped:
                rewritten.append(name)
        names = {look.held.name for look in self._looks}
        return Found(
            merged(changes), rebound, rewritten, self._unseen, len(names), self._sample.held, self._sample.flags()
        )

    def _put_back(self) -> tuple[list[TensorChange], list[str]]:
        changes: list[TensorChange] = []
        rebound: list[str] = []
        for holder, before in self._holders:
            for key, old, new in holder.put_back(before):
                if holder.kind == "attribute" or not isinstance(old, Tensor):
                    rebound.append(holder.named(key))
                elif not (isinstance(new, Tensor) and same_bits(old, new)):
                    changes.append(TensorChange(holder.named(key), holder.kind, undone=True))
        for generator, state in self._generators:
            set_state(generator, state)
        return changes, rebound


class Sample:
    """A few words of each of some tensors, copied; later, for each tensor, the number of these words that differ."""

    def __init__(self, looks: Sequence[_Look], turn: int) -> None:
        self._turn = turn
        self._groups: dict[tuple[torch.device, torch.dtype], list[_Look]] = {}
        for look in looks:
            self._groups.setdefault((look.span.device, look.span.word), []).append(look)
        self.held = [look.held for group in self._groups.values() for look in group]
        self._before = [torch.cat(self._views(group)) for group in self._groups.values()]

    def flags(self) -> Tensor | None:
        """Return the number of sampled words that differ, (tensors,) float64 in the order of ``held``; None without
        tensors."""
        found = []
        for group, before in zip(self._groups.values(), self._before, strict=True):
            views = self._views(group)
            owner = torch.from_numpy(np.repeat(np.arange(len(group)), [view.numel() for view in views]))
            differs = (torch.cat(views) != before).double()
            sums = torch.zeros(len(group), dtype=torch.float64, device=before.device)
            found.append(sums.index_add_(0, owner.to(before.device, non_blocking=True), differs))
        return torch.cat([sums.to(found[0].device) for sums in found]) if found else None

    def _views(self, group: Sequence[_Look]) -> list[Tensor]:
        return [look.span.sampled(SAMPLE, self._turn) for look in group]


def _copies(spans: Sequence[Span]) -> list[Tensor] | None:
    """Return a copy of the words of each span; None if memory is short."""
    words = [span.words() for span in spans]
    on_host = sum(word.nbytes for word in words if word.device.type == "cpu")
    free = free_memory()
    if free is not None and on_host * ROOM > free:
        return None
    try:
        return kept(words)
    except (MemoryError, torch.OutOfMemoryError):
        return None
    except RuntimeError as error:
        if "memory" in str(error):  # an error of the CPU's allocator
            return None
        raise


def free_memory() -> int | None:
    """Return the bytes of the host's memory that can be had without swapping; None if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        told = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(told.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _restored(span: Span, copy: Tensor) -> bool:
    """Write the copy back if a bit differs; return True if one did."""
    words = span.words()
    before = copy.to(words.device)
    if torch.equal(words, before):
        return False
    words.copy_(before)
    return True


def _part(look: _Look) -> Tensor:
    """Return the part as it is now: a wrapper may hold another tensor than before."""
    if look.tensor is look.held.tensor:
        return look.tensor
    parts = spans(look.held.tensor) or []
    return parts[look.number][0] if look.number < len(parts) else look.tensor


def _moved_back(now: Tensor, look: _Look) -> bool:
    """Give a tensor the memory that it had; return False if that cannot be done."""
    if now is not look.tensor:
        return False
    try:
        now.data = look.alias
    except RuntimeError:
        return False
    return True


def state_of(generator: Random) -> Any:
    """Return a copy of the state of a random generator; None for a generator without a state."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    try:
        return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()
    except NotImplementedError:  # the system's own generator has no state
        return None


def set_state(generator: Random, state: Any) -> None:
    """Put a generator back into the state that :func:`state_of` returned."""
    if state is None:
        return
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
