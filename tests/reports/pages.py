"""Pages about made-up figures, so that what a browser shows can be tested against known content."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from in_memory import remembered
from making import make_run

from stabilitylab.reports.base import ABSENT, DIVERGED, NONFINITE, STUCK, ZERO, Map, Panel, Picture, Reference, Series
from stabilitylab.reports.claims import Claim, Effect, Finding, MissingRuns, corrected, judge
from stabilitylab.reports.collection import Runs
from stabilitylab.reports.page import html
from stabilitylab.reports.statistics import Region

EVIL = '<img src=x onerror=alert(1)>"&'  # a name that is no HTML
CLOSING = "</script><script>alert(1)</script>"


def lines(label: str = "") -> Picture:
    """Two panels: lines with bands on a logarithmic axis and a right axis; points, crosses and references."""
    x = [1, 2, 3, 4]
    low, high = [5e-5, 5e-4, 5e-3, 0.5], [2e-4, math.nan, 0.1, 2.0]
    many = [
        Series("Post-LN", x, [1e-4, 1e-3, 1e-2, 1.0], low, high, arch="postln", seeds=3),
        Series("BranchNorm T=1", x, [1.0, math.nan, 0.8, math.inf], arch="branchnorm T=1"),
        Series("Post-LN", x, [7.0, 6.0, 5.0, 4.0], arch="postln", right=True, dash="dotted", detail="loss"),
        Series("Post-LN", x, [0.5, 0.4, 0.3, 0.2], arch="postln", dash="dashed", detail="norm"),
    ]
    control = {"arch": "branchnorm T=1", "kind": "points", "seeds": 2}
    few = [
        Series("BranchNorm T=1", [6, 12], [4.0, 5.0], [3.5, 4.0], [4.5, 6.0], **control),
        Series(label or "Post-LN: diverged", [6, 12], [8.0, 9.0], arch="postln", kind="crosses"),
    ]
    references = [Reference(0.1, "limit"), Reference(3, "here", vertical=True)]
    panels = [
        Panel("Gradient", "layer", "L2 norm", many, references, log_y=True, right="loss [nats]"),
        Panel("Quality", "depth", "nats", few, ticks=[6, 12]),
    ]
    return Picture(panels, f"Post-LN vanishes {label}".strip(), ["Made up."])


def heat(layers: int = 6, steps: int = 20, seed: int = 0) -> Picture:
    """Two maps: one with every finding, of logarithmic colours, and a triangle, of linear ones."""
    rng = np.random.default_rng(seed)
    z = 10.0 ** rng.uniform(-12, 2, (layers, steps))
    finding = np.zeros(z.shape, np.int8)
    for kind, column, value in ((ZERO, 0, 0.0), (ABSENT, 1, math.nan), (NONFINITE, 2, math.inf)):
        finding[:, column], z[:, column] = kind, value
    triangle = np.where(np.tri(layers, dtype=bool), rng.uniform(0, 1, (layers, layers)), math.nan)
    rows = list(range(1, layers + 1))
    panels = [
        Panel("Gradient", "step", "layer", map=Map(list(range(steps)), rows, z, finding, "L2 norm")),
        Panel("Share", "branch", "output", map=Map(rows, rows, triangle, np.zeros(triangle.shape), "share", log=False)),
    ]
    return Picture(panels, "layer 1 breaks first")


def a_table() -> Panel:
    """Three named rows by two named columns: numbers, a stuck cell, a diverged one and one that is not there."""
    z = np.array([[-1.0, math.nan], [-1.2, -0.9], [math.nan, math.nan]])
    finding = np.array([[0, STUCK], [0, 0], [0, DIVERGED]])
    text = np.array([["-1.00", "stuck"], ["-1.20", "-0.90"], ["", "diverged"]])
    names = {"x_names": ["6L", "18L"], "y_names": ["Post-LN", "DeepNorm", "ReZero"], "text": text}
    return Panel("Table", "layers", "architecture", map=Map([0, 1], [0, 1, 2], z, finding, "nats", log=False, **names))


def claim(id: str, figure: str = "made:1", paper: str = "DeepNet", sentence: str = "It vanishes") -> Claim:
    return Claim(
        id, figure, paper, sentence, f"{paper}, Fig. 1", "ratio", "R: < 1; X: > 2", "deepnet:3", "", lambda _: []
    )


def findings() -> list[Finding]:
    """One of each verdict, with numbers that the real judge makes."""
    region, other = Region(high=1), Region(low=2)
    samples = {"C01": [0.5, 0.6, 0.7], "C02": [3.0, 3.1, 3.2], "C03": [0.6, 0.8, 1.1], "C05": [1.5, 1.6, 1.7]}
    found = []
    for id, values in samples.items():
        effects = [Effect("ratio", dict(enumerate(values, 3)), region, other, log=True, of=[remembered("a")])]
        if id == "C02":
            effects += [Effect(f"beside {place}", {3: 1.0, 4: 1.1}) for place in range(6)]
        entry = claim(id, paper="Admin" if id == "C02" else "DeepNet")
        facts = {"kind": "control", "after": "its threshold"} if id == "C05" else {}
        found.append(judge(Claim(**{**vars(entry), "measure": lambda runs, e=effects: e, **facts}), Runs([])))

    def lacking(runs: Runs) -> Sequence[Effect]:
        raise MissingRuns("needs a GPU", "stabilitylab sweep deepnet:3 --scale paper")

    found.append(judge(Claim(**{**vars(claim("C04", "elsewhere:1")), "measure": lacking}), Runs([])))
    return corrected(found)


def some_runs(folder: Path, count: int = 3) -> Runs:
    for place in range(count):
        arch = ("postln", "branchnorm", "deepnorm")[place % 3]
        state, verdict = (("diverged", "diverged"), ("finished", "trained"))[place % 2]
        made = {"metrics": {"loss": [7.0, 6.0]}, "layers": 2 + place % 5, "verdict": verdict, "state": state}
        make_run(folder, f"{arch}-{place}", arch=arch, seed=3 + place, **made)
    return Runs.load(folder)


def write(
    folder: Path, sections: Sequence[html.PageSection] | None = None, runs: Runs | None = None, **content
) -> Path:
    """A page with two figures, one run's maps, four claims and three runs; ``content`` replaces any of it."""
    if sections is None:
        files = {kind: f"figures/made-1.{kind}" for kind in ("csv", "pdf", "svg", "png")}
        narrow = files | {"pdf-column": "figures/made-1-column.pdf"}
        sections = [
            html.PageSection("made:1", "Lines", "DeepNet, Figure 1", lines(), narrow),
            html.PageSection("made:2", "Lines again", "DeepNet, Figure 2", lines(), files),
            html.PageSection("run:postln-0", "postln-0", "one run", heat(), {"csv": "figures/run.csv"}, group="runs"),
        ]
    runs = some_runs(folder / "runs") if runs is None else runs
    defaults = {"title": "Three runs", "findings": findings(), "broken": [(Path("runs/torn"), "its journal is torn")]}
    missing = [("deepnet:5", "Update against depth", "no run of one step", "stabilitylab sweep deepnet:5")]
    return html.write(folder, sections=sections, runs=runs, **({**defaults, "missing": missing} | content))
