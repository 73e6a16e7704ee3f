"""Atomic replacement of files, one lock per run, and one error message for each refusal of the operating system."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import pyarrow as pa

from ..errors import DamagedError, InputError, ResourceError, UsageError
from ..inputs import KINDS

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # some network file systems
LOCK_NAME = ".lock"
LARGEST = 10**9  # bytes of a file that is read whole; a run of 1,000 layers has a run.json of some megabytes


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a refusal of the operating system into one sentence about ``path`` (ResourceError)."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in NO_SPACE:
            advice = "what was recorded before is safe; free some space, then continue the run with --resume."
        elif error.errno in NO_ACCESS:
            advice = "make it writable, or choose another folder."
        elif error.errno == errno.ENOENT:
            advice = "its folder is not there and cannot be made; choose another folder."
        else:
            advice = "what was recorded before is safe; check the disk, then continue the run with --resume."
        raise ResourceError(f"cannot write {path} ({reason}): {advice}") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn a refusal to read into one sentence (InputError). FileNotFoundError passes: only the caller knows its
    meaning."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise InputError(f"cannot read {path} ({reason}): check its permissions and the disk.") from error


def inside(run: Path, path: Path) -> Path:
    """Return ``path`` if it lies in ``run`` and is a file, a directory or nothing yet; else raise DamagedError.

    A link out of the run is neither read nor written through, and a pipe would keep its reader waiting for ever.
    """
    real = os.path.realpath(path)
    if not real.startswith(os.path.realpath(run) + os.sep):
        raise DamagedError(f"{path} is a link out of the run, to {real}: put there what it points to.", run)
    with suppress(FileNotFoundError, NotADirectoryError), reading(path):
        kind = stat.S_IFMT(os.stat(real).st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR):
            raise DamagedError(f"{path} is {KINDS.get(kind, 'no file')}: move it elsewhere.", run)
    return path


def contents(run: Path, path: Path) -> bytes:
    """Return all bytes of a file in ``run``, at most :data:`LARGEST`. Raises FileNotFoundError if there is no such
    file."""
    with reading(inside(run, path)), path.open("rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > LARGEST:
            told = f"{path} holds {size / 1e6:,.0f} MB, more than {LARGEST / 1e6:g} MB: restore it from a copy."
            raise DamagedError(told, run)
        return file.read()


def make_directory(path: Path) -> None:
    """Make a directory as ``mkdir -p`` does, and sync its parents, so that it survives a power cut."""
    if not path.exists():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def replace_file(path: Path, data: bytes | pa.Buffer) -> None:
    """Write ``data`` to ``path`` so that a reader sees the old file or the new one, also after a power cut.

    The temporary name begins with a dot: ``pd.read_parquet(folder)`` ignores such names.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two sweeps may write one configuration
    with writing(path):
        make_directory(path.parent)
        try:
            with suppress(FileNotFoundError):
                os.unlink(temporary)  # left by a crash; or a link, through which nothing is written
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):  # a full disk wants its space back
                os.unlink(temporary)
            raise
        sync_directory(path.parent)


@contextmanager
def appending(run: Path, name: str) -> Iterator[int]:
    """Open the file ``name`` of ``run`` to append to it within this context; make it if there is none."""
    path = inside(run, run / name)
    with writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def write_all(descriptor: int, data: bytes | pa.Buffer) -> None:
    """Call ``os.write`` until everything is written: a single call may stop short."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_directory(path: Path) -> None:
    """Sync the renames in ``path`` to the disk. If the file system cannot sync a directory, do nothing."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


class HeldFile:
    """A descriptor that belongs to one process: a forked child closes its copy.

    A lock in a child would keep the run locked after the parent's death, and a journal in a child would keep its space
    on the disk.
    """

    _open: ClassVar[set[int]] = set()  # the open descriptors, also of objects that no variable refers to

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self._opened_by = os.getpid()
        HeldFile._open.add(descriptor)

    def release(self) -> None:
        """Close the descriptor; a second call, or a call in a forked child, does nothing."""
        if self._descriptor is not None and self._opened_by == os.getpid():
            HeldFile._open.discard(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None

    @staticmethod
    def release_all() -> None:
        """Close the copies of the parent's descriptors in a forked child."""
        for descriptor in [*HeldFile._open]:
            HeldFile._open.discard(descriptor)
            with suppress(OSError):
                os.close(descriptor)


os.register_at_fork(after_in_child=HeldFile.release_all)


class Lock(HeldFile):
    """An exclusive ``flock`` on a run directory. The kernel releases it when the process ends, however it ends."""

    def __init__(self, run: Path) -> None:
        self._run = run
        with writing(run):
            descriptor = os.open(run / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            super().__init__(descriptor)
            self._file, self._directory = inode(run / LOCK_NAME), inode(run)
            # A reader that asks whether the run is alive holds the lock for an instant: hence several attempts.
            for _ in range(20):
                if _flock(descriptor, fcntl.LOCK_EX):
                    return
                time.sleep(0.02)
        self.release()
        raise UsageError(f"{run} is being written by another process: wait for it to end, or choose another --name.")

    def check(self) -> None:
        """Raise ResourceError if the directory was moved or removed, or if the lock file is no longer this process's.

        Another process may then write the run, and nobody could tell the two writers' records from each other.
        """
        advice = "what was recorded is safe; continue the run with --resume once nobody else writes it."
        if inode(self._run) != self._directory:
            raise ResourceError(f"{self._run} was moved or removed while it was written: {advice}")
        if self._descriptor is not None and inode(self._run / LOCK_NAME) != self._file:
            raise ResourceError(f"the lock of {self._run} was removed, or another process has taken it: {advice}")


def inode(path: Path) -> tuple[int, int] | None:
    """Return (device, number) of the file at ``path``; None if there is none."""
    try:
        found = os.stat(path, follow_symlinks=True)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def is_locked(run: Path) -> bool:
    """True if a live process writes ``run``; also True if the file system has no locks, so that nobody can tell."""
    try:
        descriptor = os.open(run / LOCK_NAME, os.O_RDONLY | os.O_NONBLOCK)  # NONBLOCK in case of a pipe
    except FileNotFoundError:  # copied without its hidden files: nobody writes here
        return False
    except OSError:
        return True
    try:
        return not _flock(descriptor, fcntl.LOCK_SH, unsupported=False)
    finally:
        os.close(descriptor)


def _flock(descriptor: int, kind: int, unsupported: bool = True) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            return unsupported
        raise
    return True
