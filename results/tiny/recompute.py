#!/usr/bin/env python
"""Every number of docs/results.md and of README's results, recomputed from the tables beside this file.

    python results/tiny/recompute.py [--write]

Blocks between ``<!-- results:NAME -->`` and ``<!-- end -->`` in these pages are what this script makes. Without
``--write`` it compares and ends with 1 where a digit differs.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pandas as pd
import questions

from stabilitylab.experiments import protocol
from stabilitylab.reports import style
from stabilitylab.reports.statistics import t_interval
from stabilitylab.sweep import Ledger

HERE = Path(__file__).parent
PAGES = tuple(HERE.parents[1] / name for name in ("README.md", "docs/results.md"))
BLOCK = re.compile(r"<!-- results:(\w+) -->\n.*?<!-- end -->", re.DOTALL)
COLUMNS = ["label", "layers", "steps", "seed", "lr", "T", "verdict", "nll_gap", "metrics.validation_nll"]
NOTHING = 0.01  # nats a token that a source is worth at least, where it is read
KINDS = (("nothing", -math.inf, NOTHING), ("less than a nat", NOTHING, 1.0), ("a nat or more", 1.0, math.inf))
GROWTHS = {protocol.BRANCH: "linear", f"{protocol.BRANCH} exp": "exponential", f"{protocol.BRANCH} sigmoid": "sigmoid"}
TITLES = {
    protocol.POST: "Post-LN (gain 1)",
    protocol.SMALL: "Post-LN, DeepNorm's initialisation (T = 1)",
    protocol.ALPHA_ALONE: "DeepNorm's alpha alone (gain 1)",
}


def title(arm: str) -> str:
    return TITLES.get(arm, style.title(arm))


@cache
def cells() -> pd.DataFrame:
    """A row a run of ledger.csv, with settings and metrics as columns."""
    return Ledger(HERE / "ledger.csv").frame().reindex(columns=COLUMNS)


def losses(arm: str, layers: int, updates: int = protocol.UPDATES) -> Mapping[int, float]:
    """Seed -> validation loss after training of an arm of the comparison."""
    data = cells()
    ramp = 1 if arm == protocol.SMALL else protocol.share(updates)
    own = data[(data["label"] == arm) & (data["layers"] == 2 * layers) & (data["steps"] == updates)]
    own = own[(own["T"] == ramp) & (own["lr"] == protocol.chosen(arm, layers))]
    return dict(zip(own["seed"].astype(int), own["metrics.validation_nll"].astype(float), strict=True))


def number(value: float, form: str = "+.3f") -> str:
    return "" if math.isnan(value) else f"{value:{form}}"


def interval(low: float, high: float, form: str = "+.3f") -> str:
    return "" if math.isnan(low) else f"[{low:{form}}, {high:{form}}]"


def states(rows: pd.DataFrame) -> str:
    return ", ".join(f"{count} {state}" for state, count in rows["verdict"].value_counts().items())


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def answers() -> list[str]:
    """The four primary questions."""
    path = HERE / "sentences.csv"
    found = questions.table(losses, pd.read_csv(path, low_memory=False) if path.exists() else None)
    columns = ("question", "difference [nats/token]", "95 % over seeds", "n", "95 % over sentences")
    rows = []
    for row, question in zip(found.to_dict("records"), questions.QUESTIONS, strict=True):
        where = "18 minus 6 layers a side" if question.depths else "18L-18L"
        rows.append(
            (
                f"{row['id']} {row['question']} {title(question.first)} - {title(question.second)}, {where}",
                number(row["mean"]),
                interval(row["low"], row["high"]),
                row["n"],
                interval(row["sentences_low"], row["sentences_high"]),
                number(row["p_holm"], ".2g"),
                number(row["p_equivalent_holm"], ".2g"),
                row["answer"],
            )
        )
    return table((*columns, "p (Holm)", "p equivalent (Holm)", "answer"), rows)


def arms() -> list[str]:
    """Every arm's loss after training."""
    data = cells()
    rows = []
    for layers in reversed(protocol.LAYERS):
        for arm in protocol.arms(layers):
            found = t_interval(losses(arm, layers).values())
            own = data[(data["label"] == arm) & (data["layers"] == 2 * layers) & (data["steps"] == protocol.UPDATES)]
            rate = f"{protocol.chosen(arm, layers):g}"
            ends = interval(found.low, found.high, ".3f")
            rows.append((title(arm), layers, rate, number(found.mean, ".3f"), ends, found.n, states(own)))
    columns = ("arm", "layers a side", "learning rate", "validation loss [nats/token]", "95 %", "n", "states")
    return table(columns, rows)


