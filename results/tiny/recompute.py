#!/usr/bin/env python
"""Every number of docs/results.md, withdrawn.md, ledger.md and findings.md, and of README's results, from the tables
beside this file.

    python results/tiny/recompute.py [--write]

Blocks between ``<!-- results:NAME -->`` and ``<!-- end -->`` in these pages are what this script makes, and numbers
between ``<!--=NAME-->`` and ``<!--/-->`` (inline.py). Without
``--write`` it compares and ends with 1 where a digit differs.
"""

from __future__ import annotations

import math
import sys
from itertools import product

import collapse_map
import inline
import judge
import page_blocks
import pandas as pd
import questions
import searched_ramps
import verdicts
from cells import HERE, SECOND, cells, interval, losses, number, states, title
from page_blocks import table
from sources import collapse, growths, lower, of_ramps, reading, source, span

from stabilitylab.experiments import protocol
from stabilitylab.reports import CLAIMS
from stabilitylab.reports.statistics import t_interval

OF_DOCS = ("results", "withdrawn", "findings", "ledger")
PAGES = tuple(HERE.parents[1] / name for name in ("README.md", *(f"docs/{name}.md" for name in OF_DOCS)))


def asked(question: questions.Question) -> str:
    """A question, the arms whose difference answers it, and where."""
    where = "18 minus 6 layers a side" if question.depths else "18L-18L"
    return f"{question.id} {question.text} {title(question.first)} - {title(question.second)}, {where}"


