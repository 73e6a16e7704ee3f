"""The page while runs go on: written again and again, without the papers' figures and claims, until they have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import DamagedError, InputError
from ..base import MissingRuns
from ..build import Built, Failed, Progress, build, load, title_of, top
from ..collection import Record, Runs, spared
from ..diagnosis import diagnose
from ..measures.histograms import pattern_of
from ..worst_first import shown
from . import html
from .overview import Overview
from .sections import PageSection

QUIET = 60.0  # seconds without an unfinished run, after which none is expected: a sweep pauses between two runs
SHARE = 4  # the pause is so many times the time that a page took: beside training it may cost a fifth of one core


def watch(
    folders: Sequence[Path],
    out: Path,
    every: float = 5.0,
    *,
    diagnosed: Sequence[str] = (),
    places: str = "",
    told: Callable[[str], None] = lambda sentence: None,
    progress: Progress = lambda what, done, of: None,
    quiet: float = QUIET,
) -> Built:
    """Write ``out/index.html`` every ``every`` seconds until no run has gone on for ``quiet`` seconds; then the whole
    report. A folder without runs is waited for. ``places``: a regular expression of the places whose histograms are
    drawn. Raises UsageError for a bad one."""
    pattern_of(places)
    last, seen = time.monotonic(), LastPage(places=places)
    while True:
        begun = time.monotonic()
        try:
            path, going = write(folders, out, every, diagnosed, seen)
            told(f"{path}: {going} run{'s' if going != 1 else ''} going")
        except InputError as error:
            going = 0
            told(str(error))
            last = begun  # there is nothing to end with
        now = time.monotonic()
        last = now if going else last
        if now - last >= quiet:
            return build(folders, out, diagnosed=diagnosed, places=places, progress=progress)
        time.sleep(max(min(every, quiet), SHARE * (now - begun)))


@dataclass
class LastPage:
    """The runs of the last page, and each run's part of the page, so that only parts that have changed are made again.
    ``places``: a regular expression of the places whose histograms each part draws; "": the places that moved most."""

    places: str = ""
    runs: Runs = field(default_factory=lambda: Runs(()))
    sections: dict[str, tuple[Record, PageSection]] = field(default_factory=dict)

    def section(self, record: Record) -> PageSection:
        """Return the part of the page of a run: the last page's if the run has not changed since."""
        id = f"run:{record.name}"
        before = self.sections.get(id)
        if before is not None and before[0] is record:
            return before[1]
        section = PageSection(
            id, record.name, "one run, step by step", diagnose(record, places=self.places), {}, group="runs"
        )
        section.check()
        self.sections[id] = record, section
        return section


def write(
    folders: Sequence[Path], out: Path, every: float, diagnosed: Sequence[str] = (), seen: LastPage | None = None
) -> tuple[Path, int]:
    """Write one page about the records of the runs so far, and return how many runs are unfinished. ``seen``: the last
    page; only what has changed since is read and drawn again."""
    seen = seen or LastPage()
    runs, broken = load(*folders, known=seen.runs)
    (sections, view, failed), runs = spared(runs, broken, lambda left: _made(left, diagnosed, seen))
    seen.runs = runs
    path = html.write(
        out,
        title=title_of(runs, folders),
        sections=sections,
        findings=[],
        runs=runs,
        broken=broken,
        missing=[],
        failed=[(one.id, one.title, one.sentence) for one in failed],
        view=view,
        live=every,
    )
    return path, sum(record.status.state == "running" for record in runs)


def _made(runs: Runs, diagnosed: Sequence[str], seen: LastPage) -> tuple[list[PageSection], Overview, list[Failed]]:
    """Make the runs' parts of the page and its top; list the parts that an error stopped."""
    chosen = shown(runs, diagnosed)
    sections, failed = [], []
    for record in chosen:
        id = f"run:{record.name}"
        try:
            section = seen.section(record)
        except MissingRuns:  # nothing recorded yet
            continue
        except DamagedError:
            raise
        except Exception as error:
            failed.append(Failed.of(id, record.name, error))
            continue
        sections.append(section)
    view, more = top(runs, chosen)
    return sections, view, [*failed, *more]
