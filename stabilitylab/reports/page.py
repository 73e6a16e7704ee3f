"""The page: everything of a report in one HTML file that opens without a network."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import quote

import jinja2
import pandas as pd
from markupsafe import Markup

from ..store.files import replace_file
from . import screen, style
from .base import Panel, Picture
from .claims import VERDICTS, Finding, Kind
from .collection import Record, Runs, spans
from .conditions import differing
from .headline import tallies
from .intervals import interval, mark
from .pooling import COLUMNS

LISTED, ALL_LISTED = 200, 4000  # rows of one figure's table, and of all of them; the CSV has every row
ROOM = 2_200_000  # bytes of embedded data: with plotly's 4.8 MB and the text the page stays below 8 MB
NARROWEST = 40  # columns of a heat map, however many maps there are
PAPERS = ("BranchNorm", "DeepNet", "Admin")
SHOWN = 4  # descriptive effects of a claim that stand open
LEDGER = {"CSV": "claims.csv", "JSON": "claims.json"}  # offered where they stand beside the page


Group = Literal["figures", "runs"]


@dataclass(frozen=True)
class PageSection:
    """A figure on the page, and the files of it that stand beside the page: kind (csv, pdf, ...) -> relative path."""

    id: str
    title: str
    source: str
    picture: Picture
    files: dict[str, str]
    group: Group = "figures"

    @property
    def anchor(self) -> str:
        return anchor(self.id)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """Exactly what is drawn, one row a point."""
        return self.picture.frame()

    @cached_property
    def plots(self) -> str:
        """The data of its plots, as JSON."""
        return self.pooled(COLUMNS)

    def pooled(self, columns: int) -> str:
        """The same with maps of at most so many columns."""
        return json.dumps(screen.plots(self.picture, columns), separators=(",", ":"), allow_nan=False)

    def check(self) -> None:
        """Raises now what would end the page later; what it takes is kept."""
        "".join((self.picture.finding, *self.picture.notes))  # text
        self.plots  # noqa: B018
        _described(self, (), LISTED)


def anchor(id: str) -> str:
    """``id`` as the name of a place on the page."""
    return "".join(letter if letter.isalnum() else f"-{ord(letter):x}-" if letter != ":" else "-" for letter in id)


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
) -> Path:
    """Write ``folder/index.html``; ``missing``: (id, title, why, command) of figures that could not be made;
    ``failed``: (id, title, why) of what an error kept from being made."""
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("stabilitylab.reports"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    listed = max(20, min(LISTED, ALL_LISTED // max(len(sections), 1)))
    described = [_described(section, findings, listed) for section in sections]
    diagnosed = {section.id.partition(":")[2]: section.anchor for section in sections if section.group == "runs"}
    text = environment.get_template("page.html").render(
        title=title,
        what=_what(runs),
        figures=[one for one in described if one["group"] == "figures"],
        diagnoses=[one for one in described if one["group"] == "runs"],
        missing=[{"id": id, "title": name, "why": why, "command": how} for id, name, why, how in missing],
        failed=[{"id": id, "title": name, "why": why} for id, name, why in failed],
        findings=[_claim(finding, {section.id for section in sections}) for finding in findings],
        ledger_files={kind: name for kind, name in LEDGER.items() if (folder / name).exists()},
        all_runs=[_row(record, diagnosed) for record in runs],
        broken=[{"name": path.name, "why": why} for path, why in broken],
        verdicts=[(verdict, sum(f.verdict == verdict for f in findings)) for verdict in VERDICTS],
        kinds=[kind for kind in get_args(Kind) if any(f.claim.kind == kind for f in findings)],
        tallies=tallies(findings),
        papers=list(dict.fromkeys([*PAPERS, *(finding.claim.paper for finding in findings)])),
        plots=_fitting(sections),
        plotly=Markup(get_plotlyjs().replace("</script", "<\\/script")),
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    replace_file(path, text.encode())
    return path


def _fitting(sections: Sequence[PageSection]) -> Markup:
    """The data of all plots as JSON in which no text can end its script element; where many runs have many maps, with
    fewer columns each, so that the page stays small."""
    columns = COLUMNS
    while True:
        data = [(one.anchor, one.plots if columns == COLUMNS else one.pooled(columns)) for one in sections]
        text = f"{{{','.join(f'{json.dumps(name)}:{plots}' for name, plots in data)}}}".replace("<", "\\u003c")
        if len(text) <= ROOM or columns <= NARROWEST:
            return Markup(text)
        columns = max(NARROWEST, min(columns * 2 // 3, int(columns * ROOM / len(text))))


def _described(section: PageSection, findings: Sequence[Finding], listed: int) -> dict[str, Any]:
    frame = section.frame
    shown = frame.head(listed).dropna(axis="columns", how="all")
    text = shown.map(lambda x: "" if x is None or x != x else f"{x:.5g}" if isinstance(x, float) else str(x))
    files = {kind: quote(path) for kind, path in section.files.items()}
    return {
        "id": section.id,
        "anchor": section.anchor,
        "title": section.title,
        "source": section.source,
        "group": section.group,
        "finding": section.picture.finding,
        "notes": section.picture.notes,
        "files": [(kind, path) for kind, path in files.items() if not kind.endswith("-column")],
        "narrow": [(kind.removesuffix("-column"), path) for kind, path in files.items() if kind.endswith("-column")],
        "panels": [_panel(section.picture, place) for place in range(len(section.picture.panels))],
        "columns": max(1, min(section.picture.columns, len(section.picture.panels))),
        "switches": _switches(section.picture),
        "head": list(text.columns),
        "rows": text.to_numpy().tolist(),
        "cut": len(frame) - len(shown),
        "claims": [finding for finding in findings if finding.claim.figure == section.id],
    }


def _panel(picture: Picture, place: int) -> dict[str, Any]:
    panel = picture.panels[place]
    return {
        "title": picture.letter(place) + panel.title,
        "scale": "colour" if panel.map is not None else "y",
        "log": panel.map.log if panel.map is not None else panel.log_y,
        "switchable": screen.switchable(panel),
        "signs": _signs(panel),
        "alt": _alt(panel),
    }


def _switches(picture: Picture) -> list[dict[str, Any]]:
    """The toggles of a figure in the order of its legend, each with the look that it stands for."""
    found: dict[str, dict[str, Any]] = {}
    for one in (one for panel in picture.panels for one in panel.series):
        look = screen.look(one)
        if one.detail:  # its dash says something else, which stands below the panel
            look["dash"] = "solid"
        found.setdefault(screen.key(one), look | {"line": one.kind == "line"})
    return [{"name": name, **look} for name, look in found.items()]


def _signs(panel: Panel) -> list[dict[str, str]]:
    """What dashes and crosses of this panel mean, where its legend does not say so."""
    dashes = {one.detail: screen.look(one)["dash"] for one in panel.series if one.detail}
    signs = [{"name": name, "dash": dash} for name, dash in dashes.items()] if len(dashes) > 1 else []
    crossed = {one.label for one in panel.series if one.kind == "crosses" and one.label != screen.key(one)}
    return signs + [{"name": name, "dash": ""} for name in sorted(crossed)]


def _alt(panel: Panel) -> str:
    """What a panel shows, for those who do not see it."""
    if panel.map is not None:
        rows, columns = panel.map.z.shape
        return f"Heat map of {panel.map.unit}, {panel.y} ({rows}) by {panel.x} ({columns})"
    names = list(dict.fromkeys(one.name for one in panel.series))
    return f"{panel.y} by {panel.x}, of {', '.join(names[:12])}{' and others' if len(names) > 12 else ''}"


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
    """With its words and mark; of conditions and limits what is not that of the first effect."""
    said = [effect[key] if effect is first else differing(effect[key], first[key]) for key in ("conditions", "limits")]
    return {**effect, "text": interval(effect), "mark": mark(effect), "said": [words for words in said if words]}


def _what(runs: Runs) -> list[tuple[str, str]]:
    """What was run, as terms and descriptions."""
    if not runs:
        return []
    trained = runs.where(lambda record: record.kind != "onestep")
    counted = [f"{len(trained)} training ({_counted(record.verdict or record.status.state for record in trained)})"]
    single = len(runs) - len(trained)
    counted = (counted if len(trained) else []) + ([f"{single} of one step from initialisation"] if single else [])
    words = [
        ("Runs", "; ".join(counted)),
        ("Architectures", ", ".join(style.title(label) for label in runs.labels)),
        ("Layers a side", ", ".join(str(depth) for depth in runs.depths if depth)),
        ("Width", ", ".join(map(str, sorted({record.width for record in runs if record.width})))),
        ("Seeds", spans(runs.seeds)),
    ]
    return [(term, description) for term, description in words if description]


def _counted(words: Iterable[str]) -> str:
    listed = list(words)
    return ", ".join(f"{listed.count(word)} {word}" for word in sorted(set(listed)))


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
        "seed": record.seed,
        "step": status.step,
        "state": status.state,
        "verdict": record.verdict,
        "gap": f"{verdict.nll_gap:+.3f}" if verdict and math.isfinite(verdict.nll_gap) else "",
        "reason": verdict.reason if verdict else status.reason,
    }
