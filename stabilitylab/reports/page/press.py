"""The files of figures, printed in other processes."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

from ...stopping import undisturbed
from ..base import Picture
from ..files import paths as listed
from .printed import Printed, digest
from .sections import Group, PageSection

WORKERS = 4  # processes that print


def quietly(picture: Picture, folder: Path, name: str, title: str, source: str) -> None:
    """Print a figure without matplotlib's warnings about fonts and layouts, which are of no use to a user."""
    from .. import paper  # here, as only a process that prints needs seaborn

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):
        paper.write(picture, folder, name, title, source)


class Press:
    """A printer of figures in other processes, while this one reads runs: matplotlib takes most of a report's time. A
    figure whose files exist and whose picture has not changed is not printed again.

    This process prints what the others cannot: Python starts none for a program that is read from standard input, and
    the system may end one for want of memory.

    A context manager: after an error in it, or a Ctrl-C, figures that are not being printed yet are dropped.
    """

    def __init__(self, out: Path) -> None:
        self._out, self._folder = out, out / "figures"
        self._folder.mkdir(parents=True, exist_ok=True)
        spawn = multiprocessing.get_context("spawn")
        count = min(WORKERS, os.cpu_count() or 1)
        self._workers = ProcessPoolExecutor(count, spawn)
        self._printed = Printed(self._folder)
        self._printing: list[tuple[PageSection, Callable[[], None], Future[Any] | None]] = []
        self._fresh: dict[str, tuple[str, str, list[Path]]] = {}  # id -> what the list of printed figures gets
        self._taken: set[Path] = set()  # files of the figures so far

    def __enter__(self) -> Press:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.shutdown(cancel_futures=True)

    def section(self, id: str, title: str, source: str, picture: Picture, group: Group, files: bool) -> None:
        """Begin to print a figure, if it is to have ``files``. Raise here an error that would keep it off the page."""
        name = self._name(id, picture)
        paths = listed(self._folder, name, picture) if files else {}
        self._taken.update(paths.values())
        standing = {kind: path.relative_to(self._out).as_posix() for kind, path in paths.items()}
        section = PageSection(id, title, source, picture.whole, standing, group=group)
        section.check()
        own = digest(picture, name, title, source) if files else ""
        files = files and not self._printed.stands(name, own, paths.values())
        if files:
            self._fresh[id] = name, own, [*paths.values()]
        work = partial(quietly, picture, self._folder, name, title, source)
        with undisturbed():  # an interrupt does not end a printing process: it finishes its figure first
            self._printing.append((section, work, self._begun(work) if files else None))

    def _name(self, id: str, picture: Picture) -> str:
        """Return the name of a figure's files: its id, with a number if another figure has files of that name."""
        plain = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in id)
        names = (f"{plain}-{number}" if number > 1 else plain for number in itertools.count(1))
        return next(one for one in names if self._taken.isdisjoint(listed(self._folder, one, picture).values()))

    def _begun(self, work: Callable[[], None]) -> Future[Any]:
        try:
            return self._workers.submit(work)
        except BrokenProcessPool as error:
            lost = Future[Any]()
            lost.set_exception(error)
            return lost

    def printed(self) -> tuple[list[PageSection], list[tuple[PageSection, Exception]]]:
        """Wait, and return the sections whose files are all written, and the others, which leave none, with the error.

        Raises OSError where the files cannot be written."""
        done, failed = [], []
        for section, work, printing in self._printing:
            try:
                if printing is not None:
                    try:
                        printing.result()
                    except BrokenProcessPool:
                        work()
                    self._printed.note(*self._fresh[section.id])
                done.append(section)
            except OSError:
                raise
            except Exception as error:
                failed.append((section, error))
                for path in section.files.values():
                    (self._out / path).unlink(missing_ok=True)
        if self._fresh:
            self._printed.write()
        return done, failed
