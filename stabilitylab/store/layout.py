"""The layout of a run directory, and the tables in run.json."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import DamagedError, InputError
from ..inputs import shown
from ..schema import Row, Table
from .documents import damaged, plain, read_object, sealed
from .files import inside, reading, replace_file
from .identity import IDENTIFIED, identity_of
from .identity import OWN_KEYS as ID_KEYS
from .names import current
from .older import facts

# Schema 1: tables without phase, main, log, undefined; 2: journals are Arrow streams, no inventory; 3: no id of the
# run, no checksum in JSON files.
SCHEMA_VERSION = 4
METRICS = "metrics"
PART = re.compile(r"part-(\d{6,})\.parquet")
JOURNAL = re.compile(r"journal-(\d{6,})\.(?:records|arrows)")  # .arrows: up to schema 2
CHOICE, CHOICE_LEDGER = "choice.csv", "choice-ledger.csv"  # beside the runs of ``sweep --choose-rate``
BLACK_BOX = "black_box"  # folder of a flight recorder's files, which are named like checkpoints
CHECKPOINT = re.compile(r"step-(\d{8,18})\.pt", re.ASCII)
TABLE_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,99}", re.ASCII)
LONGEST = 10_000  # letters of a name or a definition
OWN_KEYS = ("checksum", "schema_version", *ID_KEYS, "attempts", "tables")  # entries that a caller must not set


def is_choice(path: Path) -> bool:
    """True if ``path`` is the folder of a search of ``sweep --choose-rate``."""
    return any((path / name).exists() for name in (CHOICE, CHOICE_LEDGER))


def folder(run: Path, table: str) -> Path:
    return run / METRICS if table == METRICS else run / "probes" / table


def part_path(run: Path, table: str, number: int) -> Path:
    return folder(run, table) / f"part-{number:06d}.parquet"


def journal_path(run: Path, number: int) -> Path:
    return run / f"journal-{number:06d}.records"


def number_of(part: Path) -> int:
    """Return the number in a part's name. Raises ValueError for another name."""
    match = PART.fullmatch(part.name)
    if match is None:
        raise ValueError(f"{part.name!r} is no part")
    return int(match[1])


def journals(run: Path) -> dict[int, Path]:
    named = ((JOURNAL.fullmatch(path.name), path) for path in sorted(run.iterdir()))
    return {int(match[1]): inside(run, path) for match, path in named if match}


def parts(run: Path, table: str) -> dict[int, Path]:
    """Return the parts of a table by number. Raises DamagedError for a file that no run wrote there."""
    found = {}
    where = folder(run, table)
    for path in sorted(where.iterdir()) if where.is_dir() else ():
        if match := PART.fullmatch(path.name):
            found[int(match[1])] = inside(run, path)
        elif not path.name.startswith("."):
            raise DamagedError(f"{where} holds {path.name!r}, which is not part of the run: move it elsewhere.", run)
    return found


def checkpoints(run: Path, folder: str = "checkpoints") -> dict[int, Path]:
    """Return the checkpoints by the number of updates, oldest first; other files are ignored."""
    where = inside(run, run / folder)
    named = ((CHECKPOINT.fullmatch(path.name), path) for path in (sorted(where.iterdir()) if where.is_dir() else ()))
    return {int(match[1]): inside(run, path) for match, path in named if match}


def tables_on_disk(run: Path) -> list[str]:
    probes = run / "probes"
    return [METRICS, *sorted(path.name for path in probes.iterdir() if path.is_dir())] if probes.is_dir() else [METRICS]


def _instead(folder: Path) -> str:
    """Say that a folder has no run.json, or which runs lie in it."""
    inner = sorted(path.parent for path in folder.glob("*/run.json"))
    if not inner:
        return "it has no run.json"
    return f"it holds {len(inner)} run{'s' * (len(inner) > 1)}, such as {inner[0]}: name one"


