"""Writes the report: every figure that the runs allow, the ledger of claims, and the page that holds them."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ..errors import DamagedError, InputError, ResourceError, UsageError, in_words
from ..experiments import command
from ..stopping import undisturbed
from ..store.files import replace_file
from ..store.layout import plain
from . import page, paper
from .base import FIGURES, MissingRuns, Picture
from .claims import Finding, ledger
from .collection import Record, Runs, spared
from .diagnosis import diagnose
from .headline import headline

log = logging.getLogger(__name__)
WORKERS = 4  # processes that print
PAPERS = ("branchnorm", "deepnet", "admin")
DIAGNOSED = 3  # runs that get a diagnostic page of their own, where none is named


@dataclass(frozen=True)
class Missing:
    """Says which figure could not be made, why, and which command makes its runs."""

    id: str
    title: str
    sentence: str
    command: str


@dataclass(frozen=True)
class Failed:
    """Says which figure, run's part of the page (``run:NAME``) or claim's verdict could not be made, and which error
    kept it from being made."""

    id: str
    title: str
    sentence: str
    error: Exception

    @classmethod
    def of(cls, id: str, title: str, error: Exception) -> Failed:
        return cls(id, title, in_words(error), error)


@dataclass(frozen=True)
class Built:
    """Says what a report came to."""

    page: Path
    sections: Sequence[page.PageSection]
    missing: Sequence[Missing]
    failed: Sequence[Failed]
    findings: Sequence[Finding]
    broken: Sequence[tuple[Path, str]]


def build(
    folder: Path,
    out: Path,
    *,
    figures: Sequence[str] = (),
    diagnosed: Sequence[str] = (),
    progress: Callable[[str], None] = lambda what: None,
) -> Built:
    """Write the report on the runs below ``folder`` to ``out``: index.html, figures/, claims.json, claims.csv.

    ``figures`` and ``diagnosed`` (names of runs) choose; empty: all figures, and the runs that most need a look. What
    an error keeps from being made is left out, and listed in ``failed`` and on the page. Raises InputError where
    ``folder`` holds no run, UsageError for a name that does not exist, ResourceError where ``out`` cannot be written.
    """
    chosen = [FIGURES.resolve(name) for name in figures] or sorted(FIGURES, key=_order)
    runs, broken = load(folder)
    asked = _named(runs, diagnosed) if diagnosed else []  # a wrong name shows now
    kept: list[Missing | Failed | None] = []
    try:
        with Press(out) as press:
            for id in chosen:
                entry = FIGURES[id]
                progress(id)
                title, source = entry.title, entry.source
                made, runs = spared(
                    runs,
                    broken,
                    lambda left, e=entry, i=id, t=title, s=source: _press(
                        press, i, t, s, "figures", lambda: e().picture(left)
                    ),
                )
                kept.append(made)
            shown, runs = spared(runs, broken, lambda left: _diagnosed(press, left, diagnosed, progress))
            kept += shown
            why = dict(broken)
            lost = [(record.name, why[record.run.path]) for record in asked if record.run.path in why]
            kept += [Failed(f"run:{name}", name, sentence, InputError(sentence)) for name, sentence in lost]
            progress("claims")
            findings = ledger(runs, broken)
            damaged = {path for path, _ in broken}
            runs = runs.where(lambda record: record.run.path not in damaged)
            write_ledger(findings, out)
            progress("files of the figures")
            sections, unprinted = press.printed()
        missing = [one for one in kept if isinstance(one, Missing)]
        failed = [one for one in kept if isinstance(one, Failed)]
        failed += [Failed.of(section.id, section.title, error) for section, error in unprinted]
        failed += [Failed.of(one.claim.id, one.claim.sentence, one.error) for one in findings if one.error is not None]
        progress("page")
        path = page.write(
            out,
            title=f"stabilitylab: {len(runs)} run{'s' if len(runs) != 1 else ''} in {folder.resolve().name}",
            sections=sections,
            findings=findings,
            runs=runs,
            broken=broken,
            missing=[(entry.id, entry.title, entry.sentence, entry.command) for entry in missing],
            failed=[(entry.id, entry.title, entry.sentence) for entry in failed],
        )
    except OSError as error:
        reason = error.strerror or error
        raise ResourceError(f"cannot write the report to {out} ({reason}): choose another --out.") from error
    return Built(path, sections, missing, failed, findings, broken)


def _press(
    press: Press, id: str, title: str, source: str, group: page.Group, draw: Callable[[], Picture]
) -> Missing | Failed | None:
    """Hands to the press what ``draw`` makes; what keeps it from being made, whatever that is, else None."""
    try:
        press.section(id, title, source, draw(), group)
    except MissingRuns as lacking:
        return _lacking(id, title, lacking, group)
    except DamagedError:
        raise
    except Exception as error:
        return Failed.of(id, title, error)
    return None


def _diagnosed(
    press: Press, runs: Runs, names: Sequence[str], progress: Callable[[str], None]
) -> list[Missing | Failed | None]:
    """Diagnoses the runs that have a part of the page; one that is damaged raises before any is begun that another
    would replace."""
    known = {record.name for record in runs}
    chosen = _named(runs, [name for name in names if name in known]) if not names or known & {*names} else []
    pictures: list[tuple[Record, Callable[[], Picture]]] = []
    kept: list[Missing | Failed | None] = []
    for record in chosen:
        progress(record.name)
        pictures.append((record, _drawn(record)))
    for record, draw in pictures:
        made = _press(press, f"run:{record.name}", record.name, "one run, step by step", "runs", draw)
        if isinstance(made, Missing):
            log.warning("%s: %s", record.name, made.sentence)
        else:
            kept.append(made)
    return kept


def _drawn(record: Record) -> Callable[[], Picture]:
    """Diagnoses a run now; any error but damage is kept for whoever asks for it."""
    try:
        picture = diagnose(record)
    except DamagedError:
        raise
    except Exception as error:
        found = error

        def fail() -> Picture:
            raise found

        return fail
    return lambda: picture


def _lacking(id: str, title: str, lacking: MissingRuns, group: page.Group) -> Missing | Failed:
    if lacking.command or group == "runs":
        return Missing(id, title, lacking.sentence, lacking.command)
    try:
        return Missing(id, title, lacking.sentence, command(id))
    except UsageError as error:  # a figure of somebody's
        told = f"{lacking.sentence.rstrip('.')}; which command makes them is not said: there is no sweep {id!r}, and "
        return Failed(id, title, f"{told}its MissingRuns has none", error)


def load(folder: Path) -> tuple[Runs, list[tuple[Path, str]]]:
    """Loads the runs below ``folder``, with what could not be read; raises InputError where there is no run at all."""
    if not folder.is_dir():
        raise InputError(f"no folder {folder}: make runs with 'stabilitylab probe', or name their folder.")
    broken: list[tuple[Path, str]] = []
    runs = Runs.load(folder, broken)
    if not runs:
        found = f"; {broken[0][1]}" if broken else ""
        raise InputError(
            f"no run can be read below {folder}: make one with 'stabilitylab probe --out {folder}'{found}."
        )
    return runs, broken


def write_ledger(findings: Sequence[Finding], out: Path) -> None:
    """Writes claims.json, and claims.csv with one row an effect, a claim's first ("primary") before those that
    describe."""
    out.mkdir(parents=True, exist_ok=True)
    entries = [finding.as_dict() for finding in findings]
    facts = plain({"headline": headline(findings), "claims": entries})
    replace_file(out / "claims.json", (json.dumps(facts, indent=1) + "\n").encode())
    rows = [
        {
            **{key: value for key, value in entry.items() if key != "effects"},
            **{f"effect_{k}": v for k, v in one.items()},
        }
        for entry in entries
        for one in (entry["effects"] or [{}])
    ]
    replace_file(out / "claims.csv", pd.DataFrame(rows).to_csv(index=False).encode())


def _order(id: str) -> tuple[int, str]:
    """Puts BranchNorm's figures first, then DeepNet's, then Admin's, then whatever else is registered."""
    paper = id.partition(":")[0]
    return (PAPERS.index(paper) if paper in PAPERS else len(PAPERS), id)


