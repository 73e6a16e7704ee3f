"""The page: everything of a report in one HTML file that opens without a network."""

from __future__ import annotations

import base64
import json
import math
import shlex
import time
import zlib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import jinja2
from markupsafe import Markup

from ...store.files import replace_file
from .. import style
from ..claims import VERDICTS, Finding, Kind, Outcome
from ..collection import Record, Runs, spans
from ..conditions import differing
from ..headline import tallies
from ..intervals import interval, mark
from ..pooling import COLUMNS
from .backticks import with_code
from .overview import Overview, facts, track
from .sections import ALL_LISTED, LISTED, Group, PageSection, anchor, described
from .sentences import trouble
from .sparks import spark

ROOM = 1_200_000  # bytes of embedded data: with plotly's 2 MB and the text the page of three runs stays below 3.5 MB
NARROWEST = 40  # columns of a heat map, however many maps there are
__all__ = ["Group", "PageSection", "anchor", "write"]
PAPERS = ("BranchNorm", "DeepNet", "Admin")
SHOWN = 4  # descriptive effects of a claim that stand open
UNTESTABLE: Outcome = "not testable"
LEDGER = {"CSV": "claims.csv", "JSON": "claims.json"}  # linked if they stand beside the page


# The page's scripts, in the order in which they need each other.
SCRIPTS = (
    *("unpack.js", "shared.js", "state.js", "runs.js", "model.js", "axes.js", "traces.js", "plots.js", "cursor.js"),
    *("maps.js", "compare.js", "page.js", "tables.js", "live.js"),
)


