"""Whether decoders read their source: what it is worth, and what ``diagnose`` said of it."""

from __future__ import annotations

import math
from functools import cache

import pandas as pd
from cells import SECOND, cells, interval, number, states, title
from page_blocks import table

from stabilitylab.experiments import protocol
from stabilitylab.reports.statistics import t_interval

NOTHING = 0.01  # nats a token: what `diagnose` calls a source that is worth nothing
KINDS = (("nothing", -math.inf, NOTHING), ("less than a nat", NOTHING, 1.0), ("a nat or more", 1.0, math.inf))
GROWTHS = {protocol.BRANCH: "linear", f"{protocol.BRANCH} exp": "exponential", f"{protocol.BRANCH} sigmoid": "sigmoid"}


@cache
def reading() -> pd.DataFrame:
    """A row a run that source.csv has: what its own source is worth, and what diagnose said of its cross-attention:
    ``warned``, and the step at which that collapse began."""
    keys = ["arm", "layers", "seed", "lr", "T", "updates"]
    found = pd.read_csv(SECOND / "source.csv")
    said = pd.read_csv(SECOND / "collapse.csv")
    said = said[said["sublayer"] == "cross_attn"].groupby(keys).agg(begun=("begun", "min"), worst=("severity", "max"))
    found = found.merge(said.reset_index(), on=keys, how="left")
    return found.assign(worth=found["other"] - found["own"], warned=found["worst"] == "warning")


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
