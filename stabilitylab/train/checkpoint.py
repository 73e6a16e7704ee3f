"""Checkpoints of a run: when the next one is due, and files that are written whole or not at all. The last two are
kept."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from ..config import TrainConfig
from ..errors import InputError, ResourceError, first_line
from ..store.digest import Hashed, fault
from ..store.files import inside, sync_directory
from ..store.identity import Identity
from ..store.layout import checkpoints
from .ranks import Team

KEEP = 2
clock = time.monotonic


class Cadence:
    """The time of the next checkpoint: ``checkpoint_minutes`` after the last one, or every ``checkpoint_every``
    updates.

    The clocks of several ranks differ, and all ranks must write at once: the clock of the first rank decides.
    """

    def __init__(self, train: TrainConfig, team: Team) -> None:
        self.every, self.seconds, self.team = train.checkpoint_every, 60 * train.checkpoint_minutes, team
        self.restart()

    def restart(self) -> None:
        """Start the clock anew: a checkpoint was written, or training begins."""
        self.last = clock()

    def due(self, row: int) -> bool:
        if self.every and row % self.every == 0:
            return True
        late = self.seconds > 0 and self.team.first and clock() - self.last >= self.seconds
        return self.seconds > 0 and self.team.largest(int(late)) > 0


def save(folder: Path, row: int, state: dict[str, Any], run_id: str = "") -> Path:
    """Write ``state`` as ``folder/step-<row>.pt`` (with a digest and the run's id, fsynced, then renamed). Only the
    newest two checkpoints are kept. Raises ResourceError if the file cannot be written."""
    path = inside(folder.parent, folder / f"step-{row:08d}.pt")
    temporary = folder / f".{path.name}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # left by a crash, or a link
        with temporary.open("xb") as file:
            torch.save(state, hashed := Hashed(file, run_id))  # pyright: ignore[reportArgumentType]
            hashed.seal()
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(folder)
        for old in found(folder)[:-KEEP]:
            old.unlink()
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError of its zip writer
        temporary.unlink(missing_ok=True)
        raise ResourceError(f"cannot write the checkpoint {path}: {error}; free some space and --resume.") from error
    return path


def found(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first."""
    return [*checkpoints(folder.parent, folder.name).values()]


def discard(folder: Path) -> None:
    """Remove the checkpoints of a run that has ended and is to keep no weights."""
    for path in found(folder):
        path.unlink(missing_ok=True)


def load(folder: Path, device: torch.device, identity: Identity = Identity()) -> dict[str, Any]:
    """Return the newest checkpoint of ``folder``.

    Raises InputError if there is no checkpoint, if it cannot be read, if its digest is wrong, or if it belongs to
    another run than ``identity``.
    """
    paths = found(folder)
    if not paths:
        raise InputError(f"no checkpoint in {folder}: the run cannot be resumed; start it again under another --name.")
    try:
        if wrong := fault(paths[-1], identity):
            raise ValueError(wrong)
        return torch.load(paths[-1], map_location=device, weights_only=True)
    except Exception as error:  # a damaged file surfaces as one of many types
        older = f" to resume from {paths[-2].name}" if len(paths) > 1 else " and start the run again"
        raise InputError(f"the checkpoint {paths[-1]} cannot be read ({_short(error)}); remove it{older}.") from error


def _short(error: Exception) -> str:
    return first_line(error, 120)
