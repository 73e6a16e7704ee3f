"""The runs that may calibrate an alarm: healthy ones, of one length and with one set of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import UsageError, bounded, listed
from ..store import Run
from ..store.layout import METRICS
from .cadence import Ranges, in_words, ranges
from .calibration import MAKE, RecordedTable
from .recipe import one_line

ILL = ("diverged", "stuck", "ignores its source")  # verdicts of runs that did not learn
SHOWN = 6  # the most runs that a sentence names


def named(runs: Sequence[Run]) -> dict[str, Run]:
    """Return the runs by name, or by path where names repeat. Raises UsageError without a run, or if one is given
    twice."""
    if not runs:
        raise UsageError(
            f"give at least one healthy run, as in `{MAKE}`: with k of them, at most 1 in k + 1 new healthy runs has a "
            "false alarm (4 runs: 1 in 5; 19 runs: 1 in 20)."
        )
    seen: dict[str, Run] = {}
    for run in runs:
        key = run.identity.run_id or str(run.path.resolve())
        if key in seen:
            raise UsageError(f"{run.path} is the same run as {seen[key].path}: give each run once.")
        seen[key] = run
    names = [run.name for run in runs]
    return {one_line(run.name if names.count(run.name) == 1 else str(run.path)): run for run in runs}


def refuse_ill(runs: Mapping[str, Run]) -> None:
    """Raise UsageError for a run that did not end as healthy runs end: one that goes on, was interrupted or diverged,
    met a number that is not finite, or did not learn."""
    for name, run in runs.items():
        status, why = run.status, ""
        if status.state == "running":
            raise UsageError(f"{name} still goes on: calibrate with healthy runs that have ended.")
        if status.state != "finished":
            reason = f" ({bounded(status.reason, 200)})" if status.reason else ""
            why = f"{status.state} at step {status.step}{reason}"
        elif run.incident is not None:
            why = f"met a number that is not finite at step {run.incident.get('step')}"
        elif (verdict := run.verdict) is not None and verdict.state in ILL:
            why = f"is no healthy run (verdict: {verdict.state}, {verdict.reason})"
        if why:
            raise UsageError(f"{name} {why}: calibrate with healthy runs.")


def refuse_other_lengths(runs: Mapping[str, Run]) -> Ranges:
    """Return the steps of the rows, which all runs have in common. Raises UsageError that names the runs if they differ
    in number or in their steps."""
    steps = {name: run.steps(METRICS).tolist() for name, run in runs.items()}
    lengths = {name: len(own) for name, own in steps.items()}
    if len({*lengths.values()}) > 1:
        told = listed([f"{name} has {rows}" for name, rows in lengths.items()], SHOWN)
        raise UsageError(
            f"the runs have different numbers of rows ({told}): calibrate with healthy runs of one length."
        )
    first, *others = steps
    for other in others:
        if steps[first] != steps[other]:
            both = " and ".join(f"{name} at {in_words(ranges(steps[name]))}" for name in (first, other))
            raise UsageError(
                f"the runs have rows of different steps ({both}): calibrate with runs from one first step on."
            )
    return ranges(steps[first])


def refuse_other_tables(runs: Mapping[str, Run]) -> dict[str, RecordedTable]:
    """Return the tables, which all runs have in common. Raises UsageError that names the tables in which runs
    differ."""
    tables = {name: {table: run.table(table) for table in run.tables} for name, run in runs.items()}
    first, *others = tables
    for other in others:
        one, two = tables[first], tables[other]
        lacking = {first: two.keys() - one.keys(), other: one.keys() - two.keys()}
        if more := [f"{name} has no {listed(sorted(lacks))}" for name, lacks in lacking.items() if lacks]:
            raise UsageError(
                f"{first} and {other} recorded different tables ({'; '.join(more)}): record all runs with the same "
                "probes."
            )
        for name, table in one.items():
            if (table.columns, table.rows) != (two[name].columns, two[name].rows):
                raise UsageError(
                    f"table {name} of {other} has other places or columns than in {first}: calibrate with runs of one "
                    "model and one version of stabilitylab."
                )
    steps = {name: {table: ranges(run.steps(table).tolist()) for table in tables[first]} for name, run in runs.items()}
    for other in others:
        for table, own in steps[first].items():
            if own != steps[other][table]:
                both = " and ".join(f"{name} at {in_words(steps[name][table])}" for name in (first, other))
                raise UsageError(
                    f"table {table} has rows of different steps ({both}): record all runs with one `every`, and one "
                    "`update_every` and `curvature_every` where you give them."
                )
    return {
        name: RecordedTable(places=len(table.rows), steps=steps[first][name]) for name, table in tables[first].items()
    }
