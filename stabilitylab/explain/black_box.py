"""The black box of a run: a flight in a file, written whole or not at all, sealed with a digest and the run's id."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ..errors import InputError, ResourceError, first_line
from ..store.digest import Hashed, fault
from ..store.files import inside, make_directory, sync_directory
from ..store.identity import Identity
from ..store.layout import BLACK_BOX, checkpoints
from .flight import Flight

KEEP = 4  # files: the first one, and the newest


def save(run: Path, step: int, flight: Flight, run_id: str = "", rank: int = 0) -> Path:
    """Write ``flight`` as ``run/black_box/step-<step>.pt``, that of another process than the first into ``rank-<rank>``
    there. Raises ResourceError if it cannot be written."""
    path = inside(run, run / folder(rank) / f"step-{step:08d}.pt")
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        make_directory(path.parent)
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            torch.save(flight.as_dict(), hashed := Hashed(file, run_id))  # pyright: ignore[reportArgumentType]
            hashed.seal()
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
        later = found(run, rank)[1:]
        for old in later[: max(0, len(later) + 1 - KEEP)]:
            old.unlink()
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise ResourceError(f"cannot write the black box {path}: {error}; free some space.") from error
    return path


def folder(rank: int) -> str:
    """Return the folder under the run in which a process keeps its black boxes."""
    return BLACK_BOX if rank == 0 else f"{BLACK_BOX}/rank-{rank}"


def found(run: Path, rank: int = 0) -> list[Path]:
    """Return the black boxes that a process wrote, oldest first."""
    return [*checkpoints(run, folder(rank)).values()]


def load(path: Path, identity: Identity = Identity()) -> Flight:
    """Return the flight in a file. Raises InputError if it cannot be read, was changed, or is another run's."""
    try:
        if wrong := fault(path, identity):
            raise ValueError(wrong)
        return Flight.of(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # a damaged file surfaces as one of many types
        said = first_line(error, 160)
        raise InputError(f"the black box {path} cannot be read ({said}): restore it from a copy.") from error


def chosen(run: Path, identity: Identity, rank: int = 0) -> Flight:
    """Return the flight that explains most: the first one whose trouble lasted, else the newest.

    Raises InputError for a run without a black box.
    """
    paths = found(run, rank)
    if not paths:
        whose = f" of rank {rank}" if rank else ""
        raise InputError(
            f"{run} has no black box{whose}: record the loop with watch(record=stabilitylab.Recorder(loss_fn)) and "
            "w.batches(loader)."
        )
    flight = None
    for path in paths:
        flight = load(path, identity)
        if flight.lasting():
            return flight
    assert flight is not None, "there is a path"
    return flight
