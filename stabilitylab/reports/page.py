"""The page: everything of a report in one HTML file that opens without a network."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from ..store.files import replace_file
from . import screen, style
from .base import Picture
from .claims import Finding
from .collection import LAYERS, Record, Runs, spans
from .pooling import COLUMNS

LISTED = 200  # rows of a plot's table; the CSV has all
MOST_BYTES = 7_900_000  # of the page, plotly's 4.8 MB included
DETAIL = (COLUMNS, 300, 150, 75)  # columns of heat maps: the first with which the page is small enough
MARK = (150, 16)  # pixels of an interval's mark
DECADES = 1.3  # that an interval and its limits span before its mark is logarithmic
VERDICTS = ("reproduced", "contradicted", "inconclusive", "not testable")


@dataclass(frozen=True)
class Section:
    """A figure on the page, and the files of it that stand beside the page."""

    id: str
    title: str
    source: str
    picture: Picture
    files: dict[str, str]
    group: Literal["figures", "runs"] = "figures"

    @property
    def anchor(self) -> str:
        return anchor(self.id)


def anchor(id: str) -> str:
    """``id`` as the name of a place on the page: unlike ids have unlike names, and none that the page itself uses."""
    letters = ("-" if letter == ":" else letter if letter.isalnum() else f"_{ord(letter):x}_" for letter in id)
    return "f-" + "".join(letters)


def write(
    folder: Path,
    *,
    title: str,
    sections: Sequence[Section],
    findings: Sequence[Finding],
    runs: Runs,
    broken: Sequence[tuple[Path, str]],
    missing: Sequence[tuple[str, str, str, str]],
) -> Path:
    """Write ``folder/index.html``; ``missing``: (id, title, why, command) of figures that could not be made."""
    shown = {section.id for section in sections}
    diagnosed = {section.title: section.anchor for section in sections if section.group == "runs"}
    facts = {
        "title": title,
        "sections": [_described(section, findings) for section in sections],
        "missing": [{"id": id, "title": name, "why": why, "command": how} for id, name, why, how in missing],
        "findings": [_claim(finding, shown) for finding in findings],
        "experiments": _experiments(runs),
        "runs": [_row(record) | {"anchor": diagnosed.get(record.name, "")} for record in runs],
        "broken": [{"name": path.name, "why": why} for path, why in broken],
        "states": _counted(record.status.state for record in runs),
        "outcomes": _counted(record.verdict for record in runs if record.verdict),
        "verdicts": [(verdict, sum(f.verdict == verdict for f in findings)) for verdict in VERDICTS],
        "papers": _counted(finding.claim.paper for finding in findings),
        "ledgers": [name for name in ("claims.csv", "claims.json") if (folder / name).exists()],
        "mark": MARK,
    }
    for columns in DETAIL:
        drawn = {section.anchor: screen.plots(section.picture, columns) for section in sections}
        content = _render(facts | {"plots": _embedded(drawn), "columns": columns})
        if len(content) <= MOST_BYTES:
            break
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    replace_file(path, content)
    return path


def _render(facts: dict[str, Any]) -> bytes:
    from plotly.offline import get_plotlyjs

    loader = jinja2.PackageLoader("stabilitylab.reports")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    own = {name: Markup(loader.get_source(environment, f"page.{name}")[0]) for name in ("css", "js")}
    plotly = Markup(get_plotlyjs().replace("</script", "<\\/script").replace("<!--", "<\\!--"))
    return environment.get_template("page.html").render(facts | own | {"plotly": plotly}).encode()


def _embedded(data: Any) -> Markup:
    """JSON that no text in it can end the script element of."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))


def _counted(words: Iterable[str]) -> list[tuple[str, int]]:
    listed = sorted(words)
    return [(word, listed.count(word)) for word in dict.fromkeys(listed)]


def _described(section: Section, findings: Sequence[Finding]) -> dict[str, Any]:
    picture = section.picture
    frame = picture.frame()
    text = frame.head(LISTED).map(_cell)
    return {
        "id": section.id,
        "anchor": section.anchor,
        "title": section.title,
        "source": section.source,
        "group": section.group,
        "finding": picture.finding,
        "notes": picture.notes,
        "files": [(kind, quote(path)) for kind, path in section.files.items() if "column" not in kind],
        "still": quote(section.files.get("png", "")),
        "panels": [{"title": panel.title, "dashes": screen.dashes(panel)} for panel in picture.panels],
        "columns": picture.columns,
        "toggles": screen.toggles(picture),
        "head": list(text.columns),
        "rows": text.to_numpy().tolist(),
        "more": len(frame) - LISTED,
        "claims": [
            (finding.claim.id, finding.claim.sentence, finding.verdict)
            for finding in findings
            if finding.claim.figure == section.id
        ],
    }


