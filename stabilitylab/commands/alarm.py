"""``alarm``: the alerts on a run that has ended or still goes on, and the calibration of thresholds by healthy runs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..printable import screen
from ._options import VERBOSE
from .base import command

if TYPE_CHECKING:
    from ..alarm import Alarm, Calibration
    from ..store import Run

REFRACTORY = 50


def silence(ear: Alarm) -> str:
    """Say what it means that there was no alarm: the rules, the number of rows, and the tables that are lacking."""
    from ..alarm.past import LEAST

    early = min(LEAST, ear.rows)
    told = f"no alarm by the {ear.name} rules in {ear.rows} rows; the first {early} rows have too little past to judge"
    if ear.lacking:
        told += f"; the rules also read tables that this run did not record: {', '.join(ear.lacking)}"
    if ear.calibration is not None:
        return f"{told}. No alarm is no sign of health: {ear.name} limits false alarms, and may miss a failure."
    return f"{told}. No alarm is no sign of health: docs/alarm.md says how many events each set of rules announces."


@command("alarm", rank=95)
def alarm(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="Run directory, of 'probe' or of watch(); with --calibrate the healthy runs.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Read new rows until no process writes the run.")] = False,
    rules: Annotated[
        str | None,
        typer.Option(
            help="The set of rules: default, loud (used by --calibrate), or a file that --calibrate wrote.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    mute: Annotated[
        list[str] | None, typer.Option(help="Raise no alarm by this rule; repeatable.", metavar="RULE")
    ] = None,
    refractory: Annotated[
        int | None,
        typer.Option(min=1, help=f"Rows after an alarm in which its rule is silent; {REFRACTORY} by default."),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Make thresholds from healthy runs of one recipe and one length.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="With --calibrate: the new file, such as mine.json.", metavar="FILE", show_default=False),
    ] = None,
    fail: Annotated[bool, typer.Option("--fail", help="Exit 1 if there was an alarm.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each alarm.")] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> int:
    """Replay a run and list the steps at which an alarm would fire: what, where, since when, how sure, what people do.

    The command reads the recorded rows in their order, as the alarm of watch(alarm=True) would have done. Each alert
    says how often its rule is wrong; this holds for runs with a row of every update (--every 1). On new runs of small
    Transformers the default rule accused 11 of 234 healthy runs and announced 63 % of 115 events; the loud rule accused
    38 of 234 healthy runs and announced 76 %. One goal was missed: the alarm and diagnose together accused 7 % of the
    healthy runs, and the goal was at most 5 %. docs/alarm.md has the tables. Exit 0 whatever it finds; with --fail,
    exit 1 if there was an alarm.

    With --calibrate RUN... --out mine.json your own healthy runs, of one recipe and one length, give the thresholds:
    with k runs, at most 1 in k + 1 new healthy runs of the recipe has a false alarm. watch(alarm="mine.json") and
    --rules mine.json use these thresholds. Exit 2 if the runs differ in length or tables, if one was not healthy, or if
    RUN is not like the runs that calibrated --rules; exit 4 if a file cannot be read.
    """
    from ..errors import UsageError

    logging.getLogger("stabilitylab.alarm").setLevel(logging.ERROR)  # this command prints the alerts itself
    given = list(runs or ())
    if calibrate:
        unused = {"--follow": follow, "--mute": mute, "--refractory": refractory, "--fail": fail}
        if wrong := [name for name, value in unused.items() if value]:
            raise UsageError(f"{wrong[0]} is for reading a run, not for --calibrate: leave one of the two out.")
        if out is None:
            raise UsageError("--calibrate needs --out FILE, such as --out mine.json.")
        return _calibrate(given, rules, out, as_json)
    if out is not None:
        raise UsageError("--out is the file that --calibrate writes: add --calibrate, or leave --out out.")
    if len(given) != 1:
        raise UsageError(f"give one run, not {len(given)}: only --calibrate takes several.")
    return _read(given[0], rules, mute or (), refractory or REFRACTORY, follow, fail, as_json)


def _read(
    run: Path, rules: str | None, mute: Sequence[str], refractory: int, follow: bool, fail: bool, as_json: bool
) -> int:
    """Print the alerts on a run."""
    from ..alarm import Alarm
    from ..alarm.reading import listen
    from ..store import Run
    from ..store.documents import plain

    opened = Run.open(run)
    ear = Alarm(rules, mute=mute, refractory=refractory)
    for line in () if ear.calibration is None else ear.calibration.other_settings(opened.manifest):
        print(f"warning: {line}. Healthy runs of another recipe calibrated the alarm.", file=sys.stderr)
    for alert in listen(opened, ear, follow=follow):
        print(json.dumps(plain(alert.as_dict())) if as_json else alert.sentence, flush=True)
    if not ear.alerts and not as_json:
        print(f"{opened.path.name}: {silence(ear)}", file=sys.stderr)
    return int(fail and bool(ear.alerts))


def _calibrate(given: Sequence[Path], rules: str | None, out: Path, as_json: bool) -> int:
    """Calibrate an alarm with healthy runs, write its file and print its bound."""
    from ..alarm import calibrate
    from ..alarm.calibration import refuse_file
    from ..alarm.rules import LOUD
    from ..store import Run
    from ..store.documents import plain

    refuse_file(out)
    opened = [Run.open(run) for run in given]
    found = calibrate(opened, rules or LOUD)
    doubts = _doubts(opened)
    found.save(out)
    if as_json:
        print(json.dumps(plain({**found.document(), "file": str(out), "doubts": doubts})))
    else:
        _show(found, doubts, out)
    return 0


def _doubts(runs: Sequence[Run]) -> list[str]:
    """Return the warnings of ``diagnose`` about the runs, a line each. Raises UsageError for a run that failed."""
    from ..diagnose import diagnose
    from ..errors import UsageError

    found = []
    for run in runs:
        diagnosis = diagnose(run)
        events = [event for event in diagnosis.events if event.severity == diagnosis.verdict]
        if diagnosis.verdict == "failure":
            raise UsageError(f"{run.name} failed ({events[0].sentence.rstrip('.')}): calibrate with healthy runs.")
        if diagnosis.verdict == "warning":
            found.append(f"diagnose warns of {events[0].title} in {run.name} at step {events[0].step}")
    return found


def _show(found: Calibration, doubts: Sequence[str], out: Path) -> None:
    from ..alarm.recipe import in_lines

    say = screen(piped=10_000).print
    say(f"{found.sentence[0].upper()}{found.sentence[1:]}.")
    for rule in found.rules:
        own = "" if found.left_out else f" (before the calibration: {rule.own_threshold:.3g})"
        say(f"  {rule.name}: threshold {rule.threshold:.3g}{own}")
    for run in found.runs:
        told = ", ".join(f"{name} {value:.3g}" for name, value in run.scores.items() if value is not None)
        say(f"  {run.name}: largest score {told}")
    if found.left_out:
        lacking = ", ".join(f"{name} ({need})" for name, need in found.left_out.items())
        say(f"Left out, since the runs do not record it: {lacking}.")
    for line in [*in_lines(found.differing), *doubts]:
        say(f"Warning: {line}.")
    if doubts:
        say("Leave a run out for what happened in it, never for its score.")
    if found.differing:
        say("The bound is for runs of one recipe, which differ in their seed alone.")
    say(f'{out}: use it with watch(alarm="{out}"), or stabilitylab alarm RUN --rules {out}.')
