"""What was found in a model, as a table that a person reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..base import PROBES
from .sites import KINDS, Site, Sites

HEADER = ("kind", "stack", "layers", "count", "places", "module", "probes")


def listing(sites: Sites) -> str:
    """One line for places of one kind that differ in their layer alone: how many, what, and which probes look there."""
    lines = [HEADER, *_lines(sites)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    rows = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    none = [
        f"no {kind} found; nearest are {', '.join(sites.nearest(kind))}: if some are, name them with "
        f"sites={{{kind!r}: 'a regular expression of their full names'}}"
        for kind in KINDS
        if not _of(sites, kind)
    ]
    return "\n".join((*rows, *none))


def _lines(sites: Sites) -> Iterator[tuple[str, ...]]:
    for kind in (*KINDS, "attentions", "logits", "branches"):
        groups: dict[tuple[str, str, str], list[Site]] = {}
        for site in _of(sites, kind):
            groups.setdefault((site.stack, _any_layer(site, sites), type(site.module).__name__), []).append(site)
        probes = ", ".join(_measuring(kind)) or "-"
        for (stack, places, module), found in groups.items():
            numbers = sorted({site.layer for site in found})
            span = f"{numbers[0]}-{numbers[-1]}" if numbers[-1] else "-"
            taken = "input of " if found[0].take == "input" else ""
            yield kind, stack or "-", span, str(len(found)), places, f"{taken}{module}", probes


def _any_layer(site: Site, sites: Sites) -> str:
    """The site's name with * for the number of its layer."""
    stack = next((stack for stack in sites.stacks if stack.name == site.stack), None)
    if stack is None or not site.layer:
        return site.name
    layer = list(stack.layers)[site.layer - 1]
    home, _, last = layer.rpartition(".")
    return f"{home}.{re.sub('[0-9]+', '*', last)}{site.name.removeprefix(layer)}".lstrip(".")


def _of(sites: Sites, kind: str) -> Sequence[Site]:
    return getattr(sites, kind)


def _measuring(kind: str) -> list[str]:
    """Probes that look at this kind of place, and those that look at several kinds: at the residual stream, or at all
    that is hidden."""
    several = {"stream": ("layers", "branches"), "hidden": ("layers", "activations")}
    own = {kind} | {name for name, kinds in several.items() if kind in kinds}
    return [name for name, probe in PROBES.items() if getattr(probe.at, "__name__", "") in own]
