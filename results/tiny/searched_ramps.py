"""BranchNorm's ramps at 18 layers a side, at the rate that its search chose, at half of it, and at that of Protocol 2.

T is .1, .4, 4 or 20 % of 3,000 updates; warm-up is always 4 %. Fixed before any run: a rate is shown when all of its
runs are in; the loss of a T is compared with that at 4 %, paired by seed, where the models of both read their source.
It describes: the questions are those of questions.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import judge
import pandas as pd
from cells import HERE, interval, number
from page_blocks import table

from stabilitylab.experiments import Recipe, protocol
from stabilitylab.reports.statistics import t_interval
from stabilitylab.sweep import Ledger

LEDGER = HERE / "searched-ramps" / "ledger.csv"


Found = Mapping[tuple[float, int], Mapping[int, judge.Model]]  # (rate, T) -> seed -> run


def found() -> Found:
    """The runs that are in."""
    known: dict[tuple[float, int], dict[int, judge.Model]] = {}
    data = Ledger(LEDGER).frame() if LEDGER.exists() else pd.DataFrame()
    for line in data.to_dict("records"):
        known.setdefault((float(line["lr"]), int(line["T"])), {})[int(line["seed"])] = judge.model_of(line)
    return known


def planned() -> dict[float, list[int]]:
    """Rate -> the T of its runs."""
    rates: dict[float, list[int]] = {}
    for one in protocol.searched_ramps(Recipe("tiny", {}, seeds=protocol.SEEDS[:1])):
        rates.setdefault(one.config.train.lr, []).append(one.config.model.T)
    return rates


def rows(known: Found, plan: Mapping[float, Sequence[int]]) -> Iterator[Sequence[object]]:
    """One row a rate and T; one for a rate of which runs are missing."""
    base = protocol.share(protocol.RAMP_UPDATES)
    for rate, ramps in plan.items():
        count, of = sum(len(known.get((rate, T), {})) for T in ramps), len(ramps) * len(protocol.SEEDS)
        if count < of:
            yield f"{rate:g}", "", "", f"open: {count} of {of} runs", "", "", "", ""
            continue
        usual = known[rate, base]
        for T in ramps:
            own = known[rate, T]
            worth = [run.worth for run in own.values()]
            paired: tuple[str, str] = ("", "")
            if base != T and all(run.eligible for runs in (own, usual) for run in runs.values()):
                gap = t_interval(own[seed].loss - usual[seed].loss for seed in sorted(own))
                paired = number(gap.mean), interval(gap.low, gap.high)
            part = f"{100 * T / protocol.RAMP_UPDATES:g} %"
            reads = f"{sum(run.eligible for run in own.values())} of {len(own)}"
            loss = number(sum(run.loss for run in own.values()) / len(own), ".3f")
            yield f"{rate:g}", T, part, loss, *paired, reads, f"{min(worth):.2f} to {max(worth):.2f}"


def block() -> list[str]:
    """The table of docs/results.md."""
    loss, minus = "validation loss [nats/token]", "minus that at 4 %, by seed"
    columns = ("learning rate", "T", "share of the run", loss, minus, "95 %", "read their source", "it is worth")
    return table(columns, rows(found(), planned()))
