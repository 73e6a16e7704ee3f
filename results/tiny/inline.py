"""Single numbers within the sentences of the pages: ``<!--=C20-->.56 [.54, .57]<!--/-->``."""

from __future__ import annotations

import re

import collapse_map
import judge
import questions
import verdicts
from cells import losses
from sources import NOTHING, of_comparison, reading

from stabilitylab.experiments import protocol

DIGITS = 2
ARMS = {
    "postln": protocol.POST, "preln": protocol.PRE, "T1": protocol.SMALL, "deepnorm": protocol.DEEP,
    "branchnorm": protocol.BRANCH,
}  # fmt: skip
MARKED = re.compile(r"<!--=([\w:]+)-->.*?<!--/-->", re.DOTALL)


def renewed(text: str) -> str:
    """A page with its marked numbers made anew; raises KeyError for one that nothing makes."""
    return MARKED.sub(lambda match: f"<!--={match[1]}-->{value(match[1])}<!--/-->", text)


def value(name: str) -> str:
    """What a name stands for: a claim's primary effect with its interval, with as many digits after the point as
    ``C39:3`` says; the mean difference of one of the four questions; a count of claims; the difference of two arms of
    the third comparison, at so many layers a side (``third:deepnorm:T1:6``); the difference that answers a question at
    half the rates (``half:P4``); the ratio of BranchNorm's largest reading rate to DeepNorm's in the map, at so many
    layers a side (``map:6``); or a count of runs of the withdrawn comparison."""
    if claim := re.fullmatch(r"(C\d\d)(?::(\d))?", name):
        return _effect(claim[1], int(claim[2] or DIGITS))
    if name in ("claims", "late", "withdrawn"):
        return verdicts.count(name)
    if re.fullmatch(r"P\d", name):
        return _short(float(questions.table(losses).set_index("id").loc[name, "mean"]))  # type: ignore[arg-type]
    if name.startswith("map:"):
        layers = int(name.removeprefix("map:"))
        _, _, known = collapse_map.whole(collapse_map.trials())[layers]
        found = collapse_map.question(known, layers).found
        mean, low, high = (_short(2.0**power) for power in (found.mean, found.low, found.high))
        return f"{mean} [{low}, {high}]"
    if name.startswith("half:"):
        question = next(one for one in judge.QUESTIONS if one.id == name.removeprefix("half:"))
        gap = judge.robustness(question, judge.models_of(judge.TABLES), judge.models_of(judge.HALVED, 0.5)).half
        return f"{_short(gap.mean)} [{_short(gap.low)}, {_short(gap.high)}]"
    if name.startswith("third:"):
        first, second, layers = name.removeprefix("third:").split(":")
        gap = judge.apart(judge.models_of(judge.TABLES), ARMS[first], ARMS[second], int(layers))
        return f"{_short(gap.mean)} [{_short(gap.low)}, {_short(gap.high)}]"
    data = reading()[of_comparison(reading())]
    own = {"unread": data, **{f"unread:{arm}": data[data["arm"] == arm] for arm in (protocol.DEEP, protocol.BRANCH)}}
    return f"{int((own[name]['worth'] < NOTHING).sum())} of {len(own[name])}"


def _effect(claim: str, digits: int) -> str:
    row = verdicts.ledger().loc[claim]
    mean, low, high = (_short(float(row[f"effect_{end}"]), digits) for end in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _short(number: float, digits: int = DIGITS) -> str:
    """So many digits after the point, and none before it where that is 0."""
    return re.sub(r"^(-?)0\.", r"\1.", f"{round(number, digits) + 0.0:.{digits}f}")
