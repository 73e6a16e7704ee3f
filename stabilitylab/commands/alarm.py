"""``alarm``: the alerts on a run that has ended or goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._options import VERBOSE
from .base import command

if TYPE_CHECKING:
    from ..alarm import Alarm


def silence(ear: Alarm) -> str:
    """Say what an absence of alarms means: the rules, the number of rows, and the tables that were not recorded."""
    from ..alarm.past import LEAST

    early = min(LEAST, ear.rows)
    told = f"no alarm by the {ear.name} rules in {ear.rows} rows, the first {early} of which nothing is compared with"
    if ear.lacking:
        told += f"; not recorded, and so not heard: {', '.join(ear.lacking)}"
    return f"{told}. Silence is no sign of health: docs/alarm.md has how many failures each set announces."


@command("alarm", rank=95)
def alarm(
    run: Annotated[Path, typer.Argument(help="Run directory, of 'probe' or of watch().", show_default=False)],
    follow: Annotated[bool, typer.Option("--follow", help="Go on until nobody writes to the run any more.")] = False,
    rules: Annotated[
        str | None, typer.Option(help="conservative (the default), or combination.", metavar="NAME", show_default=False)
    ] = None,
    mute: Annotated[
        list[str] | None, typer.Option(help="A rule that says nothing; several times for several.", metavar="RULE")
    ] = None,
    refractory: Annotated[int, typer.Option(min=1, help="Rows in which a rule that spoke says nothing.")] = 50,
    fail: Annotated[bool, typer.Option("--fail", help="Exit 1 if there was an alarm.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line, one an alarm.")] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> int:
    """Say which rows of a run announced a failure: what, where, since when, how sure, what people do about it.

    Reads what the run recorded, one row after the other, as the alarm of watch(alarm=True) would have. Each says its
    error rates, which hold for runs with a row of every update (--every 1); docs/alarm.md has the tables. The
    conservative rules speak of what is gross: they announced none of 97 failures. The combination announced 71 % of
    them, at 0.8 false alarms in 1,000 healthy rows. Exit 0 whatever it says.
    """
    import logging

    from ..alarm import Alarm
    from ..alarm.reading import listen
    from ..store import Run
    from ..store.layout import plain

    opened = Run.open(run)
    ear = Alarm(rules, mute=mute or (), refractory=refractory)
    logging.getLogger("stabilitylab.alarm").setLevel(
        logging.ERROR
    )  # an alarm's line of the log is this command's output
    for alert in listen(opened, ear, follow=follow):
        print(json.dumps(plain(alert.as_dict())) if as_json else alert.sentence, flush=True)
    if not ear.alerts and not as_json:
        print(f"{opened.path.name}: {silence(ear)}", file=sys.stderr)
    return int(fail and bool(ear.alerts))
