"""Values that a model shows by :func:`stabilitylab.tap`: places that are found while the first row is measured.

In eager code a value is measured at once. In compiled code an operator is left in its place, with a key of the module
that shows it and the name; which place that is, and what is wanted there, is looked up when it runs.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from ...errors import UsageError, listed
from ...tapping import hand_to, mentioned
from ..base import Probe
from ..places.copied import Copied
from ..places.naming import GENERIC, named, unwrapped
from ..places.sites import TAPPED, Site, Sites
from ..places.structure import is_torchs
from .board import Board
from .hooks import Hook, is_transformed, not_copied
from .passes import Pass, Wanted
from .unreached import NAMED
from .watchable import compiled_modules

log = logging.getLogger("stabilitylab")

ATTRIBUTE = "_stabilitylab_key"  # of a module that may show values
LATE = "was first reached after the first row, when the tables were laid out"
TWICE = "ran several times in one pass, and its numbers are of all of them: write tap(x, name, self) in compiled code"
Place = tuple[str, str]  # the full name, and the kind; of an attention module, how many heads it has


class Tapped:
    """The values that one model shows by ``tap``, as places of one watcher.

    ``lay`` brings new places to the boards. ``known``: places that an earlier attempt of the run has. ``why_not``: the
    reason if none can be recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sites,
        boards: Sequence[Board],
        probes: Sequence[type[Probe]],
        lay: Callable[[Sites], None],
        known: Sequence[Place],
        why_not: str,
    ) -> None:
        self.sites, self._lay, self._why_not = sites, lay, why_not
        self.open, self.expected = not why_not and bool(probes), False
        self._late: dict[str, str] = {}  # what is not recorded, or not as one place, and why
        self._hooks: dict[tuple[Pass, Place], Hook | None] = {}
        self._paths = {each.module: each.path for each in named(model)}
        self._root = unwrapped(model)
        self._keyed: list[nn.Module] = []
        gradients = frozenset(kind for kind in TAPPED if any(_looks_at_gradients(p, kind, sites) for p in probes))
        for module in self._paths if not why_not else ():
            if not is_torchs(module):
                key = vars(module).get(ATTRIBUTE)
                key = vars(module)[ATTRIBUTE] = key if isinstance(key, Key) else Key(module, self._root)
                key.gradients |= gradients
                self._keyed.append(module)
        self.places: list[Place] = []  # in the order in which they came to the tables
        self._heads: dict[tuple[Board, int], list[int]] = {}
        self.recall(boards, known)
        self._known = len(self.places)
        self.expected = self.open and mentions(model)
        hand_to(_shown)

    def listen(self, listener: Pass) -> None:
        """Let ``listener`` measure what is shown from now on."""
        _LISTENING.add(listener)

    def turn_away(self, listener: Pass) -> None:
        _LISTENING.discard(listener)
        self._hooks = {key: hook for key, hook in self._hooks.items() if key[0] is not listener}

    def close(self, compiled: bool) -> None:
        """End the watch. Compiled code keeps its keys, since it would be compiled anew without them."""
        for module in self._keyed if not compiled else ():
            module.__dict__.pop(ATTRIBUTE, None)

    def recall(self, boards: Sequence[Board], known: Iterable[Place]) -> bool:
        """Add what an earlier attempt knew to the tables; return True if anything was new."""
        new = [place for place in map(tuple, known) if place not in self.places]
        for path, kind in new:
            if kind.isdigit():
                self._known_heads(boards, path, int(kind))
            else:
                self._add(path, kind)
        return bool(new)

    def settle(self) -> bool:
        """Close the tables after the first row: no more places come to them. Return True if any came."""
        was_open, self.open, self.expected = self.open, False, False
        return was_open and len(self.places) > self._known

    def say(self, row: int) -> None:
        """Name, once, what is not recorded."""
        for why in dict.fromkeys(self._late.values()):
            names = [name for name, reason in self._late.items() if reason == why]
            if why:
                log.warning("row %d: %s %s.", row, listed(names, NAMED), why)
        self._late = dict.fromkeys(self._late, "")

    def show(
        self,
        listener: Pass,
        owner: nn.Module | None,
        value: Any,
        name: str,
        kind: str,
        compiled: bool = False,
        gradient: bool = False,
    ) -> None:
        """Note a value. ``compiled``: True in compiled code. ``gradient``: True if it is the gradient of a value."""
        path = f"{self._paths[owner or self._root]}.{name}".strip(".")
        if (key := (listener, (path, kind))) not in self._hooks:
            self._hooks[key] = self._wanted(listener, path, name, kind)
        if (hook := self._hooks[key]) is None:
            return
        if gradient:
            listener.visit_gradient(hook, value, of_input=False)
            return
        if compiled and owner is None and listener.repeats(hook):
            self._late.setdefault(f"tap {path}", TWICE)
        listener.visit(hook, None, value, compiled)

    def by_head(self, board: Board, row: int, numbers: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (row, numbers) of a module that attends, then of each of its heads. ``numbers``: of the heads, (heads,
        ...)."""
        yield row, board.probe.over_heads(numbers)
        rows = self._heads.get((board, row), [])
        if len(rows) < len(numbers):
            site = board.sites[row]
            if self.open:
                rows = self._behind(board, row, len(numbers))
            else:
                self._late.setdefault(
                    f"{board.table.name} of {site.name} from head {len(rows)} on", self._why_not or LATE
                )
        yield from zip(rows, numbers, strict=False)

    def _behind(self, board: Board, row: int, count: int) -> list[int]:
        """Return rows for ``count`` heads of the module at ``row``; add those that are missing."""
        site, rows = board.sites[row], self._heads.setdefault((board, row), [])
        new = [f"head_{number}" for number in range(len(rows), count)]
        rows += range(len(board.sites), len(board.sites) + len(new))
        names = [(f"{site.name}.{head}", f"{site.sublayer}.{head}") for head in new]
        board.extend([replace(site, name=name, sublayer=sub, module=nn.Identity()) for name, sub in names])
        self.places.append((site.name, str(count)))
        self._lay(self.sites)
        return rows

    def _known_heads(self, boards: Sequence[Board], path: str, count: int) -> None:
        for board in boards:
            row = next((row for row, site in enumerate(board.sites) if site.name == path), None)
            if board.probe.heads and row is not None:
                self._behind(board, row, count)

    def of_running(self) -> nn.Module | None:
        """Return the innermost module of the model that is running; None if the model is not running.

        Looks through the callers' frames, where ``tap`` was called without an owner and a row is probed. Without that
        every module of the model would need hooks that keep a stack of what runs, in rows that are not probed too, and
        hooks of ours on all modules change what torch.compile sees.
        """
        frame: Any = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            own = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if isinstance(own, nn.Module) and own in self._paths:
                return own
            frame = frame.f_back
        return None

    def has(self, owner: nn.Module) -> bool:
        return owner in self._paths

    def _wanted(self, listener: Pass, path: str, name: str, kind: str) -> Hook | None:
        # a name alone is what compiled code tells; the held-out pass, which is not compiled, is to fill the same row
        known = {site.name: site for site in self.sites.shown(kind)}
        site = known.get(path) or (known.get(name) if not self.open else None)
        if site is None:
            if not self.open:
                self._late.setdefault(f"tap {path}", self._why_not or LATE)
                return None
            site = self._add(path, kind)
        places = [(board, row) for board in listener.boards for row, each in enumerate(board.sites) if each is site]
        wanted = tuple(Wanted(board, row, (board.main,)) for board, row in places)
        return Hook(listener, site.module, wanted, False, True, frozenset()) if wanted else None

    def _add(self, path: str, kind: str) -> Site:
        if kind not in TAPPED:
            raise UsageError(f"tap: {kind!r} is no kind of place; choose one of {', '.join(TAPPED)}.")
        if not path or path in self.sites.modules:
            raise UsageError(f"tap: {path!r} is the name of a module already; choose another.")
        site = Site(path, nn.Identity(), *self._place(path))
        self.sites = replace(self.sites, tapped={**self.sites.tapped, kind: (*self.sites.shown(kind), site)})
        self.places.append((path, kind))
        self._lay(self.sites)
        return site

    def _place(self, path: str) -> tuple[str, int, str]:
        """Return the stack, layer and sub-layer of a name: by the layers that were found, else by a number in the name,
        as in names of modules."""
        stack, layer, sublayer = self.sites.place(path)
        parts = path.split(".")
        at = next((i for i, part in enumerate(parts) if i and part.isdigit()), 0)
        if layer or not at:
            return stack, layer, sublayer
        home = parts[: at - 1] if parts[at - 1] in GENERIC and at > 1 else parts[:at]
        return ".".join(home), int(parts[at]) + 1, ".".join(parts[at + 1 :])


class Key(Copied):
    """The key of a module that may show values, for compiled code; a copy of the module has none."""

    def __init__(self, module: nn.Module, model: nn.Module) -> None:
        self.model, self.gradients = model, frozenset[str]()
        number = next(_numbers)
        self.number = torch.tensor(number)
        _OWNERS[number] = module


_numbers = itertools.count()
_OWNERS: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_LISTENING: WeakSet[Pass] = WeakSet()
_NOBODY = torch.tensor(-1)


def _listening() -> list[tuple[Pass, Tapped]]:
    return [(listener, tapped) for listener in list(_LISTENING) if isinstance(tapped := listener.tapped, Tapped)]


def mentions(model: nn.Module) -> bool:
    """Return True if the code of its modules calls :func:`stabilitylab.tap`, as far as it tells without a run."""
    return any(mentioned(kind.forward, kind) for kind in {type(module) for module in model.modules()})


def _looks_at_gradients(probe: type[Probe], kind: str, sites: Sites) -> bool:
    site = Site("", nn.Identity())
    return probe.on == "backward" and site in probe.at(replace(sites, tapped={kind: (site,)}))


def _shown(value: Any, name: str, owner: Any, kind: str) -> Any:
    """Do what :func:`stabilitylab.tap` does once a model was watched."""
    if torch.compiler.is_compiling():
        return _left_in_graph(value, name, owner, kind)
    if not _LISTENING or is_transformed():
        return value
    for listener, tapped in _listening():
        own = tapped.of_running() if owner is None else owner
        if own is not None and tapped.has(own):
            if not isinstance(value, torch.Tensor):
                raise UsageError(f"tap: {name!r} is a {type(value).__name__}, not a tensor.")
            tapped.show(listener, own, value, name, kind)
    return value


def _left_in_graph(value: Any, name: str, owner: Any, kind: str) -> Any:
    if owner is None:
        if torch.is_grad_enabled():
            _show(value.detach(), _NOBODY, name, kind, False)
            return _passed_on(value, _NOBODY, name, kind) if value.requires_grad else value
        return value
    key = getattr(owner, ATTRIBUTE, None)
    if isinstance(key, Key) and torch.is_grad_enabled() and key.model.training:
        _show(value.detach(), key.number, name, kind, False)
        if kind in key.gradients and value.requires_grad:
            return _passed_on(value, key.number, name, kind)
    return value


def _run(value: torch.Tensor, key: torch.Tensor, name: str, kind: str, gradient: bool) -> None:
    """Run the operator ``show``, where compiled code comes to it."""
    owner, found = _OWNERS.get(int(key)), _listening()
    if owner is None:
        found = [each for each in found if each[0].model.training and compiled_modules(each[0].model)]
        if int(key) != int(_NOBODY) or len(found) != 1:
            return
    with torch.no_grad():
        for listener, tapped in found:
            if owner is None or tapped.has(owner):
                tapped.show(listener, owner, value, name, kind, compiled=True, gradient=gradient)


_LIBRARY = torch.library.Library("stabilitylab", "FRAGMENT")
_TAGS = [torch.Tag.pt2_compliant_tag]
_LIBRARY.define("show(Tensor value, Tensor key, str name, str kind, bool gradient) -> ()", tags=_TAGS)
_LIBRARY.impl("show", _run, "CompositeExplicitAutograd")
torch.library.register_fake("stabilitylab::show", lambda *given: None, lib=_LIBRARY)
_show: Any = torch.ops.stabilitylab.show.default
_register_effectful_op(_show, _EffectType.ORDERED)
_LIBRARY.define("pass_on(Tensor value, Tensor key, str name, str kind) -> Tensor", tags=_TAGS)
_LIBRARY.impl("pass_on", lambda value, *rest: value.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("stabilitylab::pass_on", lambda value, *rest: not_copied(_passed_on, value), lib=_LIBRARY)
_passed_on: Any = torch.ops.stabilitylab.pass_on.default


def _keep(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, str, str], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.named = inputs[2:]


def _show_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    (key,) = ctx.saved_tensors
    _show(gradient, key, *ctx.named, True)
    return gradient, None, None, None


torch.library.register_autograd("stabilitylab::pass_on", _show_gradient, setup_context=_keep, lib=_LIBRARY)
