"""The note of an architecture: title, colour and marker, place in tables, and the effect of its initial gains.

A note is written in the arch's own file, in ``@arch(...)`` and as plain values in the class. This module reads it from
the source, without an import: tables and figures need the notes, and no torch.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .errors import UsageError
from .registry import Room, spelling

ROOM = Room("stabilitylab.models.archs", "stabilitylab.archs")
Gains = Literal["base", "even base", "times base", "own", "beta"]
Stream = Literal["norm", "sum", "mixed"]
MARKERS = ("o", "v", "^", "<", ">", "s", "D", "d", "P", "X", "h", "p", "*")  # matplotlib's, with a shape on the page


class Option(NamedTuple):
    """The type and the default of an option of an architecture."""

    kind: Any
    default: Any

    def read(self, value: Any) -> Any:
        """Return ``value`` as this option's type has it: ".3" as .3 for a number. A wrong value stays as it is, for the
        architecture refuses it."""
        from pydantic import TypeAdapter, ValidationError

        if isinstance(value, bool) and self.kind is not bool:
            return value
        try:
            found = TypeAdapter(self.kind).validate_python(value)
        except ValidationError:
            return value
        return value if isinstance(found, float) and not math.isfinite(found) else found


@dataclass(frozen=True)
class ArchNote:
    """The note of an architecture. ``gains``: how the arch's own initial gains use the base (``model.qkv_gain``): not
    at all, they leave out its 1/sqrt(2 layers) (of ``gpt2``), multiply it, replace it, or replace it by DeepNorm's
    beta; None: not said, so that a label names every setting that may distinguish two models. ``family``: the panel of
    a figure that shows every architecture. ``stream``: "norm", normalised at each sub-layer; "sum", a plain sum of the
    embedding and the branches; "mixed", neither. ``prores``: its paper defines ProRes for it (``model.prores``)."""

    name: str
    title: str = ""
    colour: str = ""
    marker: str = ""
    rank: int = 1000  # the order of tables and legends
    gains: Gains | None = None
    family: str = ""
    stream: Stream = "norm"
    prores: bool = False
    scheduled: bool = False  # a schedule drives its alpha
    takes_alpha: bool = False  # model.alpha replaces one of its constants
    recipe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # settings that its paper requires
    options: Mapping[str, Option] = field(default_factory=dict)  # its own settings, arch.KEY

    def __post_init__(self) -> None:
        if self.marker and self.marker not in MARKERS:
            raise UsageError(f"architecture {self.name!r}: marker {self.marker!r} is none of {' '.join(MARKERS)}.")

    @property
    def look(self) -> tuple[str, str] | None:
        """Return colour and marker, if it has its own."""
        return (self.colour, self.marker) if self.colour and self.marker else None


KEYS = frozenset(each.name for each in fields(ArchNote)) - {"options"}
_added: dict[str, ArchNote] = {}  # notes of architectures outside this package


def add(note: ArchNote) -> None:
    """Add a note, as ``@arch`` does."""
    _added[spelling(note.name)] = note


def note(name: str) -> ArchNote | None:
    """Return the note of an architecture under any spelling of its name; None for an unknown one."""
    wanted = spelling(name)
    return _built_in().get(wanted) or _added.get(wanted) or notes().get(wanted)


def notes() -> dict[str, ArchNote]:
    """Return all notes by spelling, in the order of tables. Plug-ins are imported for it, and nothing else."""
    ROOM.import_plugins()
    return dict(sorted({**_added, **_built_in()}.items(), key=lambda item: (item[1].rank, item[0])))


def built_in() -> list[ArchNote]:
    """Return the notes of the architectures of this package, in the order of tables."""
    return sorted(_built_in().values(), key=lambda note: (note.rank, note.name))


def families() -> dict[str, list[str]]:
    """Return the architectures by family; the family with the last rank comes last."""
    found: dict[str, list[ArchNote]] = {}
    for each in notes().values():
        if each.family:
            found.setdefault(each.family, []).append(each)
    ordered = sorted(found.items(), key=lambda item: max(each.rank for each in item[1]))
    return {family: [each.name for each in own] for family, own in ordered}


@contextmanager
def restored() -> Iterator[None]:
    """Remove the notes that are added within this context when it ends."""
    kept = dict(_added)
    try:
        yield
    finally:
        _added.clear()
        _added.update(kept)


def options_read(options: Mapping[str, Any], archs: Iterable[str | None]) -> dict[str, Any]:
    """Return the options of ``archs`` that differ from their defaults, each as its type has it: one model has one set
    of options. An option that none of ``archs`` has stays as it is."""
    if not options:
        return {}
    said = [found.options for name in archs if name and (found := note(name)) is not None]
    read: dict[str, Any] = {}
    for key, value in options.items():
        own = [each[key] for each in said if key in each]
        found = [option.read(value) for option in own]
        if not own or any(not _is_default(one, option) for one, option in zip(found, own, strict=True)):
            read[key] = found[0] if own else value
    return read


def _is_default(value: Any, option: Option) -> bool:
    default = option.read(option.default)
    return type(value) is type(default) and bool(value == default)


@cache
def _built_in() -> dict[str, ArchNote]:
    folder = Path(__file__).parent / "models" / "archs"
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))]
    trees = [ast.parse(source) for source in sources]
    constants = {name: value for tree in trees for name, value in _assigned(tree)}
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    found = [
        replace(each, options=_options(node.name, classes, constants)) for tree in trees for node, each in _noted(tree)
    ]
    return {spelling(each.name): each for each in found}


def written(source: str) -> Iterator[ArchNote]:
    """Yield the notes of the classes under ``@arch(...)`` in a file, without their options."""
    for _, each in _noted(ast.parse(source)):
        yield each


def _noted(tree: ast.Module) -> Iterator[tuple[ast.ClassDef, ArchNote]]:
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "arch":
                values = {key.arg: ast.literal_eval(key.value) for key in call.keywords if key.arg}
                values |= {name: ast.literal_eval(value) for name, value in _assigned(node) if name in KEYS}
                yield node, ArchNote(ast.literal_eval(call.args[0]), **values)


def _assigned(node: ast.ClassDef | ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the values that a class body, or a file, gives to names."""
    for each in node.body:
        if isinstance(each, ast.Assign):
            yield ast.unparse(each.targets[0]), each.value
        elif isinstance(each, ast.AnnAssign) and each.value is not None:
            yield ast.unparse(each.target), each.value


