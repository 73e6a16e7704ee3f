"""A short description of the runs of a figure: the first half of its small print."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ..collection import Record, Runs


def provenance(group: Runs) -> str:
    """Write ``18L-18L, 64 wide, text data, 6,000 updates, T 4 % of them``; a setting in which runs differ as a span."""
    words = [
        _one({run.layers_text for run in group}, "depths"),
        _one({f"{run.width} wide" for run in group if run.width}, "widths"),
        _one({_data(run) for run in group} - {""}, "data sets"),
        "one step" if group and group[0].kind == "onestep" else _updates(group),
        _ramps(group),
    ]
    return ", ".join(filter(None, words))


def _one(values: Iterable[Hashable], many: str) -> str:
    found = [value for value in values if value]
    return str(found[0]) if len(found) == 1 else f"{len(found)} {many}" if found else ""


def _data(run: Record) -> str:
    return f"{str(source).split(':')[0]} data" if (source := run.settings.get("data.source")) else ""


def _updates(group: Runs) -> str:
    counts = sorted({run.updates for run in group if run.updates})
    return f"{' to '.join(f'{count:,}' for count in dict.fromkeys((counts[0], counts[-1])))} updates" if counts else ""


def _ramps(group: Runs) -> str:
    """Write T as a share of the run, for architectures with a ramp."""
    shares = sorted({100 * run.ramp / run.updates for run in group if run.ramp and run.updates})
    if not shares or group[0].kind == "onestep":
        return ""
    if shares[-1] > 100:
        return "T longer than the run" if shares[0] > 100 else f"T from {shares[0]:.3g} % of them to beyond their end"
    return f"T {' to '.join(dict.fromkeys((f'{shares[0]:.3g}', f'{shares[-1]:.3g}')))} % of them"