def answers() -> list[str]:
    """The four primary questions."""
    path = SECOND / "sentences.csv"
    found = questions.table(losses, pd.read_csv(path, low_memory=False) if path.exists() else None)
    columns = ("question", "difference [nats/token]", "95 % over seeds", "n", "95 % over sentences")
    rows = []
    for row, question in zip(found.to_dict("records"), questions.QUESTIONS, strict=True):
        rows.append(
            (
                asked(question),
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
            own = own[own["lr"] == protocol.chosen(arm, layers)]
            rate = f"{protocol.chosen(arm, layers):g}"
            ends = interval(found.low, found.high, ".3f")
            rows.append((title(arm), layers, rate, number(found.mean, ".3f"), ends, found.n, states(own)))
    columns = ("arm", "layers a side", "learning rate", "validation loss [nats/token]", "95 %", "n", "states")
    return table(columns, rows)


def choice() -> list[str]:
    """The rates from which each arm's was chosen: the mean loss of two seeds."""
    data = pd.read_csv(SECOND / "choice.csv")
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


def rungs() -> list[str]:
    """The search for the rates of the third comparison: each arm's rate, its loss, and where its models read."""
    data = pd.read_csv(HERE / "rungs-choice.csv")
    rows = []
    for layers, arm in product(protocol.LAYERS, protocol.SEARCHED_ARMS):
        own = data[(data["arm"] == arm) & (data["layers"] == layers)]
        read = own.groupby("lr")["eligible"].min() == 1
        unread = [rate for rate, all_read in read.items() if not all_read]
        below = [rate for rate, all_read in read.items() if all_read and rate < min(unread, default=math.inf)]
        chosen = own[own["chosen"] == 1]
        ends = chosen[chosen["updates"] == protocol.UPDATES]["loss"]
        rate = f"{chosen['lr'].iloc[0]:g}"
        at = (f"{max(below):g}", f"{min(unread):g}" if unread else "none tried")
        rows.append((title(arm), layers, rate, number(ends.mean(), ".3f"), *at))
    loss = "validation loss of two seeds [nats/token]"
    reads = ("all seeds read up to", f"one does not read by {protocol.RUNG_UPDATES:,} updates at")
    return table(("arm", "layers a side", "chosen rate", loss, *reads), rows)


def equal_rates() -> list[str]:
    """The search by rate: the mean loss of the two seeds that tried each rate, where both read their source. It
    describes."""
    arms, lengths = (protocol.SMALL, protocol.DEEP, protocol.BRANCH), (protocol.RUNG_UPDATES, protocol.UPDATES)
    data = pd.read_csv(HERE / "rungs-choice.csv")
    data = data[data["seed"].isin(protocol.CHOICE_SEEDS) & data["arm"].isin(arms)]
    both = data.groupby(["layers", "updates", "arm", "lr"]).agg(loss=("loss", "mean"), read=("eligible", "min"))
    losses = both[both["read"] == 1]["loss"]
    rates = sorted(losses.index.unique("lr"))
    rows = [
        (
            layers,
            f"{updates:,}",
            title(arm),
            *(number(losses.get((layers, updates, arm, rate), math.nan), ".2f") for rate in rates),
        )
        for layers, updates, arm in product(protocol.LAYERS, lengths, arms)
    ]
    return table(("layers a side", "updates", "arm", *(f"{rate:g}" for rate in rates)), rows)


def third() -> list[str]:
    """The runs of the third comparison that are in: how many models read their source, how many encoders collapsed."""
    found = judge.shares(judge.models_of(judge.TABLES)).sort_values(
        ["layers", "arm"], key=lambda own: own if own.name == "layers" else own.map(protocol.SEARCHED_ARMS.index)
    )
    rows = [
        (title(row["arm"]), row["layers"], f"{protocol.SEARCH[row['arm']][row['layers']]:g}", f"{row['n']} of "
         f"{len(protocol.JUDGED_SEEDS)}", row["reads"], row["constant"], interval(row["low"], row["high"], ".2f"))
        for row in found.to_dict("records")
    ]  # fmt: skip
    first = ("arm", "layers a side", "learning rate", "runs that are in", "read their source")
    return table((*first, "constant encoder", "share of constant encoders, 95 %"), rows)


def third_answers() -> list[str]:
    """The four questions of the third comparison: a difference is shown when all of its runs are in."""
    models, halved = judge.models_of(judge.TABLES), judge.models_of(judge.HALVED, 0.5)
    rows = []
    for row, question in zip(judge.table(models).to_dict("records"), judge.QUESTIONS, strict=True):
        shown = ("", "", "", "")
        if not row["answer"].startswith("open"):
            tested = "conditional" if row["conditional"] else number(row["p_holm"], ".2g")
            shown = (number(row["mean"]), interval(row["low"], row["high"]), row["n"], tested)
        at_half = judge.robustness(question, models, halved).said()
        rows.append((asked(question), *shown, row["answer"], at_half))
    columns = ("question", "difference [nats/token]", "95 % over seeds", "n", "p (Holm)", "answer", "at half the rates")
    return table(columns, rows)


def third_half() -> list[str]:
    """The four questions at half the rates, beside the same seeds at the rates themselves."""
    models, halved = judge.models_of(judge.TABLES), judge.models_of(judge.HALVED, 0.5)
    rows = []
    for question in judge.QUESTIONS:
        found = judge.robustness(question, models, halved)
        parts = (found.at, found.half, found.change)
        told = [f"{number(one.mean)} {interval(one.low, one.high)}" if one.n else "" for one in parts]
        rows.append((question.id, *told, found.half.n, found.said()))
    columns = ("question", "at the rates of the search", "at half of them", "change, by seed", "n", "judgement")
    return table(columns, rows)


def third_losses() -> list[str]:
    """What the third comparison's models end with: the arms of which all runs are in, compared where all of them read
    their source. It describes."""
    models, base = judge.models_of(judge.TABLES), protocol.SMALL
    whole = {place for place, runs in models.items() if len(runs) == len(protocol.JUDGED_SEEDS)}
    read = {place for place in whole if all(model.eligible for model in models[place].values())}
    rows = []
    for layers, arm in product(protocol.LAYERS, protocol.SEARCHED_ARMS):
        if (arm, layers) not in whole:
            continue
        runs = models[arm, layers].values()
        own, paired = t_interval(model.loss for model in runs), ("", "")
        if arm != base and {(arm, layers), (base, layers)} <= read:
            gap = judge.apart(models, arm, base, layers)
            paired = (number(gap.mean), interval(gap.low, gap.high))
        ends, worth = interval(own.low, own.high, ".3f"), span(pd.Series([model.worth for model in runs]))
        rate = f"{protocol.SEARCH[arm][layers]:g}"
        rows.append((title(arm), layers, rate, number(own.mean, ".3f"), ends, *paired, own.n, worth))
    loss, minus = "loss on the test set [nats/token]", f"minus {title(base)}, by seed"
    first, last = ("arm", "layers a side", "learning rate"), ("n", "the source is worth [nats/token]")
    return table((*first, loss, "95 %", minus, "95 %", *last), rows)


def third_claims() -> list[str]:
    """What the third comparison says about the claims on trained models, at each depth that is complete (again.py)."""
    data = pd.read_csv(judge.TABLES / "claims.csv", dtype={"layers": str}, keep_default_na=False)
    rows = []
    for row in data[data["role"] == "primary"].sort_values("claim", kind="stable").to_dict("records"):
        mean, low, high = (row["why"] or f"{float(row[end]):.3g}" for end in ("mean", "low", "high"))
        found = row["why"] or f"{row['effect']}: {mean} [{low}, {high}]"
        rows.append((row["claim"], CLAIMS[row["claim"]].sentence, row["layers"], found, row["n"], row["verdict"]))
    return table(("claim", "says", "layers a side", "measured", "n", "by its rule"), rows)


BLOCKS: page_blocks.Blocks = {
    "answers": answers, "arms": arms, "choice": choice, "deepest": deepest, "ramps": ramps, "source": source,
    "collapse": collapse, "growths": growths, "lower": lower, "rungs": rungs, "equal_rates": equal_rates,
    "third": third, "third_losses": third_losses, "third_claims": third_claims, "third_answers": third_answers,
    "third_half": third_half,
    "searched_ramps": searched_ramps.block, "map": collapse_map.answers, "map_cells": collapse_map.outcomes,
    "standing": verdicts.standing,
    "start": lambda: verdicts.of_stage(verdicts.START), "early": lambda: verdicts.of_stage(verdicts.EARLY),
    "trained": lambda: verdicts.of_stage(verdicts.TRAINED),
}  # fmt: skip


def renewed(text: str) -> str:
    """A page with its blocks and marked numbers made anew; raises KeyError for one that nothing makes."""
    return inline.renewed(page_blocks.renewed(text, BLOCKS))


def main() -> int:
    return page_blocks.main(__doc__, PAGES, renewed)


if __name__ == "__main__":
    sys.exit(main())