def _cell(value: Any) -> str:
    if value is None or value != value:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _claim(finding: Finding, shown: set[str]) -> dict[str, Any]:
    entry = finding.claim
    return {
        **{key: value for key, value in vars(entry).items() if key != "measure"},
        "verdict": finding.verdict,
        "why": finding.why,
        "command": finding.command,
        "anchor": anchor(entry.figure) if entry.figure in shown else "",
        "effects": [{**effect, "text": _interval(effect), "mark": mark(effect)} for effect in finding.effects],
    }


def _interval(effect: dict[str, Any]) -> str:
    if math.isnan(effect["mean"]):
        return "not measured"
    bounds = "" if math.isnan(effect["low"]) else f" [{effect['low']:.3g}, {effect['high']:.3g}]"
    return f"{effect['mean']:.3g}{bounds}"


def mark(effect: dict[str, Any]) -> dict[str, Any] | None:
    """Where an interval stands among its regions, in pixels: low, mean, high, and (kind, left, width) of R and X.

    Logarithmic where all is positive and far apart; None where no number is finite.
    """
    regions = {kind: ends(effect[kind]) for kind in ("reproduced", "contradicted")}
    own = {key: effect[key] for key in ("low", "mean", "high") if math.isfinite(effect[key])}
    if not own:
        return None
    limits = [end for pair in regions.values() if pair for end in pair if math.isfinite(end)]
    everything = [*own.values(), *limits]
    log = min(everything) > 0 and math.log10(max(everything) / min(everything)) > DECADES
    least, most = (math.log(end) if log else end for end in (min(everything), max(everything)))
    span = (most - least) or max(abs(most), 1.0)
    inside = MARK[0] - 24

    def place(value: float) -> float:
        if log:
            value = math.log(value) if value > 0 else -math.inf
        return round(min(max(12 + (value - least) / span * inside, 0.0), float(MARK[0])), 1)

    bars = [(kind, place(pair[0]), place(pair[1])) for kind, pair in regions.items() if pair]
    middle = own.get("mean", own.get("low", own.get("high", 0.0)))
    return {
        "low": place(own.get("low", middle)),
        "mean": place(middle),
        "high": place(own.get("high", middle)),
        "regions": [(kind, left, round(right - left, 1)) for kind, left, right in bars],
    }


def ends(region: str) -> tuple[float, float] | None:
    """The ends of a region as it is printed: ``< 2``, ``> 0.1``, ``in (0, 1)``; None for no region."""
    kind, _, rest = region.partition(" ")
    if kind == "in":
        low, _, high = rest.strip("()").partition(", ")
        return float(low), float(high)
    return {"<": (-math.inf, float(rest)), ">": (float(rest), math.inf)}.get(kind) if rest else None


def _experiments(runs: Runs) -> list[dict[str, Any]]:
    """What was run: a row for all runs that differ in nothing but architecture, depth, seed and the data's share."""
    groups: dict[str, list[Record]] = {}
    for group in runs.groups(*LAYERS):
        common = group.describe() if any(record.settings for record in group) else group[0].kind
        groups.setdefault(common, []).extend(group)
    return [
        {
            "common": common,
            "runs": len(members),
            "labels": [style.title(label) for label in Runs(members).labels],
            "depths": spans(sorted({record.depth for record in members} - {0})),
            "states": _counted(record.verdict or record.status.state for record in members),
        }
        for common, members in groups.items()
    ]


def _row(record: Record) -> dict[str, Any]:
    status = record.status
    verdict = status.facts.get("verdict") or {}
    gap = verdict.get("nll_gap")
    return {
        "name": record.name,
        "label": style.title(record.label),
        "kind": {"onestep": "one step", "train": "training"}.get(record.kind, record.kind),
        "layers": "+".join(str(n) for n in record.layers if n) or "-",
        "depth": sum(record.layers),
        "seed": record.seed,
        "step": status.step,
        "state": status.state,
        "verdict": record.verdict,
        "gap": "" if gap is None else f"{float(gap):+.3f}",
        "reason": verdict.get("reason") or status.reason,
    }
