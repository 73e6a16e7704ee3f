"""The ledger of claims as tables: one a stage of the runs, and the verdicts that were withdrawn.

A verdict on trained models is withdrawn where models ignore their source: it describes language models then, and the
claim is about translators. ``MODELS`` names the trained models that such a verdict compares. When the third comparison
is complete at both depths, its judgements (again.py) take the place of those of the same claims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pandas as pd
from cells import HERE
from page_blocks import table
from sources import NOTHING, of_comparison, of_growths, of_ramps, reading

from stabilitylab.experiments import protocol
from stabilitylab.reports import CLAIMS
from stabilitylab.reports.statistics import holm

Rows = Callable[[pd.DataFrame], pd.Series]
START, EARLY, TRAINED = "initialisation", "first updates", "after training"  # the stages of claims
NAMED_LATER = "its primary effect was named when runs of it had been seen (2026-11-22)"  # in claims.csv
PAPERS = ("BranchNorm", "DeepNet", "Admin")
DECIDED = ("reproduced", "contradicted", "not reproduced", "inconclusive")
AGAIN, BOTH = HERE / "third" / "claims.csv", "6 and 18"  # layers a side
LEVEL = 0.025  # of each end of a 95 % interval


def _pair(data: pd.DataFrame) -> pd.Series:
    return of_comparison(data) & data["arm"].isin((protocol.DEEP, protocol.BRANCH))


def _deep(data: pd.DataFrame) -> pd.Series:
    return _pair(data) & (data["layers"] == 18)


MODELS: Mapping[str, Rows] = {
    "C10": _deep,
    "C37": _pair,
    "C38": of_ramps,
    "C39": of_growths,
    "C41": _deep,
    "C43": _deep,
    "C44": lambda data: _deep(data) & (data["arm"] == protocol.BRANCH),
    "C47": _pair,
}


@cache
def ledger() -> pd.DataFrame:
    """One row a claim, its primary effect where it has one."""
    data = pd.read_csv(HERE / "claims.csv").astype(object)
    data = data.where(data.notna(), None)
    own = data[(data["effect_role"] == "primary") | data["why"].notna()].drop_duplicates("id").set_index("id")
    own = own.assign(stage=[CLAIMS[str(id)].stage for id in own.index]).sort_index()
    return _corrected(_renewed(own))


@cache
def judged_again() -> pd.DataFrame:
    """The primary effects of the claims that the third comparison judges at both depths; none before it is complete."""
    data = pd.read_csv(AGAIN, dtype={"layers": str}).astype(object)
    data = data.where(data.notna(), None)
    return data[(data["layers"] == BOTH) & (data["role"] == "primary")].set_index("claim")


def _renewed(own: pd.DataFrame) -> pd.DataFrame:
    """``own`` with the judgements of the third comparison in the place of those before."""
    own = own.copy()
    for id, new in judged_again().iterrows():
        own.loc[id, ["verdict", "why"]] = new[["verdict", "why"]].to_numpy()
        for name in ("effect", "mean", "low", "high", "n", "p"):
            own.loc[id, f"effect_{name}"] = new[name]
    return own


def _corrected(own: pd.DataFrame) -> pd.DataFrame:
    """``own`` with Holm's correction over the published claims of each paper: a claim that was not tested has p = 1."""
    own = own.copy()
    published = own[own["kind"] == "published"]
    for _, claims in published.groupby("paper"):
        p_values = [
            1.0 if why or p is None else float(p) for why, p in zip(claims["why"], claims["effect_p"], strict=True)
        ]
        for id, adjusted in zip(claims.index, holm(p_values), strict=True):
            is_decided = own.loc[id, "verdict"] in DECIDED[:3]
            own.loc[id, "survives"] = adjusted < LEVEL if is_decided else None
    return own


def ignoring(id: str) -> tuple[int, int]:
    """Return how many of the models that a claim compares ignore their source, and how many models there are."""
    if id not in MODELS or id in judged_again().index:
        return 0, 0
    own = reading()[MODELS[id](reading())]
    return int((own["worth"] < NOTHING).sum()), len(own)


def verdict(id: str) -> str:
    """The verdict of a claim, in words."""
    claim = ledger().loc[id]
    if claim["why"]:
        return f"not testable: {claim['why']}"
    count, n = ignoring(id)
    return f"withdrawn ({claim['verdict']}): {count} of {n} models ignore their source" if count else claim["verdict"]


def measured(claim: Mapping[str, Any]) -> str:
    """The primary effect of a claim with its interval and its number of seeds."""
    if claim["why"]:
        return ""
    mean, low, high = (claim[f"effect_{name}"] for name in ("mean", "low", "high"))
    if mean is None:
        return f"{claim['effect_effect']}: not measured"
    size = f"[{low:.3g}, {high:.3g}]" if low is not None else ""
    return f"{claim['effect_effect']}: {mean:.3g} {size}, n = {claim['effect_n']:.0f}"


def before(claim: Mapping[str, Any]) -> str:
    """The answer to: was everything that decides set before its data were seen?"""
    if claim["after"]:
        return "no" if NAMED_LATER in claim["after"] else f"no: {claim['after']}"
    return "yes, informed by a pilot" if claim["pilot"] else "yes"


def of_stage(stage: str) -> list[str]:
    """The claims of one stage."""
    survives = {True: "survives", False: "does not survive"}
    rows = []
    for id, claim in ledger().iterrows():
        if claim["stage"] == stage:
            holm = "" if verdict(str(id)).startswith("withdrawn") else survives.get(claim["survives"], "")
            rows.append((id, claim["sentence"], measured(claim), verdict(str(id)), holm, before(claim)))
    return table(("claim", "says", "measured", "judgement", "Holm", "set before its data"), rows)


def standing() -> list[str]:
    """The number of verdicts of each kind by paper, and of those that survive Holm's correction."""
    rows = []
    for paper in (*PAPERS, "other papers"):
        own = [(str(id), c) for id, c in ledger().iterrows() if _paper(c) == paper]
        said = [verdict(id).partition(" (")[0].partition(":")[0] for id, _ in own]
        counts = [said.count(word) for word in (*DECIDED, "withdrawn", "not testable")]
        holds = sum(bool(c["survives"]) and words != "withdrawn" for (_, c), words in zip(own, said, strict=True))
        rows.append((paper, len(own), *counts, holds))
    return table(("paper", "claims", *DECIDED, "withdrawn", "not testable", "survive Holm"), rows)


def count(name: str) -> str:
    """A number of claims for a sentence: ``claims``, ``late`` (set after its data), ``withdrawn``."""
    rows = list(ledger().iterrows())
    found = {
        "claims": len(rows),
        "late": sum(before(claim).startswith("no") for _, claim in rows),
        "withdrawn": sum(verdict(str(id)).startswith("withdrawn") for id, _ in rows),
    }
    return str(found[name])


def _paper(claim: Mapping[str, Any]) -> str:
    return claim["paper"] if claim["paper"] in PAPERS else "other papers"
