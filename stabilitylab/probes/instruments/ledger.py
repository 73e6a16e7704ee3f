"""The ledger of a run: facts about each update that are read, not inferred, and stored where they change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ...changes.change import BEHIND, FORWARDS, STEPS, WITH_STATE, ZEROS_IN
from ...errors import UsageError
from .._engine.row import RowRecord, copied_over
from .._engine.watched import Watched
from ..parameters.layouts import local
from ..places.naming import ParameterPlaces, named
from ..state import Digester, numbers_of
from ..state.bits import version, versions
from .given_optimizers import GivenOptimizers
from .instrument import Instrument
from .stepping import before_step
from .training_pass import TrainingRows

MOST_CHANGES = 20  # stored changes of one name, such as a counter; the last of them says that the changes go on
ZEROS = 0.1  # a share of zeros that differs by so much is a fact: moments of rare embeddings come and go
GRADUAL = 0.05  # a share: a sparse ledger stores gradual changes of the rate once they amount to this
SAMPLED = 3  # step counts that are read of a group
ABSENT = "absent"
PLAIN_TYPES = {Tensor, nn.Parameter}


@dataclass(frozen=True)
class LedgerFact:
    """A fact that changed: before update ``step`` it was ``before``, and at this update it is ``after``.

    ``kind``: "setting" (of a parameter group), "state" (of the optimizer: step counts, entries, share of zeros), "flag"
    (``training`` of a module, ``requires_grad`` or ``dtype`` of a parameter), "attribute" (a number of a module),
    "write" (a parameter or a moment was written between two updates), "loop" (forward passes of an update, known in
    probed rows; False for an optimizer that does not step while its parameters move). ``before`` is None for the first
    value of a run.
    """

    step: int
    kind: str
    name: str
    before: Any
    after: Any

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class UpdateLedger(Instrument):
    """Records settings, flags, counts and writes of each update, and stores what changed in ``ledger.jsonl``.

    ``sparse``: the ledger of every watched run. It has no digests, stores gradual changes of a rate once they amount to
    5 %, leaves out settings that lie on a device, and stores 20 changes of a name that goes on changing.

    Read at each update, on the host: the settings of every parameter group as its optimizer steps; the number of its
    parameters with a state, and the step counts of three; ``training`` of modules, ``requires_grad`` and ``dtype`` of
    parameters; the numbers among the attributes of modules; autograd's count of writes to parameters and moments, which
    names a tensor that something else than the optimizer wrote to. A setting that is a tensor is read with its row.
    Each ``digests`` updates, on the device: digests of parameters and moments before the step of update t and after
    that of update t - 1, which tell if a write changed a bit (also one through ``.data``, which autograd does not
    count), and the share of zeros in moments.

    Nothing is written to the model, the optimizers or a random state.
    """

    def __init__(self, digests: int = 10, sparse: bool = False) -> None:
        if isinstance(digests, bool) or not isinstance(digests, int) or digests < 0:
            raise UsageError(f"digests = {digests!r} must be a number of updates, 0 for no digests.")
        self.digests, self.sparse = digests, sparse
        self.heard: list[Callable[[LedgerFact], object]] = []
        self.training: TrainingRows | None = None  # of the watcher, which counts forwards in probed rows
        self.given: GivenOptimizers | None = None  # of the watcher, which knows those that do not step
        self._known: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._rates: dict[str, float] = {}  # of the update before, where gradual changes are left out
        self._calls: dict[int, int] = {}  # steps that each optimizer has begun
        self._seen: dict[str, list[Any]] = {}  # flags and numbers of the update before
        self._names: list[str] = []  # of the tensors that are held
        self._marks: tuple[list[str], list[Any]] = ([], [])  # names and counted writes after the last steps
        self._facts: list[LedgerFact] = []
        self._step = -1
        self._handles: list[Any] = []
        self._written: set[str] = set()
        self._mark: tuple[int, list[str], Tensor] | None = None  # update t, names, digests after update t - 1
        self._coming: list[tuple[Callable[[Tensor], None], Tensor, Any]] = []
        self._digester = Digester()

    def open(self, watched: Watched) -> None:
        if not watched.optimizers:
            raise UsageError("record= needs optimizer=, the optimizer of the loop, or several.")
        if watched.options.recorder is not None:
            raise UsageError("record= reads each update on the host: leave CUDA graphs out (--cuda-graphs off).")
        self._watched = watched
        self._modules = [(each.path, each.module) for each in named(watched.model)]
        self._attributes = numbers_of(watched.model)
        self._parameters = ParameterPlaces(watched.model)
        self._handles = [
            before_step(optimizer, partial(self._stepping, number))
            for number, optimizer in enumerate(watched.optimizers)
        ]
        self._stepped: set[int] = set()

    def after_backward(self, row: RowRecord) -> None:
        self._step = row.step
        self._stepped = set()
        self._flags()
        passes = self.training and self.training.passes
        if passes is not None and passes.attached and passes.forwards:
            self._note(row.step, "loop", FORWARDS, passes.forwards)
        for number, since in self.given.since.items() if self.given is not None else ():
            self._note(since, "loop", f"optimizer {number} {STEPS}", False)

    def after_step(self, number: int) -> None:
        self._stepped.add(number)
        tensors = self._tensors()
        if len(self._names) != len(tensors):
            self._names = [name for name, _ in self._held()]
        self._marks = self._names, _counted(tensors)
        self._written = set()
        all_of_them = len(self._stepped) == len(self._watched.optimizers)
        if all_of_them and self.digests and (self._step + 1) % self.digests == 0:
            held = dict(self._held())
            digests = self._digester.each(list(held.values()))
            self._mark = None if digests is None else (self._step + 1, list(held), digests)

    def row_read(self, row: RowRecord) -> None:
        """Take what was on its way from the device; store the facts that are new."""
        coming, self._coming = self._coming, []
        for take, numbers, event in coming:
            if event is not None:
                event.synchronize()
            take(numbers)
        self._store()

    def close(self) -> None:
        self._detach()
        self._store()

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def state_dict(self) -> dict[str, Any]:
        own = {"known": self._known, "counts": self._counts, "rates": self._rates, "calls": self._calls}
        return {"ledger": {name: dict(each) for name, each in own.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        kept = state.get("ledger", {})
        own = (dict(kept.get(name, {})) for name in ("known", "counts", "rates", "calls"))
        self._known, self._counts, self._rates, self._calls = own
        self._seen = {}

    def _stepping(self, number: int) -> None:
        """Read what an optimizer begins its step with. An error must not reach the optimizer: the ledger ends, and
        training goes on."""
        try:
            self._calls.setdefault(number, self._step)
            self._read(number)
            self._calls[number] += 1
        except Exception as error:
            self._detach()
            self._watched.guard.instrument(type(self).__name__, (), error)

    def _read(self, number: int) -> None:
        optimizer = self._watched.optimizers[number]
        if self._known.get(f"loop optimizer {number} {STEPS}") is False:
            self._marks, self._mark = ([], []), None  # what wrote since its last step was another optimizer
        self._note(self._step, "loop", f"optimizer {number} {STEPS}", True, first=False)
        for at, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                name = f"optimizer {number} group {at} {key}"
                if isinstance(value, Tensor) and self.sparse:
                    if value.device.type == "cpu":
                        self._setting(self._step, name, value)
                elif isinstance(value, Tensor):
                    self._take_later(value.detach().clone(), partial(self._setting, self._step, name))
                elif key != "params":
                    self._setting(self._step, name, value)
            self._count(number, at, optimizer, group)
        self._look()

    def _take_later(self, numbers: Tensor, take: Callable[[Tensor], None]) -> None:
        """Start the copy of numbers to the host; ``take`` gets them as the row is read, so that no hook waits."""
        self._coming.append((take, *copied_over(numbers)))

    def _setting(self, step: int, name: str, value: Any) -> None:
        if self.sparse and name.endswith(" lr"):
            self._rate(step, name, _plain(value))
        else:
            self._note(step, "setting", name, _plain(value))

    def _rate(self, step: int, name: str, rate: Any) -> None:
        """Note a rate whose change since the last stored one amounts to GRADUAL, with the rate of the update before."""
        key = f"setting {name}"
        before, stored = self._rates.get(name), self._known.get(key)
        self._rates[name] = rate
        if before is None or not isinstance(stored, int | float) or not isinstance(rate, int | float):
            self._note(step, "setting", name, rate)
        elif abs(rate - stored) > GRADUAL * max(abs(rate), abs(stored)) or not math.isfinite(rate - stored):
            self._known[key] = before
            self._note(step, "setting", name, rate)
            self._known[key] = rate

    def _count(self, number: int, at: int, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
        states = [optimizer.state[one] for one in group["params"] if optimizer.state.get(one)]
        name = f"optimizer {number} group {at}"
        if self._known.get(f"state {name} {WITH_STATE}") or states:
            self._note(self._step, "state", f"{name} {WITH_STATE}", len(states))
        counts = [one["step"] for one in _some(states) if "step" in one]
        known = [float(one) for one in counts if not isinstance(one, Tensor) or one.device.type == "cpu"]
        if not known:
            return
        # a count that goes up by one is no change: the stored number is that of steps that it is behind
        lag = self._calls[number] - int(max(known))
        self._note(self._step, "state", f"{name} {BEHIND}", lag, first=lag != 0)

    def _look(self) -> None:
        """Look for writes since the last steps: by autograd's counts, and by digests where they are due."""
        mark, self._mark = self._mark, None
        names, marks = self._marks
        writes = _counted(self._tensors())
        if marks and writes != marks:
            self._names = [name for name, _ in self._held()]
            before = dict(zip(names, marks, strict=True))
            now = zip(self._names, writes, strict=True)
            self._written |= {name for name, own in now if name in before and before[name] != own}
        held = dict(self._held()) if mark is not None else {}
        after = None
        if mark is not None and mark[:2] == (self._step, list(held)):
            after = self._digester.each(list(held.values()))
        if mark is not None and after is not None:
            self._take_later(torch.stack([mark[2], after]), partial(self._compare, *mark[:2]))
            self._share_zeros()
        else:
            for name in sorted(self._written):
                fact = LedgerFact(self._step, "write", name, None, "written, bits not compared")
                if self.sparse:
                    self._count_change(fact, True)
                else:
                    self._add(fact)
            if self._written.difference(self._parameters()):
                self._share_zeros()

    def _compare(self, step: int, names: list[str], digests: Tensor) -> None:
        for name, before, after in zip(names, *digests.tolist(), strict=True):
            if before != after:
                self._add(LedgerFact(step, "write", name, _hex(before), _hex(after)))

    def _tensors(self) -> list[Tensor]:
        """Return parameters and the optimizers' tensors of their size, in the order of :meth:`_held`."""
        places = self._parameters()
        known = {id(parameter) for parameter in places.values()}
        return [
            *places.values(),
            *(
                value
                for optimizer in self._watched.optimizers
                for parameter, state in optimizer.state.items()
                if id(parameter) in known
                for value in state.values()
                if isinstance(value, Tensor) and value.dim()
            ),
        ]

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and the optimizers' tensors of their size, by name."""
        names = self._parameters()
        yield from names.items()
        known = {id(parameter): name for name, parameter in names.items()}
        for optimizer in self._watched.optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.dim() and id(parameter) in known:
                        yield f"{key} of {known[id(parameter)]}", value

    def _share_zeros(self) -> None:
        """Compute the share of zeros in the moments of each group, on the device."""
        names, shares = [], []
        for number, optimizer in enumerate(self._watched.optimizers):
            for at, group in enumerate(optimizer.param_groups):
                moments: dict[str, list[Tensor]] = {}
                for parameter in group["params"]:
                    for key, value in optimizer.state.get(parameter, {}).items():
                        if isinstance(value, Tensor) and value.dim():
                            moments.setdefault(key, []).append(local(value))
                for key, tensors in moments.items():
                    entries = max(1, sum(one.numel() for one in tensors))
                    filled = torch.stack([one.count_nonzero() for one in tensors]).sum()
                    names.append(f"optimizer {number} group {at} {ZEROS_IN} {key}")
                    shares.append(1 - filled.double() / entries)
        if shares:
            self._take_later(torch.stack(shares), partial(self._zeros, self._step, names))

    def _zeros(self, step: int, names: list[str], shares: Tensor) -> None:
        for name, share in zip(names, shares.tolist(), strict=True):
            if abs(share - self._known.get(f"state {name}", math.inf)) >= ZEROS:
                self._note(step, "state", name, round(share, 3))

    def _flags(self) -> None:
        """Look for flags and numbers of modules that differ from those of the update before; then name them."""
        modes = [module.training for _, module in self._modules]
        if self._differs("training", modes):
            whole = bool(modes and modes[0])
            for (path, _), flag in zip(self._modules, modes, strict=True):
                self._flag(f"training of {path or 'the model'}", flag, usual=whole if path else True)
        parameters = self._parameters()
        needed = [parameter.requires_grad for parameter in parameters.values()]
        types = [parameter.dtype for parameter in parameters.values()]
        if self._differs("parameters", [*needed, *types]):
            for name, flag, dtype in zip(parameters, needed, types, strict=True):
                self._flag(f"requires_grad of {name}", flag, usual=True)
                self._flag(f"dtype of {name}", str(dtype), usual=None)
        numbers = [held.get(key, ABSENT) for _, held, key in self._attributes]
        if self._differs("attributes", numbers):
            for (name, *_), value in zip(self._attributes, numbers, strict=True):
                known = self._known.get(f"attribute {name}")
                if value is not known:
                    self._note(self._step, "attribute", name, _plain(value), first=False)

    def _differs(self, what: str, values: list[Any]) -> bool:
        """Return True if these are not the objects of the update before."""
        before = self._seen.get(what, [])
        self._seen[what] = values
        return len(before) != len(values) or not all(map(is_, before, values))

    def _flag(self, name: str, value: Any, usual: Any) -> None:
        """Note a flag. Its first value is a fact only if it is not the usual one."""
        self._note(self._step, "flag", name, value, first=usual is not None and value != usual)

    def _note(self, step: int, kind: str, name: str, value: Any, first: bool = True) -> None:
        """Add a fact if the value differs from the known one. ``first``: the first value of all is a fact too."""
        key = f"{kind} {name}"
        is_known = key in self._known
        before = self._known.get(key)
        if is_known and (before == value or (_is_nan(before) and _is_nan(value))):
            return
        self._known[key] = value
        if is_known or first:
            self._count_change(LedgerFact(step, kind, name, before, value), is_known)

    def _count_change(self, fact: LedgerFact, is_known: bool) -> None:
        if fact.kind == "attribute" or (self.sparse and not fact.name.endswith(" lr")):
            count = self._counts[fact.name] = self._counts.get(fact.name, 0) + 1
            if count == MOST_CHANGES:
                fact = replace(fact, after="goes on changing; stored no more")
            elif count > MOST_CHANGES:
                return
        self._add(fact, heard=is_known)

    def _add(self, fact: LedgerFact, heard: bool = True) -> None:
        self._facts.append(fact)
        for listener in self.heard if heard and fact.kind != "loop" else ():
            listener(fact)

    def _store(self) -> None:
        facts, self._facts = self._facts, []
        take = getattr(self._watched.sink, "ledger", None)
        if take is not None and facts:
            take([fact.as_dict() for fact in facts])


def _plain(value: Any) -> Any:
    """Return a setting as JSON has it."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else [*map(_plain, value.tolist())]
    if isinstance(value, tuple | list):
        return [*map(_plain, value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _some(states: list[Any]) -> list[Any]:
    """Return up to SAMPLED of the states: the first, those between at even distances, and the last."""
    if len(states) <= SAMPLED:
        return states
    return [states[place * (len(states) - 1) // (SAMPLED - 1)] for place in range(SAMPLED)]


def _counted(tensors: list[Tensor]) -> list[tuple[int | None, int]]:
    """Return the marks of :func:`_writes` for tensors; in one go where all of them are plain."""
    if set(map(type, tensors)) <= PLAIN_TYPES:
        return [*zip(versions(tensors), map(Tensor.data_ptr, tensors), strict=True)]
    return [_writes(tensor) for tensor in tensors]


def _writes(tensor: Tensor) -> tuple[int | None, int]:
    """Return autograd's count of writes to a tensor, and its address, which another ``data`` changes."""
    return version(tensor), tensor.data_ptr() if type(tensor) in PLAIN_TYPES else 0


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _hex(digest: int) -> str:
    return f"{digest % 2**64:016x}"
