"""The check that a folder can take a new run, and the message for a folder that cannot."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ..errors import InputError
from . import inventory
from .files import writing
from .layout import checkpoints, read_run_json

OWN = ("status.json", "run.json", inventory.FILE)  # the files of a run before its first row, besides hidden ones


def in_the_way(path: Path) -> bool:
    """True if ``path`` holds anything but the remains of a run that ended before its first row."""
    if not path.is_dir():
        return True
    with writing(path):
        present = {entry.name: entry for entry in path.iterdir() if not entry.name.startswith(".")}
        if set(present) - {*OWN}:
            return True
        listed = present.get(inventory.FILE)
        if listed is not None and listed.stat().st_size:  # it lists parts that are lost
            return True
    if "run.json" not in present:
        return False
    try:
        read_run_json(path)
    except InputError:  # damaged, or not ours
        return True
    return False


def exists(path: Path) -> str:
    """Say what the user can do about a path that is in the way."""
    kind, saved = "", {}
    with suppress(InputError):
        kind, saved = str(read_run_json(path).get("kind", "train")), checkpoints(path)
    ways = ["give another name", "delete it if nothing in it is wanted"]
    if kind == "train" and saved:
        ways.append(f"continue the run with probe --resume {path}")
    elif kind == "watched":
        ways.append("continue the run with watch(resume=...) and what its checkpoint() gave")
    return f"{path} exists already and is never overwritten: {', '.join(ways[:-1])}, or {ways[-1]}."
