"""The page: everything of a report in one HTML file that opens without a network."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
from markupsafe import Markup

from ..store.files import replace_file
from . import screen, style
from .base import Picture
from .claims import Finding
from .collection import Record, Runs

LISTED = 200  # rows of a plot's table; the CSV has all
MARK = (132, 16)  # width and height of an interval's mark
PAPERS = ("BranchNorm", "DeepNet", "Admin")
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
    """``id`` as the name of a place on the page."""
    return "".join(letter if letter.isalnum() else f"-{ord(letter):x}-" if letter != ":" else "-" for letter in id)


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
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("stabilitylab.reports"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    shown = {section.id for section in sections}
    text = environment.get_template("page.html").render(
        title=title,
        sections=[_described(section, findings) for section in sections],
        missing=[{"id": id, "title": name, "why": why, "command": how} for id, name, why, how in missing],
        findings=[_claim(finding, shown) for finding in findings],
        runs=[_row(record) for record in runs],
        broken=[{"name": path.name, "why": why} for path, why in broken],
        states=_counted(record.verdict or record.status.state for record in runs),
        verdicts=[(verdict, sum(f.verdict == verdict for f in findings)) for verdict in VERDICTS],
        papers=PAPERS,
        plots=_embedded({section.anchor: screen.plots(section.picture) for section in sections}),
        plotly=Markup(get_plotlyjs().replace("</script", "<\\/script")),
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    replace_file(path, text.encode())
    return path


def _embedded(data: Any) -> Markup:
    """JSON that no text in it can end the script element of."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))


def _counted(words: Any) -> list[tuple[str, int]]:
    listed = list(words)
    return [(word, listed.count(word)) for word in dict.fromkeys(sorted(listed))]


def _described(section: Section, findings: Sequence[Finding]) -> dict[str, Any]:
    frame = section.picture.frame().head(LISTED)
    text = frame.map(lambda x: "" if x is None or x != x else f"{x:.5g}" if isinstance(x, float) else str(x))
    return {
        "id": section.id,
        "anchor": section.anchor,
        "title": section.title,
        "source": section.source,
        "group": section.group,
        "finding": section.picture.finding,
        "notes": section.picture.notes,
        "files": [(kind, path) for kind, path in section.files.items() if "column" not in kind],
        "panels": [panel.title for panel in section.picture.panels],
        "columns": section.picture.columns,
        "keys": _keys(section.picture),
        "head": list(text.columns),
        "rows": text.to_numpy().tolist(),
        "cut": len(section.picture.frame()) > LISTED,
        "claims": [finding.claim.id for finding in findings if finding.claim.figure == section.id],
    }


def _keys(picture: Picture) -> list[dict[str, str]]:
    """The toggles of a figure, in the order of its legend, each with the colour that it stands for."""
    found: dict[str, str] = {}
    for panel in picture.panels:
        for one in panel.series:
            found.setdefault(screen.key(one), one.colour or style.style(one.arch or one.label).colour)
    return [{"name": name, "colour": colour} for name, colour in found.items()]


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
    """Where an interval stands among its thresholds, in pixels: low, mean, high, and the limits of R and X."""
    limits = [(kind, float(word)) for kind in ("reproduced", "contradicted") for word in _numbers(effect[kind])]
    ends = [effect[key] for key in ("low", "mean", "high") if math.isfinite(effect[key])]
    if not ends:
        return None
    everything = [*ends, *(value for _, value in limits)]
    low, high = min(everything), max(everything)
    span = (high - low) or max(abs(high), 1.0)
    width = MARK[0] - 16

    def place(value: float) -> float:
        return round(8 + (value - low) / span * width, 1)

    return {
        "low": place(min(ends)),
        "high": place(max(ends)),
        "mean": place(effect["mean"]),
        "limits": [(kind, place(value)) for kind, value in limits],
    }


def _numbers(region: str) -> list[str]:
    return [word for word in region.replace("(", " ").replace(")", " ").replace(",", " ").split() if _is_number(word)]


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


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
        "verdict": record.verdict or "-",
        "gap": "" if gap is None else f"{float(gap):+.3f}",
        "reason": verdict.get("reason") or status.reason,
    }