def choice() -> list[str]:
    """The rates from which each arm's was chosen: the mean loss of two seeds."""
    data = pd.read_csv(HERE / "choice.csv")
    rates = sorted(data["lr"].unique())
    rows = []
    for (layers, arm), own in data.groupby(["layers", "arm"], sort=False):
        known = {
            row["lr"]: f"**{row['nll']:.3f}**" if row["chosen"] else f"{row['nll']:.3f}" for _, row in own.iterrows()
        }
        rows.append((title(str(arm)), layers, *(known.get(rate, "") for rate in rates)))
    return table(("arm", "layers a side", *(f"{rate:g}" for rate in rates)), rows)


def deepest() -> list[str]:
    """100L-100L after 160 updates: loss minus the unigram baseline of the validation text."""
    data = cells()
    data = data[(data["layers"] == 2 * protocol.DEEPEST) & (data["steps"] == 160)]
    rows = []
    for rate in protocol.DEEPEST_RATES:
        own = {T: data[(data["lr"] == rate) & (data["T"] == T)].set_index("seed") for T in protocol.DEEPEST_RAMPS}
        short = own[protocol.share(160)]["nll_gap"].astype(float)
        for T, found in own.items():
            gaps = found["nll_gap"].astype(float)
            mean, apart = t_interval(gaps), t_interval((gaps - short).dropna())
            paired = (number(apart.mean), interval(apart.low, apart.high)) if protocol.share(160) != T else ("", "")
            ends = interval(mean.low, mean.high)
            rows.append((f"{rate:g}", T, number(mean.mean), ends, *paired, mean.n, states(found)))
    gap, minus = "loss minus the unigram baseline [nats/token]", "minus that at 4 %, by seed"
    return table(("learning rate", "T", gap, "95 %", minus, "95 %", "n", "states"), rows)


def ramps() -> list[str]:
    """BranchNorm, 18L-18L, 3,000 updates: the loss at each T, and its difference to that at 4 %."""
    data = cells()
    data = data[(data["label"] == protocol.BRANCH) & (data["layers"] == 36) & (data["steps"] == protocol.RAMP_UPDATES)]
    by_ramp = {T: own.set_index("seed")["metrics.validation_nll"].astype(float) for T, own in data.groupby("T")}
    base = by_ramp.get(protocol.share(protocol.RAMP_UPDATES), pd.Series(dtype=float))
    rows = []
    for T, own in sorted(by_ramp.items()):
        found = t_interval((own - base).dropna())
        part = f"{100 * float(T) / protocol.RAMP_UPDATES:g} %"  # type: ignore[arg-type]
        ends = interval(found.low, found.high)
        worth = reading()[of_ramps(reading()) & (reading()["T"] == T)]["worth"]
        rows.append((T, part, number(float(own.mean()), ".3f"), number(found.mean), ends, len(own), span(worth)))
    gap, minus = "validation loss [nats/token]", "minus that at 4 %, by seed"
    return table(("T", "share of the run", gap, minus, "95 %", "n", "the source is worth [nats/token]"), rows)


def growths() -> list[str]:
    """BranchNorm, 6L-6L, 3,000 updates: the loss with each way that alpha grows, minus that of the linear one."""
    data = cells()
    data = data[(data["layers"] == 12) & (data["steps"] == protocol.RAMP_UPDATES)]
    data = data[data["label"].str.startswith(protocol.BRANCH)]
    losses = {arm: data[data["label"] == arm].set_index("seed") for arm in GROWTHS}
    base = losses[protocol.BRANCH]["metrics.validation_nll"].astype(float)
    rows = []
    for arm, own in losses.items():
        gaps = own["metrics.validation_nll"].astype(float)
        apart = t_interval((gaps - base).dropna())
        paired = ("", "") if arm == protocol.BRANCH else (number(apart.mean), interval(apart.low, apart.high))
        worth = reading()[(reading()["arm"] == arm) & of_growths(reading())]
        seeds = ", ".join(number(gap, ".3f") for gap in gaps.sort_index())
        rows.append((GROWTHS[arm], seeds, *paired, len(own), states(own), span(worth["worth"])))
    by_seed, minus = "validation loss by seed [nats/token]", "minus the linear one, by seed"
    return table(("alpha grows", by_seed, minus, "95 %", "n", "states", "the source is worth [nats/token]"), rows)


def lower() -> list[str]:
    """DeepNorm and BranchNorm, 6L-6L, at their chosen rates and at a quarter of these: what the source is worth."""
    data, rows = reading(), []
    for arm in (protocol.DEEP, protocol.BRANCH):
        for part in (1, 4):
            rate = protocol.chosen(arm, 6) / part
            own = data[(data["arm"] == arm) & (data["layers"] == 6) & (data["updates"] == protocol.UPDATES)]
            own = own[(own["lr"] == rate) & own["seed"].isin(protocol.SEEDS[:3])].sort_values("seed")
            by_seed = [", ".join(number(value, ".2f") for value in own[column]) for column in ("own", "worth")]
            rows.append((title(arm), f"{rate:g}", *by_seed, int(own["warned"].sum())))
    first = ("arm", "learning rate", "validation loss by seed [nats/token]")
    return table((*first, "the source is worth, by seed [nats/token]", "warned of"), rows)


