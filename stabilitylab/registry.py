"""One kind of registry and one rule of discovery, for archs, probes, figures, claims, detectors, signals, data sources,
sweeps and commands.

A registry is filled when it is first looked into: by the modules of its folder in this package, by the entry points
that installed packages have in its group, and by the modules that ``--plugin`` or ``STABILITYLAB_PLUGINS`` name.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from .errors import UsageError, meant

T = TypeVar("T")
PLUGINS = "STABILITYLAB_PLUGINS"  # modules, separated by commas; --plugin adds to it, so that child processes know too
BUILT_IN = "stabilitylab"
log = logging.getLogger(BUILT_IN)

failed: dict[str, str] = {}  # plug-in -> why it could not be imported
_tried: set[str] = set()
_source: list[str] = []  # the plug-ins that are being imported, innermost last


def spelling(name: str) -> str:
    """Return the form in which names are compared: ``"Post-LN"``, ``"post_ln"`` and ``"postln"`` are one name."""
    return re.sub(r"[\s_\-]+", "", name).lower()


@dataclass(frozen=True)
class Room:
    """The source of one kind of entry: a folder of this package, and a group of entry points of other packages."""

    folder: str  # such as "stabilitylab.probes.library"; what has a leading underscore is left out
    group: str  # such as "stabilitylab.probes"

    def import_folder(self) -> list[str]:
        """Import every module of the folder and its subfolders, in the order of their names."""
        modules = list(_below(self.folder))
        for module in modules:
            import_module(module)
        return modules

    def import_plugins(self) -> None:
        for point in _announced(self.group, tuple(sys.path)):
            package = f"{point.dist.name} {point.dist.version}" if point.dist else "entry point"
            _attempt(f"{point.value} ({package})", point.load)
        named = named_plugins()
        if named and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # the usual folder of the user's own modules
        for module in named:
            _attempt(f"{module} (--plugin)", lambda module=module: import_module(module))


@cache
def _announced(group: str, _path: tuple[str, ...]) -> list[EntryPoint]:
    """The entry points of a group in the order of their names. Finding them opens a file of every installed package,
    some 50 ms, so it is done once for each state of ``sys.path``."""
    return sorted(entry_points(group=group), key=lambda point: (point.name, point.value))


def _below(folder: str) -> Iterator[str]:
    for found in sorted(pkgutil.iter_modules(import_module(folder).__path__), key=lambda found: found.name):
        if not found.name.startswith("_"):
            name = f"{folder}.{found.name}"
            yield from _below(name) if found.ispkg else [name]


def named_plugins() -> list[str]:
    """Return the modules that ``--plugin`` and ``STABILITYLAB_PLUGINS`` name."""
    return [name.strip() for name in os.environ.get(PLUGINS, "").split(",") if name.strip()]


def add_plugin(module: str) -> None:
    """Add a module to the plug-ins, as ``--plugin MODULE`` does."""
    os.environ[PLUGINS] = ",".join(dict.fromkeys((*named_plugins(), module)))


def _attempt(plugin: str, load: Callable[[], Any]) -> None:
    """Import a plug-in once. A plug-in that cannot be imported is logged by name, and stops nothing else."""
    if plugin in _tried:
        return
    _tried.add(plugin)
    _source.append(plugin)
    try:
        load()
    except Exception as error:
        failed[plugin] = f"{type(error).__name__}: {error}"
        log.warning("plug-in %s cannot be imported and is left out (%s).", plugin, failed[plugin])
    finally:
        _source.pop()


class Registry(Mapping[str, T], Generic[T]):
    """Maps canonical names to entries; look-ups forgive case, hyphens and underscores.

    With a ``room`` it is filled from there when it is first looked into. Raises ``ValueError`` for a duplicate and
    ``UsageError``, listing the choices, for an unknown name.
    """

    def __init__(self, kind: str, room: Room | None = None) -> None:
        self.kind, self.room = kind, room
        self._entries: dict[str, T] = {}
        self._spellings: dict[str, str] = {}
        self._homes: dict[str, str] = {}  # name -> the module that defines it
        self._origins: dict[str, str] = {}
        self._own = self._others = self.room is None  # True once the folder, and the plug-ins, are imported

    def register(self, name: str, module: str = "") -> Callable[[T], T]:
        """Register the decorated entry. ``module``: the module that defines it, if the entry has no ``__module__``."""

        def decorate(entry: T) -> T:
            home = module or getattr(entry, "__module__", "") or ""
            if not _is_ours(home):
                self._load_folder()  # so that a name that is taken is refused here, not while the folder is imported
            if spelling(name) in self._spellings:
                raise ValueError(f"{self.kind} {name!r} is registered already, as {self._spellings[spelling(name)]!r}.")
            self._entries[name] = entry
            self._spellings[spelling(name)] = name
            self._homes[name] = home
            self._origins[name] = BUILT_IN if _is_ours(home) else (_source or [home])[-1]
            return entry

        return decorate

    def load(self) -> None:
        """Import the entries of the room, once."""
        self._load_folder()
        if not self._others and self.room is not None:
            self._others = True
            self.room.import_plugins()

    def _load_folder(self) -> None:
        if not self._own and self.room is not None:
            self._own = True  # set first: the imported modules may look into this registry
            place = {module: number for number, module in enumerate(self.room.import_folder())}
            # in the order of the files, whichever was imported first
            own = sorted(self._entries, key=lambda name: place.get(self._homes[name], len(place)))
            self._entries = {name: self._entries[name] for name in own}

    def origin(self, name: str) -> str:
        """Return the origin of an entry: ``stabilitylab``, a plug-in, or the module of this process that made it."""
        return self._origins[self.resolve(name)]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Remove the entries that are registered within this context when it ends."""
        self.load()
        kept = dict(self._entries), dict(self._spellings), dict(self._origins)
        try:
            yield
        finally:
            self._entries, self._spellings, self._origins = kept

    def resolve(self, name: str) -> str:
        """Return the canonical name for any accepted spelling."""
        self.load()
        known = self._spellings.get(spelling(name))
        if known is None:
            hint = meant(name, self._entries, spelling)
            lacking = f" Left out: {', '.join(failed)}." if failed else ""
            raise UsageError(f"unknown {self.kind} {name!r}; choose one of {', '.join(sorted(self))}.{hint}{lacking}")
        return known

    def __getitem__(self, name: str) -> T:
        return self._entries[self.resolve(name)]

    def __contains__(self, name: object) -> bool:
        self.load()
        return isinstance(name, str) and spelling(name) in self._spellings

    def __iter__(self) -> Iterator[str]:
        self.load()
        return iter(self._entries)

    def __len__(self) -> int:
        self.load()
        return len(self._entries)


def _is_ours(module: str) -> bool:
    return module == BUILT_IN or module.startswith(f"{BUILT_IN}.")