def _options(name: str, classes: Mapping[str, ast.ClassDef], constants: Mapping[str, ast.expr]) -> dict[str, Option]:
    """Return the options of a class: those of its own ``Options``, or of the class that it is made from."""
    node = classes.get(name)
    if node is None:
        return {}
    own = next((each for each in node.body if isinstance(each, ast.ClassDef) and each.name == "Options"), None)
    bases = [ast.unparse(base).removesuffix(".Options") for base in (node if own is None else own).bases]
    found = {key: option for base in reversed(bases) for key, option in _options(base, classes, constants).items()}
    for each in own.body if own else ():
        if isinstance(each, ast.AnnAssign) and each.value is not None:
            found[ast.unparse(each.target)] = Option(_kind(each.annotation), _default(each.value, constants))
    return found


def _kind(annotation: ast.expr) -> Any:
    """Return the type that an annotation names: a plain type, one of them or None, or a choice of words."""
    if isinstance(annotation, ast.BinOp):
        return _kind(annotation.left) | _kind(annotation.right)
    if isinstance(annotation, ast.Subscript):  # Literal["one", "other"]
        return Literal[ast.literal_eval(annotation.slice)]  # pyright: ignore
    text = ast.unparse(annotation)
    return {"bool": bool, "int": int, "float": float, "str": str, "None": None}[text]


def _default(value: ast.expr, constants: Mapping[str, ast.expr]) -> Any:
    """Return the default of an option, whose value is a literal, a constant, or that of ``Field(default=...)``."""
    if isinstance(value, ast.Call):
        value = next(key.value for key in value.keywords if key.arg == "default")
    return ast.literal_eval(constants[value.id] if isinstance(value, ast.Name) else value)
