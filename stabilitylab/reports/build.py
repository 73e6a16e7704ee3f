"""Writes the report: every figure that the runs allow, the ledger of claims, and the page that holds them."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from ..errors import DamagedError, InputError, ResourceError, UsageError, in_words
from ..experiments import command
from ..store.documents import plain
from ..store.files import replace_file
from .arrange import distinct
from .base import FIGURES, Figure, MissingRuns, Picture
from .claims import Finding, ledger
from .collection import Record, Runs, built_in, save, spared
from .diagnosis import diagnose
from .headline import headline
from .measures.comparison import not_drawn
from .measures.histograms import pattern_of
from .page import html
from .page.overview import Overview, overview
from .page.point import pointless
from .page.press import Press
from .page.sections import Group, PageSection
from .worst_first import SHOWN, named, shown, worst_first

log = logging.getLogger(__name__)
PAPERS = ("branchnorm", "deepnet", "admin")
PRINTED = 3  # the maps of a run are printed if there are at most this many runs, or if the user named the run


Progress = Callable[[str, int, int], None]  # the stage that begins, the number of stages done, their total


@dataclass(frozen=True)
class Missing:
    """A figure that lacks its runs: the reason, and the command that makes the runs."""

    id: str
    title: str
    sentence: str
    command: str


@dataclass(frozen=True)
class Failed:
    """A figure, a run's part of the page (``run:NAME``) or a claim's verdict that an error prevented, with the
    error."""

    id: str
    title: str
    sentence: str
    error: Exception

    @classmethod
    def of(cls, id: str, title: str, error: Exception) -> Failed:
        return cls(id, title, in_words(error), error)


@dataclass(frozen=True)
class Built:
    """The result of :func:`build`."""

    page: Path
    sections: Sequence[PageSection]
    missing: Sequence[Missing]
    failed: Sequence[Failed]
    findings: Sequence[Finding]
    broken: Sequence[tuple[Path, str]]


def build(
    folder: Path | Sequence[Path],
    out: Path,
    *,
    figures: Sequence[str] = (),
    diagnosed: Sequence[str] = (),
    places: str = "",
    progress: Progress = lambda what, done, of: None,
) -> Built:
    """Write the report on the runs below ``folder`` to ``out``: index.html, figures/, claims.json, claims.csv.

    ``figures``: the figures to make; empty: all figures that can show their subject. ``diagnosed``: the names of the
    runs to diagnose; empty: the runs that need it most. With ``figures``, the report has only these figures, the claims
    about them (without Holm's correction, which needs all claims) and the runs of ``diagnosed``. A part that an error
    prevents is left out, and is listed in ``failed`` and on the page. ``places``: a regular expression of the places
    whose histograms are drawn. Raises InputError if ``folder`` holds no run that can be read, UsageError for a name
    that does not exist or a bad expression, ResourceError if ``out`` cannot be written.
    """
    chosen = [FIGURES.resolve(name) for name in figures] or sorted(FIGURES, key=_order)
    folders = [folder] if isinstance(folder, Path) else list(folder)
    pattern_of(places)  # a wrong expression shows now
    runs, broken = load(*folders, report=out)
    asked = named(runs, diagnosed) if diagnosed else []  # a wrong name shows now
    alone = bool(figures)
    count, done = len(chosen) + len(asked or runs[:SHOWN]) + 4, itertools.count()

    def begin(what: str) -> None:
        progress(what, min(next(done), count), count)

    kept: list[Missing | Failed | None] = []
    try:
        with Press(out) as press:
            for id in chosen:
                entry = FIGURES[id]
                begin(id)
                title, source = entry.title, entry.source
                made, runs = spared(
                    runs,
                    broken,
                    lambda left, e=entry, i=id, t=title, s=source: _press(
                        press, i, t, s, "figures", lambda: _telling(e(), left, asked=bool(figures))
                    ),
                )
                kept.append(made)
            if asked or not alone:
                shown, runs = spared(runs, broken, lambda left: _diagnosed(press, left, diagnosed, begin, places))
                kept += shown
            why = dict(broken)
            lost = [(record.name, why[record.run.path]) for record in asked if record.run.path in why]
            kept += [Failed(f"run:{name}", name, sentence, InputError(sentence)) for name, sentence in lost]
            begin("claims")
            findings = ledger(runs, broken, chosen if alone else None)
            damaged = {path for path, _ in broken}
            runs = runs.where(lambda record: record.run.path not in damaged)
            _some(runs, broken, folders)
            write_ledger(findings, out)
            begin("runs in a sentence")
            if asked or not alone:
                (view, lacking), runs = spared(runs, broken, lambda left: _top(left, diagnosed if alone else ()))
                kept += lacking
            else:
                view = Overview()
            begin("files of the figures")
            sections, unprinted = press.printed()
        missing = [one for one in kept if isinstance(one, Missing)]
        failed = [one for one in kept if isinstance(one, Failed)]
        failed += [Failed.of(section.id, section.title, error) for section, error in unprinted]
        failed += [Failed.of(one.claim.id, one.claim.sentence, one.error) for one in findings if one.error is not None]
        begin("page")
        path = html.write(
            out,
            title=title_of(runs, folders),
            sections=sections,
            findings=findings,
            runs=runs,
            broken=broken,
            missing=[(entry.id, entry.title, entry.sentence, entry.command) for entry in missing],
            failed=[(entry.id, entry.title, entry.sentence) for entry in failed],
            view=view,
        )
        save(runs, out)
    except OSError as error:
        reason = error.strerror or error
        raise ResourceError(f"cannot write the report to {out} ({reason}): choose another --out.") from error
    return Built(path, sections, missing, failed, findings, broken)


def title_of(runs: Runs, folders: Sequence[Path]) -> str:
    """Return the title of the page, such as ``3 runs in runs``."""
    where = ", ".join(dict.fromkeys(folder.resolve().name for folder in folders))
    return f"{len(runs)} run{'s' if len(runs) != 1 else ''} in {where}" if len(folders) == 1 else where


def _top(runs: Runs, names: Sequence[str]) -> tuple[Overview, list[Failed]]:
    """The top of the page about the runs of these names; without names, about all."""
    known = {record.name for record in runs}
    own = runs.where(lambda record: record.name in names) if names else runs
    kept = [name for name in names if name in known]
    return top(own, named(own, kept) if names else worst_first(own.without_cut_trials()))


def top(runs: Runs, first: Sequence[Record]) -> tuple[Overview, list[Failed]]:
    """Return the top of the page, and the parts that an error prevented: the whole top, or the diagnoses of runs."""
    try:
        view = overview(runs, first)
    except DamagedError:
        raise
    except Exception as error:
        return Overview(), [Failed.of("overview", "Runs in a sentence", error)]
    failed = [(record, error) for record in runs if (error := record.error) is not None]
    return view, [Failed.of(f"diagnosis:{record.name}", record.name, error) for record, error in failed]


def _telling(figure: Figure, runs: Runs, asked: bool) -> Picture:
    """Return the picture of the runs, without the trials of a rate search that stopped early, which a note counts.
    Raises MissingRuns if nobody asked for it and it cannot show its subject."""
    drawn = runs.without_cut_trials()
    picture = figure.picture(drawn)
    if not asked and (why := pointless(figure.id, picture)):
        raise MissingRuns(why)
    left_out = not_drawn(len(runs) - len(drawn), "of a rate search that stopped before the end of their schedule")
    return replace(picture, notes=[*picture.notes, *left_out])


def _press(
    press: Press, id: str, title: str, source: str, group: Group, draw: Callable[[], Picture], files: bool = True
) -> Missing | Failed | None:
    """Hand the picture that ``draw`` returns to the press. Return the reason if there is no picture, else None."""
    try:
        press.section(id, title, source, distinct(draw()), group, files)
    except MissingRuns as lacking:
        return _lacking(id, title, lacking, group)
    except DamagedError:
        raise
    except Exception as error:
        return Failed.of(id, title, error)
    return None


def _diagnosed(
    press: Press, runs: Runs, names: Sequence[str], begin: Callable[[str], None], places: str = ""
) -> list[Missing | Failed | None]:
    """Diagnose the runs that have a part of the page. All runs are diagnosed before the first part is made, so that a
    damaged run, which another run replaces, raises its error before then."""
    chosen = shown(runs if names else runs.without_cut_trials(), names)
    pictures: list[tuple[Record, Callable[[], Picture]]] = []
    kept: list[Missing | Failed | None] = []
    for record in chosen:
        begin(record.name)
        pictures.append((record, _drawn(record, places)))
    for record, draw in pictures:
        files = bool(names) or len(runs) <= PRINTED
        made = _press(press, f"run:{record.name}", record.name, "one run, step by step", "runs", draw, files)
        if isinstance(made, Missing):
            log.warning("%s: %s", record.name, made.sentence)
        else:
            kept.append(made)
    return kept


def _drawn(record: Record, places: str) -> Callable[[], Picture]:
    """Diagnose a run now, and return a function that returns its picture or raises the error. DamagedError is raised
    at once."""
    try:
        key = ("picture", record.name, places)
        picture = record.remember(key, lambda: diagnose(record, places=places), keep=built_in())
    except DamagedError:
        raise
    except Exception as error:
        found = error

        def fail() -> Picture:
            raise found

        return fail
    return lambda: picture


def _lacking(id: str, title: str, lacking: MissingRuns, group: Group) -> Missing | Failed:
    if lacking.command or group == "runs":
        return Missing(id, title, lacking.sentence, lacking.command)
    try:
        return Missing(id, title, lacking.sentence, command(id))
    except UsageError as error:  # a figure of a plug-in
        told = f"{lacking.sentence.rstrip('.')}; which command makes them is not said: there is no sweep {id!r}, and "
        return Failed(id, title, f"{told}its MissingRuns has none", error)


def load(*folders: Path, known: Runs = Runs(()), report: Path | None = None) -> tuple[Runs, list[tuple[Path, str]]]:
    """Load the runs below these folders, each once; return them and the runs that could not be read. ``known``: runs
    that were loaded before. ``report``: the folder of an earlier report. A run of either is read again only if it has
    changed. Raises InputError if there is no run at all."""
    before = {record.run.path: record for record in known}
    broken: list[tuple[Path, str]] = []
    found: dict[Path, tuple[Record, str]] = {}
    taken: set[str] = set()  # the names so far: no two runs have one
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"no folder {folder}: make runs with 'stabilitylab probe', or name their folder.")
        for record in Runs.load(folder, broken, before, report):
            path = record.run.path.resolve()
            if path not in found:
                longer = f"{folder.name}/{record.name}" if record.run.path != folder else str(folder)
                wanted = (record.name, longer, str(record.run.path), str(path))
                found[path] = record, next(name for name in wanted if name not in taken)
                taken.add(found[path][1])
    for record, name in found.values():  # at last: a known record of two of the folders was named anew by each
        record.name = name
    runs = Runs(record for record, _ in found.values())
    _some(runs, broken, folders)
    return runs, broken


def _some(runs: Runs, broken: Sequence[tuple[Path, str]], folders: Sequence[Path]) -> None:
    """Raise InputError if no run is left."""
    if runs:
        return
    folder = folders[0]
    if not broken:
        raise InputError(f"no run can be read below {folder}: make one with 'stabilitylab probe --out {folder}'.")
    more = f" {len(broken) - 1} more cannot be read either." if len(broken) > 1 else ""
    raise InputError(f"no run can be read below {folder}: {broken[0][1].rstrip('.')}.{more}")


def write_ledger(findings: Sequence[Finding], out: Path) -> None:
    """Write claims.json, and claims.csv with one row per effect: of each claim first the primary effect, then the
    descriptive ones."""
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
