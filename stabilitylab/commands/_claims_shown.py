"""The ledger of claims, and the power of planned runs, on a terminal of any width."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ..printable import screen

if TYPE_CHECKING:
    from ..reports.claims import Finding
    from ..reports.power import Power

MARKS = {
    "reproduced": "green",
    "contradicted": "red",
    "not reproduced": "magenta",
    "inconclusive": "yellow",
    "not testable": "dim",
}
PIPED = 120  # columns without a terminal


def show(findings: Sequence[Finding], registered: Sequence[Finding]) -> None:
    """Print the ledger, the primary effect of each claim before the descriptive ones. ``registered``: all claims that
    were judged."""
    from ..reports.headline import tallies

    console = screen(piped=PIPED)
    table = Table(box=None, padding=(0, 1, 1, 0), show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in findings:
        table.add_row(_head(finding), Text("\n").join(_body(finding)))
    console.print(table)
    for tally in tallies(findings, registered):
        console.print(str(tally))
    commands = dict.fromkeys(finding.command for finding in findings if finding.command)
    if commands:
        console.print("claims that are not testable need these runs:")
        for one in commands:
            console.print(f"  {one}", soft_wrap=True)


def _head(finding: Finding) -> Text:
    found = Text(finding.claim.id, "bold")
    found.append(f"\n{finding.verdict}", MARKS[finding.verdict])
    if finding.survives is not None:
        found.append("\nsurvives Holm" if finding.survives else "\nnot after Holm", "dim")
    if finding.claim.kind != "published":
        found.append(f"\n{finding.claim.kind}", "dim")
    return found


def _body(finding: Finding) -> Iterable[Text]:
    entry = finding.claim
    yield Text.assemble((entry.sentence.rstrip("."), "bold"), (f" ({entry.source})", "dim"))
    if not finding.effects:
        yield Text(f"{finding.why} [{entry.threshold}]")
        return
    first, *others = finding.effects
    yield Text(_primary(first, finding.holm))
    if said := "; ".join(filter(None, (first["conditions"], first["limits"]))):
        yield Text(said, "dim")
    if others:
        yield Text(f"beside it: {'; '.join(_number(one) + _other_conditions(one, first) for one in others)}", "dim")
    if entry.after:
        yield Text(f"set after a look: {entry.after}", "dim")


def _number(effect: dict[str, Any]) -> str:
    """Return a number with its interval, such as ``ratio 0.59 [0.39, 0.9], n = 3``."""
    if math.isnan(effect["mean"]):
        return f"{effect['effect']}: not measured"
    between = "" if math.isnan(effect["low"]) else f" [{effect['low']:.3g}, {effect['high']:.3g}]"
    return f"{effect['effect']} {effect['mean']:.3g}{between}, n = {effect['n']}"


def _primary(effect: dict[str, Any], holm: float) -> str:
    needed = f" (would need {effect['needed']})" if effect["verdict"] == "inconclusive" and effect["needed"] else ""
    against = f"; X: {effect['contradicted']}" if effect["contradicted"] else ""
    p = "" if math.isnan(effect["p"]) else f"; p = {effect['p']:.2g}"
    p += "" if math.isnan(holm) or not p else f", Holm {holm:.2g}"
    return f"{_number(effect)}{needed}; R: {effect['reproduced']}{against}{p}"


def _other_conditions(effect: dict[str, Any], first: dict[str, Any]) -> str:
    from ..reports.conditions import differing

    said = differing(effect["conditions"], first["conditions"])
    return f" ({said})" if said else ""


def show_power(found: Sequence[Power]) -> None:
    """Print a line for each claim: planned seeds, expected half-width, probability of any judgement, and judgements out
    of reach."""
    console = screen(piped=PIPED)
    table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
    for column in ("claim", "n", "pilot", "half-width", "P(judged)", "P(R)"):
        table.add_column(column, no_wrap=True, justify="left" if column == "claim" else "right")
    table.add_column("primary effect, and judgements out of reach")
    for one in found:
        style = "" if one.reachable and not one.note else "yellow" if one.reachable else "red"
        name = one.pilot.name if one.pilot else ""
        table.add_row(
            one.claim.id, str(one.planned), *_numbers(one), "; ".join(filter(None, (name, one.note))), style=style
        )
    console.print(table)
    lacking = [one for one in found if one.pilot is None]
    cannot = ", ".join(one.claim.id for one in found if not one.reachable)
    reach = f"the planned seeds cannot judge {cannot}" if cannot else "none is known to need more seeds than planned"
    console.print(
        f"\n{len(found) - len(lacking)} of {len(found)} claims have a pilot; {reach}. "
        "P: the probability at the pilot's mean and spread; R: reproduced.",
    )


def _numbers(one: Power) -> list[str]:
    """Return pilot, half-width and both probabilities as text, "" for a number that is not known."""
    log = one.pilot is not None and one.pilot.log
    shown = (
        (one.mean, f"{one.mean:.3g}"),
        (one.half_width, f"x/ {math.exp(one.half_width):.3g}" if log else f"+- {one.half_width:.2g}"),
        (one.decides, f"{one.decides:.2f}"),
        (one.reproduces, f"{one.reproduces:.2f}"),
    )
    return ["" if math.isnan(value) else text for value, text in shown]
