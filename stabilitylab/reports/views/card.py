"""A run in a few lines of HTML, as notebooks show it: :meth:`stabilitylab.store.Run._repr_html_`."""

from __future__ import annotations

from html import escape

from ...diagnose.events import as_sentence
from ...store import Run
from ...store.views import VIEWS
from ..collection import Record
from ..page.backticks import with_code
from ..page.sparks import HEIGHT, WIDTH, spark

TIMES = 3  # the line of the loss is so many times as large as in a table
RED = "#d7191c"


@VIEWS.register("card")
def card(run: Run) -> str:
    """Return the status, the model, the last loss, the first sign of trouble with its remedy, and the loss as a small
    line, in HTML that needs neither scripts nor a network."""
    record = Record(run.snapshot(), run.name)
    status = record.status
    width = f"{record.width} wide" if record.width else ""
    model = ", ".join(filter(None, (record.label, record.layers_text, width)))
    state = f"{status.state} at step {status.step}" + (f" ({status.reason})" if status.reason else "")
    line = spark(record)
    rows = {"status": state, "verdict": record.verdict, "model": model}
    rows |= {"last loss": line["last"] if line else "not recorded", "first sign": _first_sign(record)}
    cells = "".join(
        f'<tr><th style="text-align:left">{key}</th><td style="text-align:left">{with_code(text)}</td></tr>'
        for key, text in rows.items()
        if text
    )
    return f"<div><b>{escape(record.name)}</b>{_picture(line) if line else ''}<table>{cells}</table></div>"


def _first_sign(record: Record) -> str:
    """Return the event that came first and what to do, or that there is none."""
    if record.kind == "onestep":
        return ""
    found = record.diagnosis
    if found is None:
        return record.undiagnosed or "nothing is recorded yet that can be checked"
    if found.cause.first is None:
        return "none of the checked kinds of trouble" if found.checked else "nothing was recorded that can be checked"
    first = found.cause.first
    return " ".join((f"{first.title} at step {first.step}: {as_sentence(first.evidence)}", *found.remedies))


def _picture(line: dict[str, object]) -> str:
    """Return the line of the loss, with a red cross where a number was not finite."""
    lost = line["lost"]
    cross = ""
    if isinstance(lost, dict):
        cross = f'<path d="M{lost["x"] - 3.5} {lost["y"] - 3.5}l7 7m0-7l-7 7" stroke="{RED}" fill="none"/>'
    size = f'width="{TIMES * WIDTH}" height="{TIMES * HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    path = f'<path d="{line["path"]}" stroke="currentColor" fill="none"/>'
    told = escape(str(line["told"]))
    return f'<br><svg {size} role="img" aria-label="{told}"><title>{told}</title>{path}{cross}</svg>'
