"""``alarm``: what the alarm says of a run, ended or going on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import command
from ._options import JSON, VERBOSE


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
    as_json: Annotated[bool, JSON] = False,
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
    logging.getLogger("stabilitylab").setLevel(logging.ERROR)  # an alarm's line of the log is this command's output
    for alert in listen(opened, ear, follow=follow):
        print(json.dumps(plain(alert.as_dict())) if as_json else alert.sentence, flush=True)
    if not ear.alerts and not as_json:
        print(f"{opened.path.name}: no alarm in {ear.rows} rows.", file=sys.stderr)
    return int(fail and bool(ear.alerts))
