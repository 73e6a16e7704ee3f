"""The report: every figure that the runs allow, the ledger of claims, and the page that holds them."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ..errors import InputError, ResourceError, UsageError
from ..experiments import command
from ..store.layout import plain
from . import page, paper
from .base import FIGURES, MissingRuns, Picture
from .claims import Finding, ledger
from .collection import Record, Runs
from .diagnosis import diagnose

log = logging.getLogger(__name__)
WORKERS = 4  # processes that print
PAPERS = ("branchnorm", "deepnet", "admin")
DIAGNOSED = 3  # runs that get a diagnostic page of their own, where none is named


@dataclass(frozen=True)
class Missing:
    """A figure that could not be made, why, and the command that makes its runs."""

    id: str
    title: str
    sentence: str
    command: str


@dataclass(frozen=True)
class Built:
    """What a report came to."""

    page: Path
    sections: Sequence[page.Section]
    missing: Sequence[Missing]
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

    ``figures`` and ``diagnosed`` (names of runs) choose; empty: all figures, and the runs that most need a look.
    Raises InputError where ``folder`` holds no run, UsageError for a name that does not exist, ResourceError where
    ``out`` cannot be written.
    """
    from . import figures as _  # noqa: F401  (registers them)

    chosen = [FIGURES.resolve(name) for name in figures] or sorted(FIGURES, key=_order)
    runs, broken = load(folder)
    named = _named(runs, diagnosed)
    sections, missing = [], []
    try:
        with Press(out) as press:
            for id in chosen:
                entry = FIGURES[id]
                progress(id)
                try:
                    picture = entry().picture(runs)
                except MissingRuns as lacking:
                    missing.append(Missing(id, entry.title, lacking.sentence, lacking.command or command(id)))
                    continue
                sections.append(press.section(id, entry.title, entry.source, picture, "figures"))
            for record in named:
                progress(record.name)
                try:
                    picture = diagnose(record)
                except MissingRuns as lacking:
                    log.warning("%s: %s", record.name, lacking.sentence)
                    continue
                title = "one run, step by step"
                sections.append(press.section(f"run:{record.name}", record.name, title, picture, "runs"))
            progress("claims")
            findings = ledger(runs)
            write_ledger(findings, out)
            progress("files of the figures")
        progress("page")
        path = page.write(
            out,
            title=f"stabilitylab: {len(runs)} run{'s' if len(runs) != 1 else ''} in {folder.resolve().name}",
            sections=sections,
            findings=findings,
            runs=runs,
            broken=broken,
            missing=[(entry.id, entry.title, entry.sentence, entry.command) for entry in missing],
        )
    except OSError as error:
        reason = error.strerror or error
        raise ResourceError(f"cannot write the report to {out} ({reason}): choose another --out.") from error
    return Built(path, sections, missing, findings, broken)


def load(folder: Path) -> tuple[Runs, list[tuple[Path, str]]]:
    """The runs below ``folder`` and what could not be read; raises InputError where there is no run at all."""
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
    """claims.json, and claims.csv with one row an effect."""
    out.mkdir(parents=True, exist_ok=True)
    entries = [finding.as_dict() for finding in findings]
    (out / "claims.json").write_text(json.dumps(plain({"claims": entries}), indent=1) + "\n", encoding="utf-8")
    rows = [
        {
            **{key: value for key, value in entry.items() if key != "effects"},
            **{f"effect_{k}": v for k, v in one.items()},
        }
        for entry in entries
        for one in (entry["effects"] or [{}])
    ]
    pd.DataFrame(rows).to_csv(out / "claims.csv", index=False)


def _order(id: str) -> tuple[int, str]:
    """BranchNorm's figures first, then DeepNet's, then Admin's, then whatever else is registered."""
    paper = id.partition(":")[0]
    return (PAPERS.index(paper) if paper in PAPERS else len(PAPERS), id)


class Press:
    """Prints figures in other processes while this one reads runs: matplotlib takes most of a report's time.

    A context manager: it ends when all files stand, raising what went wrong in printing; after an error in it, or a
    Ctrl-C, what is not being printed yet is dropped.
    """

    def __init__(self, out: Path) -> None:
        self._out, self._folder = out, out / "figures"
        self._folder.mkdir(parents=True, exist_ok=True)
        spawn = multiprocessing.get_context("spawn")
        count = min(WORKERS, os.cpu_count() or 1)
        self._workers = ProcessPoolExecutor(count, spawn, signal.signal, (signal.SIGINT, signal.SIG_IGN))
        self._printing: list[Future[object]] = []

    def __enter__(self) -> Press:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            for printed in self._printing if error is None else ():
                printed.result()
        finally:
            self._workers.shutdown(cancel_futures=True)

    def section(self, id: str, title: str, source: str, picture: Picture, group: page.Group) -> page.Section:
        name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in id)
        self._printing.append(self._workers.submit(paper.write, picture, self._folder, name))
        paths = paper.paths(self._folder, name, picture.extra)
        files = {kind: path.relative_to(self._out).as_posix() for kind, path in paths.items()}
        return page.Section(id, title, source, picture, files, group=group)


def _named(runs: Runs, names: Sequence[str]) -> list[Record]:
    """The runs of these names; without any, what went wrong first, and one of each label before a second."""
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
