"""The conditions under which a number was measured, and the limits of its runs, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from ..experiments.protocol import RAMP
from .collection import Record, rates, several

TAIL_OF_RUN = 0.2  # share of the updates over which a converged run's held-out loss ...
CONVERGED = 0.01  # ... falls by less than this [nats/token] (Protocol 2, rule 4)
TOLERANCE = 0.15  # relative, of the protocol's ramp: short runs are rounded


def conditions(records: Iterable[Record]) -> str:
    """Return the conditions of a number in a few words: layers, width, data, updates, learning rate, warm-up and T with
    their shares of the run. If several values occur: all of them, or the first and the last."""
    runs = list(dict.fromkeys(records))
    if not runs:
        return ""
    trained = [run for run in runs if run.kind == "train"]
    words = [
        _several(runs, lambda run: run.layers_text),
        _several(
            runs, lambda run: "-".join(str(run.settings.get(f"model.{k}")) for k in ("d_model", "d_ffn", "heads"))
        ),
        _several(runs, _data),
    ]
    if trained:
        words.append(f"{_several(trained, lambda run: f'{run.updates:,}')} updates")
        words.append(f"lr {rates(trained)}")
        words.append(f"warm-up {_several(trained, lambda run: _share(run, run.settings.get('train.warmup')))}")
        if ramps := [run for run in trained if run.ramp]:
            words.append(f"T = {_several(ramps, lambda run: _share(run, run.ramp))}")
    else:
        words.append("one step")
    return ", ".join(word for word in words if word)


def _several(runs: list[Record], of: Callable[[Record], str]) -> str:
    """Lists all values in the order in which they stand."""
    return several(list(dict.fromkeys(of(run) for run in runs)))


def _data(run: Record) -> str:
    source, _, rest = str(run.settings.get("data.source", "")).partition(":")
    name = rest.split(",")[0].rsplit("/", 1)[-1]
    share = run.settings.get("data.fraction", 1.0)
    return (f"{source} {name}" if name else source) + (f" x {share:g}" if share not in (None, 1.0) else "")


def _share(run: Record, updates: Any) -> str:
    """Writes ``240 (4 %)``: a number of updates with its share of the run."""
    if updates is None:
        return "?"
    if not run.updates or not updates:
        return str(updates)
    share = 100 * int(updates) / run.updates
    return f"{updates} ({share:.3g} %)" if share < 1000 else f"{updates} ({share:.0f} %)"


def differing(said: str, first: str) -> str:
    """Return the words of :func:`conditions` or :func:`limits` that ``first``, those of another number, lacks; "" if
    there are none."""
    known = {*first.split(", ")}
    return ", ".join(word for word in said.split(", ") if word not in known)


def limits(records: Iterable[Record]) -> str:
    """Return the limits of these runs in words: if they converged, the epochs, the width, the number of runs whose
    source worth was measured, and the number with rank collapse."""
    runs = [run for run in dict.fromkeys(records) if run.kind == "train" and run.updates]
    if not runs:
        return ""
    words = []
    falls = [fall for run in runs if math.isfinite(fall := last_fall(run))]
    if falls:
        converged = max(falls) < CONVERGED
        words.append(
            "converged" if converged else f"at equal updates, not converged (last fifth: -{max(falls):.2g} nats)"
        )
    if epochs := [epochs for run in runs if (epochs := _epochs(run))]:
        low, high = min(epochs), max(epochs)
        words.append(f"{low:.2g} epochs" if high < 1.1 * low else f"{low:.2g} to {high:.2g} epochs")
    widths = sorted({run.width for run in runs})
    words.append(f"width {' / '.join(map(str, widths))}")
    known = [run.reads for run in runs if run.reads is not None]
    if known and len(known) < len(runs):
        words.append(f"source worth measured in {len(known)} of {len(runs)} runs")
    if collapsed := sum(run.collapsed for run in runs):
        words.append(f"rank collapse in {collapsed} of {len(runs)} runs")
    return ", ".join(words)


def last_fall(run: Record) -> float:
    """Return the fall of the held-out loss over the last fifth of the updates [nats/token]; NaN if unknown."""
    data = run.held_out()
    if len(data) < 2:
        return math.nan
    steps, nll = data["step"].to_numpy(float), data["held_out_nll"].to_numpy(float)
    before = nll[steps <= (1 - TAIL_OF_RUN) * steps[-1]]
    return float(before[-1] - nll[-1]) if len(before) else math.nan


def _epochs(run: Record) -> float:
    """Counts the passes over the training text; 0 where its size is not recorded."""
    batches = run.run.manifest.get("data", {}).get("batches_per_epoch", 0)
    return run.updates * int(run.settings.get("train.accumulate", 1)) / batches if batches else 0.0


def by_protocol(run: Record) -> bool:
    """True if the ramp is 4 % of the run, if there is no ramp, if the run ends with or before its ramp, or if the
    length of the run is unknown."""
    if run.ramp is None or not run.updates or run.ramp >= run.updates:
        return True
    return abs(run.ramp / run.updates - RAMP) <= TOLERANCE * RAMP or abs(run.ramp - RAMP * run.updates) <= 1
