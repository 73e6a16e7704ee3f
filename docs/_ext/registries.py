"""Directives that write what the registries know: ``probe-table``, ``probe NAME``, ``figures``, ``sweeps``,
``archs``.

Docstrings are set as text, not parsed: ``||x||_2`` and ``|a|`` mean themselves. The build warns of a probe that no page
describes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from stabilitylab import experiments
from stabilitylab.models import ARCHS
from stabilitylab.models.facts import facts
from stabilitylab.probes import PROBES, Probe
from stabilitylab.reports.base import FIGURES

log = logging.getLogger(__name__)
WHEN = {
    "forward": "every forward of the training pass",
    "backward": "every backward of the training pass",
    "step": "the parameters and their gradients, before the optimizer's step",
    "update": "the parameters, around the optimizer's step",
    "curvature": "the loss of a fixed batch around theta_t, after the optimizer's step, at rows of its own",
    "reference": "the reference pass: a fixed held-out batch, eval mode, no gradients",
}
OWN = "stabilitylab.probes."
MOST = 24  # columns of a probe that are listed by name


def built_in() -> dict[str, type[Probe]]:
    """The probes of this package; a page's own example may have registered another one."""
    return {name: probe for name, probe in sorted(PROBES.items()) if probe.__module__.startswith(OWN)}


def paragraphs(entry: object) -> list[str]:
    return [" ".join(text.split()) for text in (inspect.getdoc(entry) or "").split("\n\n")]


def prose(text: str) -> nodes.paragraph:
    """Text with ``literals``, and 2305.02790 as a link to arXiv."""
    paragraph = nodes.paragraph()
    for part in re.split(r"(``.+?``|\b\d{4}\.\d{5}\b)", text):
        if part.startswith("``"):
            paragraph += nodes.literal(text=part.strip("`"))
        elif re.fullmatch(r"\d{4}\.\d{5}", part):
            paragraph += nodes.reference(text=part, refuri=f"https://arxiv.org/abs/{part}")
        else:
            paragraph += nodes.Text(part)
    return paragraph


def table(rows: Sequence[Sequence[nodes.Node]], widths: Sequence[int], head: Sequence[str] = ()) -> nodes.table:
    group = nodes.tgroup(cols=len(widths))
    group += [nodes.colspec(colwidth=width) for width in widths]
    if head:
        group += nodes.thead("", _row([nodes.paragraph(text=text) for text in head]))
    group += nodes.tbody("", *(_row(row) for row in rows))
    return nodes.table("", group)


def _row(cells: Sequence[nodes.Node]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", cell) for cell in cells))


def columns(entry: type[Probe]) -> str:
    """The names of a probe's columns; of many, the first and the last ones."""
    names = list(entry.columns)
    return ", ".join(names if len(names) <= MOST else [*names[:3], "...", *names[-3:]])


class ProbeTable(SphinxDirective):
    """All probes: name, columns, unit, when, whether by default."""

    def run(self) -> list[nodes.Node]:
        rows = [
            [
                nodes.paragraph("", "", nodes.literal(text=name)),
                prose(columns(probe)),
                prose(probe.unit),
                prose(probe.on),
                prose("yes" if probe.default else ""),
            ]
            for name, probe in built_in().items()
        ]
        return [table(rows, (22, 40, 22, 10, 6), ("table", "columns", "unit", "when", "default"))]


class OneProbe(SphinxDirective):
    """The docstring of a probe's class and its facts; the page adds by hand what the docstring does not say."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        probe = built_in()[name]
        described: set[str] = self.env.__dict__.setdefault("described_probes", set())
        described.add(name)
        combined = {"norm": "root of the sum of squares", "mean": "mean", "": "not combined"}[probe.total]
        facts = {
            "columns": columns(probe),
            "unit": probe.unit or "none",
            "taken in": WHEN[probe.on],
            "rows of a layer": combined,
            "by default": "yes" if probe.default else f'no: probes="default,{name}"',
        }
        rows = [[prose(key), prose(value)] for key, value in facts.items()]
        return [*(prose(text) for text in paragraphs(probe)), table(rows, (20, 80))]


class Archs(SphinxDirective):
    """Each architecture: formula, source, remarks, what it learns besides, its constants at 100L-100L."""

    def run(self) -> list[nodes.Node]:
        return [self._section(name) for name in sorted(ARCHS)]

    @staticmethod
    def _section(name: str) -> nodes.section:
        said = facts(name, 100, 100)
        section = nodes.section(ids=[nodes.make_id(f"arch-{name}")])
        section += [nodes.title(text=name), nodes.literal_block(text=said["formula"])]
        section += [prose(f"Source: {said['source']}."), *([prose(said["remarks"])] if said["remarks"] else [])]
        constants = [
            f"{stack} {key} = {value:.4g}"
            for stack, values in said["constants"].items()
            for key, value in values.items()
        ]
        rows = {
            "learns besides": said["learns"],
            "initial gains": said["gains"],
            "options": ", ".join(f"``arch.{key}`` = {value}" for key, value in said["options"].items()) or "none",
            "at 100L-100L": "; ".join(constants) or "no constant",
        }
        section += table([[prose(key), prose(value)] for key, value in rows.items()], (20, 80))
        return section


class Figures(SphinxDirective):
    """Each figure: title, source, what is drawn, what it needs."""

    def run(self) -> list[nodes.Node]:
        return [self._section(name) for name in sorted(FIGURES)]

    def _section(self, name: str) -> nodes.section:
        figure: Any = FIGURES[name]
        section = nodes.section(ids=[nodes.make_id(f"figure-{name}")])
        section += nodes.title(text=f"{name}: {figure.title}")
        section += prose(f"Source: {figure.source}.")
        section += [prose(text) for text in paragraphs(figure)]
        section += prose(" ".join(self._needs(name)))
        return section

    @staticmethod
    def _needs(name: str) -> Iterator[str]:
        if name not in experiments.SWEEPS:
            yield "Needs: runs of other figures or of your own; ``stabilitylab report`` says which it can use."
            return
        yield f"Needs {len(experiments.experiments(name))} runs at scale tiny: ``{experiments.command(name)}``."
        minutes = experiments.minutes(name)
        if minutes is not None:
            yield f"About {minutes:g} core-minutes on a CPU (docs: Sweeps)."


class Sweeps(SphinxDirective):
    """The runs of each figure at scale tiny: their number, their core-minutes, their settings."""

    def run(self) -> list[nodes.Node]:
        rows = [self._row(name, sweep) for name, sweep in experiments.SWEEPS.items()]
        return [table(rows, (14, 6, 10, 70), ("figure", "runs", "core-minutes", "what varies"))]

    @staticmethod
    def _row(name: str, sweep: experiments.Sweep) -> list[nodes.Node]:
        cost = f"{sweep.minutes:g}" if sweep.minutes is not None else "not measured"
        what = paragraphs(sweep.runs)[0]
        return [prose(text) for text in (f"``{name}``", str(len(experiments.experiments(name))), cost, what)]


def complain(app: Sphinx, env: Any) -> None:
    for name in sorted(built_in().keys() - env.__dict__.get("described_probes", set())):
        log.warning("no page describes the probe %r: add {probe} %s to a page of docs/probes", name, name)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("probe-table", ProbeTable)
    app.add_directive("probe", OneProbe)
    app.add_directive("figures", Figures)
    app.add_directive("sweeps", Sweeps)
    app.add_directive("archs", Archs)
    app.connect("env-check-consistency", complain)
    return {"version": "1", "parallel_read_safe": False, "env_version": 1}
