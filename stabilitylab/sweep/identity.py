"""The identity of a training run on any machine: the settings that decide its results, and a key made of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arch_notes import options_read
from ..config import Config, complete, later_settings, merge, neutral_settings
from ..errors import InputError
from ..inputs import regular
from ..registry import spelling
from ..store.layout import flat

if TYPE_CHECKING:
    from ..data.source import Files

SCHEME = 1  # version of the key: keys of two versions must never be equal
DIGITS = 16
DATA = ("data.source", "data.valid")

Digests = Mapping[str, str]  # path -> sha256 of the file as it was


def deciding(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide the results of a run, by section.key, with one spelling of an architecture and
    without options of it that are at their defaults.

    A setting that is newer than the run has the value that corresponds to the time before it.
    """
    whole = complete(recorded)
    if (model := whole.get("model", {})).get("options"):
        own = options_read(model["options"], (model.get("arch"), model.get("decoder_arch")))
        whole = merge(whole, {"model": {"options": own}})
    settings = {key: value for key, value in flat(whole) if key not in neutral_settings()}
    for key in ("model.arch", "model.decoder_arch"):
        if isinstance(settings.get(key), str):
            settings[key] = spelling(settings[key])
    if settings.get("model.decoder_arch") == settings.get("model.arch"):
        settings["model.decoder_arch"] = None
    if settings.get("train.horizon") == settings.get("train.steps"):
        settings["train.horizon"] = None  # a run that went on to its schedule's end is one that was never stopped
    return settings


def key_of(config: Config, digests: Digests | None = None) -> str:
    """Return the hash of the deciding settings, in which files stand for their content: the key is the same on every
    machine.

    ``digests``: of the files as a run that has ended read them; without them, as they are now. A setting marked
    :class:`~stabilitylab.config.Later` is left out if it has the value from before, so that older keys stay valid.
    Raises InputError for a file that cannot be read.
    """
    recorded = config.model_dump(mode="json")
    settings = deciding(recorded)
    for key, before in flat(later_settings()):
        if settings.get(key) == before:
            settings.pop(key, None)
    for key, (name, files) in _named(config).items():
        settings[key] = [name, *files.words, *_digests(files, digests)]
    text = json.dumps([SCHEME, settings], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def data_of(config: Config, digests: Digests | None = None) -> str:
    """Return the data in words that hold on any machine, such as ``text:train.de@1f0c2a3b,train.en@9d8e7f60``."""
    words = []
    for key, value in zip(DATA, (config.data.source, config.data.valid), strict=True):
        if (named := _named(config).get(key)) is not None:
            name, files = named
            known = [f"{path.name}@{d[:8]}" for path, d in zip(files.paths, _digests(files, digests), strict=True)]
            value = f"{name}:{','.join((*known, *files.words))}"
        if value is not None:
            words.append(f"valid {value.removeprefix('text:')}" if key == "data.valid" else value)
    return " ".join(words)


def _named(config: Config) -> dict[str, tuple[str, Files]]:
    """Return (name of the source, files) of each setting that names files on this machine."""
    from ..data.source import SOURCES  # here, since the batches of that package need torch

    name, _, spec = config.data.source.partition(":")
    if name not in [*SOURCES]:
        return {}
    return {key: (name, files) for key, files in SOURCES[name].files(spec, config.data.valid).items()}


def _digests(files: Files, known: Digests | None) -> list[str]:
    return [(known or {}).get(str(path)) or content(path) for path in files.paths]


def content(path: Path) -> str:
    """Return the SHA-256 of a file, or of all files below a folder with their names."""
    if not os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        regular(path)
        try:
            return _file(str(path), path.stat().st_mtime_ns, path.stat().st_size)
        except OSError as error:
            raise InputError(
                f"cannot read {path} ({error.strerror}), whose content is part of a cell's key: check the path."
            ) from error
    below = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith((".", "cache-")))
    named = [(p.relative_to(path).as_posix(), content(p)) for p in below]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


@lru_cache(maxsize=256)
def _file(path: str, changed: int, size: int) -> str:
    """Return the SHA-256 of a file that has not changed since ``changed``; cached, so that corpora are read once, not
    once a run."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
