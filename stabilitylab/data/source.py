"""The registry of data sources: ``data.source`` names one of them, and the source makes the corpus."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..config import DataConfig
from ..errors import UsageError
from ..registry import Registry, Room
from .corpus import Corpus

Load = Callable[[str, DataConfig], Corpus]


class Files(NamedTuple):
    """The files or folders whose content decides the data that a setting names, and the other words of that setting."""

    paths: tuple[Path, ...]
    words: tuple[str, ...] = ()


NamedFiles = Callable[[str, str | None], Mapping[str, Files]]


def no_files(spec: str, valid: str | None) -> Mapping[str, Files]:
    """Return no files: the words of the settings alone decide the data."""
    return {}


@dataclass(frozen=True)
class DataSource:
    """A data source.

    - ``name``: the word before the colon of ``data.source``. ``form``: how the setting is written, ``text:SRC,TGT``.
    - ``load``: a function of the part behind the colon ("" without one) and the settings of the data, to the corpus.
    - ``files``: a function of that part and ``data.valid``, to the files of the settings ``data.source`` and
      ``data.valid`` on this machine. Two runs have the same data if the content of these files is the same.
    """

    name: str
    form: str
    load: Load
    files: NamedFiles = no_files

    @property
    def has_spec(self) -> bool:
        """True if something follows the name."""
        return ":" in self.form


SOURCES: Registry[DataSource] = Registry("data source", Room("stabilitylab.data.sources", "stabilitylab.sources"))


def source(name: str, form: str | None = None, *, files: NamedFiles = no_files) -> Callable[[Load], Load]:
    """Register the decorated function as a data source; the arguments are those of :class:`DataSource`.

    The function returns a :class:`~stabilitylab.data.Corpus`. Its docstring is what ``stabilitylab list sources``
    prints. Raise UsageError for a wrong form, InputError for data that cannot be read.
    """

    def decorate(load: Load) -> Load:
        SOURCES.register(name, module=load.__module__)(DataSource(name, form or name, load, files))
        return load

    return decorate


def named(text: str) -> tuple[DataSource, str]:
    """Return the source that ``data.source`` names, and what follows its name.

    Raises UsageError for an unknown source, and for a form that is not the source's.
    """
    name, colon, spec = text.partition(":")
    found = SOURCES[name] if name in [*SOURCES] else None  # as it is written: it is part of a run's identity
    if found is None or found.has_spec is not bool(colon):
        forms = [each.form for each in SOURCES.values()]
        raise UsageError(f"unknown data {text!r}; choose {', '.join(forms[:-1])} or {forms[-1]}.")
    return found, spec