def write(
    folder: Path,
    *,
    title: str,
    sections: Sequence[PageSection],
    findings: Sequence[Finding],
    runs: Runs,
    broken: Sequence[tuple[Path, str]],
    missing: Sequence[tuple[str, str, str, str]],
    failed: Sequence[tuple[str, str, str]] = (),
    view: Overview | None = None,
    live: float | None = None,
) -> Path:
    """Write ``folder/index.html``. ``missing``: (id, title, why, command) of figures that lack runs; ``failed``: (id,
    title, why) of figures that an error stopped; ``live``: seconds after which the page is written again, so that it
    has only what an unfinished run can show."""
    view = view or Overview()
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("stabilitylab.reports.page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["code"] = with_code
    environment.filters["quoted"] = shlex.quote
    listed = max(20, min(LISTED, ALL_LISTED // max(len(sections), 1)))
    parts = [described(section, findings, listed) for section in sections]
    anchors = {section.id.partition(":")[2]: section.anchor for section in sections if section.group == "runs"}
    curves = PageSection("curves", "Curves of all runs", "", view.curves, {}, group="curves") if view.curves else None
    drawn = [*sections, *([curves] if curves else [])]
    claims = [_claim(finding, {section.id for section in sections}) for finding in findings]
    text = environment.get_template("page.html").render(
        title=title,
        what=_what(runs),
        **_top(view, anchors),
        curves=described(curves, (), 0) if curves else None,
        mapped=any(panel.map and panel.map.origin for one in sections for panel in one.picture.panels),
        figures=[one for one in parts if one["group"] == "figures"],
        diagnoses=[one for one in parts if one["group"] == "runs"],
        missing=[{"id": id, "title": name, "why": why, "command": how} for id, name, why, how in missing],
        failed=[{"id": id, "title": name, "why": why} for id, name, why in failed],
        judged=[claim for claim in claims if claim["verdict"] != UNTESTABLE],
        untestable=[claim for claim in claims if claim["verdict"] == UNTESTABLE],
        ledger_files={kind: name for kind, name in LEDGER.items() if (folder / name).exists()},
        empty=_empty([_row(record, anchors) for record in runs]),
        all_runs=[_row(record, anchors) for record in _ordered(runs, view)],
        many=len(runs) > 1,
        broken=[{"name": path.name, "why": why} for path, why in broken],
        verdicts=[(v, sum(f.verdict == v for f in findings)) for v in VERDICTS if v != UNTESTABLE],
        kinds=[kind for kind in get_args(Kind) if any(f.claim.kind == kind for f in findings)],
        tallies=tallies(findings),
        papers=list(dict.fromkeys([*PAPERS, *(finding.claim.paper for finding in findings)])),
        live=None if live is None else f"{live:g}",
        at=time.strftime("%H:%M:%S"),
        plots=_fitting(drawn),
        facts=_json(facts(view, anchors)),
        plotly=_plotly(),
        scripts=SCRIPTS,
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    replace_file(path, text.encode())
    return path


def _ordered(runs: Runs, view: Overview) -> list[Record]:
    """Order runs as the page's top has them: those that most need a look first."""
    place = {name: number for number, name in enumerate(view.order)}
    return sorted(runs, key=lambda record: place.get(record.name, len(place)))


def _top(view: Overview, anchors: dict[str, str]) -> dict[str, Any]:
    """The sentences and time lines at the top of the page."""
    happened = [
        {"name": one.record.name, "events": [track(event, view.last) for event in one.events]}
        for one in view.told
        if one.events
    ]
    told = [
        {
            "name": one.record.name,
            "sentence": one.sentence,
            "state": one.record.standing,
            "mapped": one.record.name in anchors,
            "first": {"step": one.first[0].step, "titles": list(dict.fromkeys(event.title for event in one.first))}
            if one.first
            else None,
            "remedies": one.remedies,
            "unknown": one.unknown,
        }
        for one in view.told
    ]
    count = sum(len(one["events"]) for one in happened)
    return {"told": told, "untold": view.untold, "happened": happened, "last": view.last, "count": count}


@cache
def _plotly() -> Markup:
    """Plotly, deflated (zlib) and in base 64: two of five megabytes."""
    from plotly.offline import get_plotlyjs

    return Markup(base64.b64encode(zlib.compress(get_plotlyjs().encode(), 9)).decode())


def _json(facts: Any) -> Markup:
    """Write JSON in which no text can end the script element."""
    return Markup(json.dumps(facts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def _fitting(sections: Sequence[PageSection]) -> Markup:
    """The data of all plots as JSON; if they are large, the maps have fewer columns, so that the page stays small."""
    columns = COLUMNS
    while True:
        data = [(one.anchor, one.plots if columns == COLUMNS else one.pooled(columns)) for one in sections]
        text = f"{{{','.join(f'{json.dumps(name)}:{plots}' for name, plots in data)}}}".replace("<", "\\u003c")
        if len(text) <= ROOM or columns <= NARROWEST:
            return Markup(text)
        columns = max(NARROWEST, min(columns * 2 // 3, int(columns * ROOM / len(text))))


def _claim(finding: Finding, shown: set[str]) -> dict[str, Any]:
    entry = finding.claim
    return {
        **{key: value for key, value in vars(entry).items() if key != "measure"},
        "verdict": finding.verdict,
        "why": finding.why,
        "command": finding.command,
        "survives": finding.survives,
        "holm": finding.holm,
        "anchor": anchor(entry.figure) if entry.figure in shown else "",
        "effects": [_effect(effect, finding.effects[0]) for effect in finding.effects],
        "open": len(finding.effects) <= 1 + SHOWN,
    }


def _effect(effect: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """Add an effect's words and mark, and the conditions and limits in which it differs from the first effect."""
    said = [effect[key] if effect is first else differing(effect[key], first[key]) for key in ("conditions", "limits")]
    return {**effect, "text": interval(effect), "mark": mark(effect), "said": [words for words in said if words]}


def _what(runs: Runs) -> list[tuple[str, str]]:
    """Describe the runs as pairs of term and description."""
    if not runs:
        return []
    trained = runs.where(lambda record: record.kind != "onestep")
    counted = [f"{len(trained)} training: {_counted(record.standing for record in trained)}"]
    single = len(runs) - len(trained)
    counted = (counted if len(trained) else []) + ([f"{single} of one step from initialisation"] if single else [])
    words = [
        ("Runs", "; ".join(counted)),
        ("Architectures", ", ".join(style.title(label) for label in runs.labels)),
        (_sides(runs), ", ".join(str(depth) for depth in runs.depths if depth)),
        ("Width", ", ".join(map(str, sorted({record.width for record in runs if record.width})))),
        ("Seeds", spans(runs.seeds)),
    ]
    return [(term, description) for term, description in words if description]


def _sides(runs: Runs) -> str:
    """Name the number of layers of runs: of each side of an encoder-decoder, or of a model of one stack."""
    both = {all(record.layers) for record in runs if record.depth}
    return "Layers a stack" if len(both) > 1 else "Layers a side" if True in both else "Layers"


def _counted(words: Iterable[str]) -> str:
    listed = list(words)
    return ", ".join(f"{word} ({listed.count(word)})" for word in sorted(set(listed)))


def _row(record: Record, diagnosed: dict[str, str]) -> dict[str, Any]:
    status = record.status
    verdict = record.judged
    return {
        "name": record.name,
        "anchor": diagnosed.get(record.name, ""),
        "label": style.title(record.label),
        "kind": {"onestep": "one step", "train": "training"}.get(record.kind, record.kind),
        "layers": "+".join(str(n) for n in record.layers if n) or "–",
        "depth": sum(record.layers),
        "seed": "–" if record.seed is None else record.seed,
        "step": status.step,
        "state": status.state,
        "verdict": record.outcome,
        "unjudged": "not diagnosed" if record.ended and record.kind != "onestep" else "–",
        "gap": f"{verdict.nll_gap:+.3f}" if verdict and math.isfinite(verdict.nll_gap) else "",
        "reason": _why(record),
        "spark": spark(record) if record.kind != "onestep" else {},
    }


def _empty(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the columns of the table of runs in which no run has anything, as classes of the table."""
    blank = {"layers": ("–",), "seed": ("–",), "gap": ("",)}
    return [f"no-{name}" for name, nothing in blank.items() if all(row[name] in nothing for row in rows)]


def _why(record: Record) -> str:
    """The evidence of the verdict, or without a verdict that of the trouble that was found to come first."""
    if record.judged:
        return record.judged.reason
    found = trouble(record.found) if record.found else record.undiagnosed or record.lost
    return "; ".join(filter(None, (record.status.reason, found)))
