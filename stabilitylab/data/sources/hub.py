"""Parallel text through the optional package ``datasets``: from the Hugging Face hub or a folder on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config import DataConfig
from ...errors import InputError, ResourceError, UsageError, first_line
from .. import bpe
from ..corpus import Corpus
from ..source import Files, source


def hub_files(spec: str, valid: str | None) -> Mapping[str, Files]:
    """Return the folder of a data set that is on this machine, and its columns; nothing for a name on the hub."""
    folder, *columns = spec.split(",")
    path = Path(folder.strip()).expanduser()
    return {"data.source": Files((path,), tuple(columns))} if path.is_dir() else {}


@source("hf", "hf:DATASET,SRC_COLUMN,TGT_COLUMN", files=hub_files)
def hub(spec: str, config: DataConfig) -> Corpus:
    """Reads two columns of a data set of the Hugging Face hub, or of a folder that ``datasets`` wrote."""
    return load_hub(spec, config.valid, config.vocab_size)


def load_hub(spec: str, valid: str | None, vocab_size: int) -> Corpus:
    """Load ``spec``, "DATASET,SRC_COLUMN,TGT_COLUMN" (also "DATASET:CONFIGURATION,..."); ``valid`` names a split.

    A dot in a column's name leads into a nested one: "translation.de".
    """
    parts = [part.strip() for part in spec.split(",")]
    if len(parts) != 3 or not all(parts):
        raise UsageError(f"{spec!r} is not of the form --data hf:DATASET,SRC_COLUMN,TGT_COLUMN.")
    name, *columns = parts
    splits = _splits(name)
    roles = {"train": "train", **({"valid": valid} if valid is not None else {})}

    def lines(role: str) -> bpe.Lines:
        split = roles[role]
        if split not in splits:
            raise InputError(f"{name} has no split {split!r}; it has {', '.join(splits)}.")
        source, target = (_column(splits[split], column, f"split {split!r} of {name}") for column in columns)
        return source, target

    text = {role: lines(role) for role in roles}
    hashes = [_sha256(side) for sides in text.values() for side in sides]
    return bpe.encode_corpus(hashes, lambda: text, vocab_size, {"text_sha256": hashes}, lines=lines)


def _splits(name: str) -> dict[str, Any]:
    try:
        import datasets
    except ImportError as error:
        raise ResourceError(
            'data sets of the hub need an extra package: pip install "stabilitylab[datasets]".'
        ) from error
    folder = Path(name).expanduser()
    try:
        if any((folder / mark).is_file() for mark in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(str(folder))
        elif folder.is_dir():
            found = datasets.load_dataset(str(folder))
        else:
            path, _, configuration = name.partition(":")
            found = datasets.load_dataset(path, configuration or None)
    except Exception as error:  # network, hub, Arrow, configuration: datasets raises errors of a dozen libraries
        reason = first_line(error)
        raise InputError(f"cannot load the data set {name!r}: {reason.rstrip('.')}.") from error
    return {str(split): rows for split, rows in found.items()} if isinstance(found, dict) else {"train": found}


def _column(split: Any, column: str, where: str) -> list[str]:
    head, *rest = column.split(".") if column not in split.column_names else [column]
    if head not in split.column_names:
        raise InputError(f"{where} has no column {head!r}; it has {', '.join(split.column_names)}.")
    values = list(split[head])
    for key in rest:
        if not all(isinstance(value, dict) and key in value for value in values):
            raise InputError(f"column {head!r} in {where} has no field {key!r} in every row.")
        values = [value[key] for value in values]
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise InputError(f"row {row} of column {column!r} in {where} is not text but {type(value).__name__}.")
    return values


def _sha256(lines: list[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode() + b"\0")
    return digest.hexdigest()