def read_run_json(run: Path) -> dict[str, Any]:
    """Read run.json with its tables as :class:`Table`; tables of an older schema are completed (:mod:`.older`).

    Raises InputError, in one sentence, for anything that can be wrong with it.
    """
    with reading(run):
        if not run.exists():
            raise InputError(f"there is no run at {run}: check the path, or list the runs with `stabilitylab runs`.")
        if not (run / "run.json").is_file():
            raise InputError(f"{run} is not a run directory: {_instead(run)}.")
    document, checked = read_object(run, "run.json")
    version = document.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise InputError(
            f"{run} was written by a newer stabilitylab (schema {version}, this one reads {SCHEMA_VERSION}): "
            "upgrade with `pip install --upgrade stabilitylab`."
        )
    try:
        if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
            raise ValueError(f"schema version {shown(version)}")
        if version >= IDENTIFIED and not checked:
            raise ValueError("it has no checksum")
        identity_of(document)
        for key, kind in (("attempts", list), ("tables", dict), ("config", dict), ("label", str)):
            if not isinstance(document.get(key, kind()), kind) or (
                key in ("attempts", "tables") and key not in document
            ):
                raise ValueError(f"{key} is {document.get(key)!r}"[:80])
        later = facts if version == 1 else _facts_from_json
        tables = {name: _table_from_json(name, json.dumps(entry), later) for name, entry in document["tables"].items()}
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise damaged(run / "run.json", repr(error), run) from error
    return {**document, "tables": tables}


def write_run_json(run: Path, document: Mapping[str, Any]) -> None:
    """Write run.json in this version's schema, whichever version the document was read from."""
    tables = {name: _table_to_json(table) for name, table in document["tables"].items()}
    document = {**document, "schema_version": SCHEMA_VERSION}
    head = json.dumps(plain({key: value for key, value in document.items() if key != "tables"}), indent=2)
    # The tables' thousands of rows go last and on one line each, so that the rest stays readable by people.
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in tables.items())
    body = f'{head.removesuffix("}").rstrip()},\n  "tables": {{\n{lines}\n  }}\n}}\n'
    replace_file(run / "run.json", sealed(body))


def _table_to_json(table: Table) -> dict[str, Any]:
    return {
        "columns": list(table.columns),
        "unit": table.unit,
        "definition": table.definition,
        "total": table.total,
        "phase": table.phase,
        "main": table.main,
        "log": table.log,
        "undefined": list(table.undefined),
        "rows": {
            label: [getattr(row, label) for row in table.rows] for label in ("site", "stack", "layer", "sublayer")
        },
    }


def _facts_from_json(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(entry["log"], bool | None):
        raise ValueError(f"log = {entry['log']!r} of {name!r}")
    undefined = tuple(entry["undefined"])
    return {key: entry[key] for key in ("phase", "main", "log", "unit")} | {"undefined": undefined}


@lru_cache(maxsize=64)  # by text: runs of a sweep have the same tables, of a thousand rows each
def _table_from_json(name: str, text: str, facts: Callable[[str, Mapping[str, Any]], Mapping[str, Any]]) -> Table:
    entry = json.loads(text)
    _check_names(name, entry)
    rows = entry["rows"]
    (main,) = current(name, [entry.get("main", "")])
    entry = {**entry, "columns": current(name, entry["columns"]), "main": main}
    places = zip(rows["site"], rows["stack"], rows["layer"], rows["sublayer"], strict=True)
    return Table(
        name=name,
        columns=entry["columns"],
        rows=tuple(Row(site, stack, int(layer), sublayer) for site, stack, layer, sublayer in places),
        definition=entry["definition"],
        total=entry["total"],
        **facts(name, entry),
    )


def _check_names(name: str, entry: Mapping[str, Any]) -> None:
    """Raise ValueError for a wrong table name, column name, label or layer number. Text must print on one line."""
    rows = entry["rows"]
    if not TABLE_NAME.fullmatch(name) or name in ("step", METRICS):
        raise ValueError(f"{name[:60]!r} cannot name a table")
    told = [
        *entry["columns"],
        *(entry[key] for key in ("definition", "total", "unit")),
        *rows["site"],
        *rows["stack"],
        *rows["sublayer"],
    ]
    for text in told:
        if not isinstance(text, str) or not is_name(text):
            raise ValueError(f"{str(text)[:60]!r} cannot be a name in {name!r}")
    for layer in rows["layer"]:
        if type(layer) is not int or not 0 <= layer < 2**31:
            raise ValueError(f"layer {shown(layer)} of {name!r}")
    if len({*entry["columns"]}) < len(entry["columns"]):
        raise ValueError(f"{name!r} has two columns of one name")


def is_run_name(name: str) -> bool:
    """True if a run directory can have this name: one folder, printable, not hidden, at most 200 bytes."""
    return (
        bool(name)
        and is_name(name)
        and Path(name).name == name
        and not name.startswith(".")
        and len(name.encode()) <= 200
    )


def is_name(text: str) -> bool:
    """True if the text can be printed on one line of a terminal or a file unchanged."""
    return text.isprintable() and len(text) <= LONGEST


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested settings as ("section.key", value)."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