class Press:
    """Prints figures in other processes while this one reads runs: matplotlib takes most of a report's time.

    A context manager: after an error in it, or a Ctrl-C, what is not being printed yet is dropped.
    """

    def __init__(self, out: Path) -> None:
        self._out, self._folder = out, out / "figures"
        self._folder.mkdir(parents=True, exist_ok=True)
        spawn = multiprocessing.get_context("spawn")
        count = min(WORKERS, os.cpu_count() or 1)
        self._workers = ProcessPoolExecutor(count, spawn)
        self._printing: list[tuple[page.PageSection, Future[Any]]] = []

    def __enter__(self) -> Press:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.shutdown(cancel_futures=True)

    def section(self, id: str, title: str, source: str, picture: Picture, group: page.Group) -> None:
        """Begin to print a figure; raises here what would keep it off the page."""
        name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in id)
        paths = paper.paths(self._folder, name, picture.extra)
        files = {kind: path.relative_to(self._out).as_posix() for kind, path in paths.items()}
        section = page.PageSection(id, title, source, picture, files, group=group)
        section.check()
        with undisturbed():  # a process that prints ends its figure, and then it is told
            self._printing.append((section, self._workers.submit(paper.write, picture, self._folder, name)))

    def printed(self) -> tuple[list[page.PageSection], list[tuple[page.PageSection, Exception]]]:
        """Waits; returns the sections whose files all stand, and the others, which leave none, with what went wrong.

        Raises OSError where the files cannot be written."""
        done, failed = [], []
        for section, printing in self._printing:
            try:
                printing.result()
                done.append(section)
            except OSError:
                raise
            except Exception as error:
                failed.append((section, error))
                for path in section.files.values():
                    (self._out / path).unlink(missing_ok=True)
        return done, failed


def _named(runs: Runs, names: Sequence[str]) -> list[Record]:
    """Picks the runs of these names; without any, what went wrong first, and one of each label before a second."""
    if names:
        known = {record.name: record for record in runs}
        if unknown := [name for name in names if name not in known]:
            raise UsageError(f"no run {unknown[0]!r} there; it has {', '.join(list(known)[:8])}.")
        return [known[name] for name in names]
    order = {"diverged": 0, "stuck": 1, "descending": 2, "learning": 4, "trained": 5}
    trained = [record for record in runs if record.kind != "onestep" and record.ended]
    worst = sorted(trained or runs, key=lambda record: order.get(record.verdict, 3))
    return sorted(worst, key=lambda record: [r.label for r in worst[: worst.index(record)]].count(record.label))[
        :DIAGNOSED
    ]