def of_comparison(data: pd.DataFrame) -> pd.Series:
    """Which rows are of the comparison: its length, and each arm's own rate."""
    pairs = zip(data["arm"], data["layers"], strict=True)
    rates = [protocol.chosen(arm, n) if arm in protocol.CHOSEN else math.nan for arm, n in pairs]
    return (data["updates"] == protocol.UPDATES) & (data["lr"] == rates)


def of_ramps(data: pd.DataFrame) -> pd.Series:
    return (data["updates"] == protocol.RAMP_UPDATES) & (data["layers"] == 18)


def of_growths(data: pd.DataFrame) -> pd.Series:
    return (data["updates"] == protocol.RAMP_UPDATES) & (data["layers"] == 6)


def of_lower(data: pd.DataFrame) -> pd.Series:
    return (data["updates"] == protocol.UPDATES) & ~of_comparison(data)


def span(values: pd.Series) -> str:
    return f"{values.min():.2f} to {values.max():.2f}" if len(values) else ""


@cache
def reading() -> pd.DataFrame:
    """A row a run that source.csv has: what its own source is worth, and what diagnose said of its cross-attention:
    ``warned``, and the step at which that collapse began."""
    keys = ["arm", "layers", "seed", "lr", "T", "updates"]
    found = pd.read_csv(HERE / "source.csv")
    said = pd.read_csv(HERE / "collapse.csv")
    said = said[said["sublayer"] == "cross_attn"].groupby(keys).agg(begun=("begun", "min"), worst=("severity", "max"))
    found = found.merge(said.reset_index(), on=keys, how="left")
    return found.assign(worth=found["other"] - found["own"], warned=found["worst"] == "warning")


def source() -> list[str]:
    """By arm of the comparison: what the source is worth, in how many runs nothing, and what diagnose said of it."""
    rows = []
    for layers in reversed(protocol.LAYERS):
        for arm in protocol.arms(layers):
            data = reading()
            rate = protocol.chosen(arm, layers)
            own = data[(data["arm"] == arm) & (data["layers"] == layers) & of_comparison(data)].sort_values("seed")
            worth = ", ".join(f"{value:.2f}" for value in own["worth"])
            warned = own[own["warned"]]
            begun = f"{warned['begun'].min():.0f} to {warned['begun'].max():.0f}" if len(warned) else ""
            nothing = int((own["worth"] < NOTHING).sum())
            apart = f"{own['apart'].min():.1g} to {own['apart'].max():.1g}"
            none = f"{nothing} of {len(own)}"
            rows.append((title(arm), layers, f"{rate:g}", worth, none, apart, len(warned), begun))
    first = ("arm", "layers a side", "learning rate", "worth by seed [nats/token]", "worth nothing")
    return table((*first, "1 - cosine of tokens", "warned of", "since update"), rows)


def collapse() -> list[str]:
    """Whether diagnose warns of rank collapse in cross-attention, against whether the source is worth nothing."""
    data, rows = reading(), []
    groups = {
        "the comparison, which set the threshold": of_comparison(data),
        "the ramps, looked at afterwards": of_ramps(data),
        "lower rates and other growths, looked at afterwards": of_lower(data) | of_growths(data),
    }
    for name, which in groups.items():
        own = data[which]
        for words, low, high in KINDS:
            some = own[(own["worth"] >= low) & (own["worth"] < high)]
            if len(some):
                rows.append((name, words, len(some), int(some["warned"].sum())))
    return table(("runs", "the source is worth", "n", "warned of"), rows)


BLOCKS: Mapping[str, Callable[[], list[str]]] = {
    "answers": answers, "arms": arms, "choice": choice, "deepest": deepest, "ramps": ramps, "source": source,
    "collapse": collapse, "growths": growths, "lower": lower,
}  # fmt: skip


def renewed(text: str) -> str:
    """A page with its blocks made anew; raises KeyError for a block that nothing makes."""
    return BLOCK.sub(
        lambda match: f"<!-- results:{match[1]} -->\n" + "\n".join(BLOCKS[match[1]]()) + "\n<!-- end -->", text
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pages anew")
    given = parser.parse_args()
    changed = []
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if (after := renewed(before)) != before:
            changed.append(page.name)
            if given.write:
                page.write_text(after, encoding="utf-8")
    if changed and not given.write:
        print(f"{', '.join(changed)}: numbers differ from the tables; --write makes them anew", file=sys.stderr)
    return int(bool(changed) and not given.write)


if __name__ == "__main__":
    sys.exit(main())
