"""docs/figures.md, what agrees with the papers' figures: a line for each figure, verdicts as the ledger has them, and
sentences that the committed tables bear out."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd

from stabilitylab.reports.base import FIGURES

ROOT = Path(__file__).resolve().parents[2]
DRAWN = ROOT / "results" / "tiny" / "figures"
PAPERS = ("branchnorm", "deepnet", "admin")


def rows() -> dict[str, tuple[str, str]]:
    """Figure -> (sentence, claims)."""
    page = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `([\w:]+)` \| (.+) \| (.+) \|$", page, re.MULTILINE)
    return {figure: (sentence, claims) for figure, sentence, claims in found}


def verdicts() -> dict[str, str]:
    """Claim -> the first word of its verdict in the ledger."""
    page = (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")
    lines = [re.split(r" \| ", line.strip("| ")) for line in page.splitlines() if re.match(r"\| C\d\d \|", line)]
    return {cells[0]: re.split(r": | \(", cells[3])[0] for cells in lines}


def drawn(figure: str) -> dict[tuple[str, str], np.ndarray]:
    """(Panel, series) -> the drawn numbers."""
    data = pd.read_csv(DRAWN / f"{figure.replace(':', '-')}.csv")
    return {key: own["y"].to_numpy() for key, own in data.groupby(["panel", "series"])}


def test_every_figure_of_the_papers_has_its_line() -> None:
    assert sorted(rows()) == sorted(id for id in FIGURES if id.partition(":")[0] in PAPERS)
    assert not any(re.search(r"\d\.\d", sentence.replace("Section 5.1", "")) for sentence, _ in rows().values()), (
        "numbers stand in the ledger"
    )


def test_the_verdicts_are_the_ledgers() -> None:
    with (ROOT / "results" / "tiny" / "claims.csv").open(newline="") as file:
        of = {line["id"]: line["figure"] for line in csv.DictReader(file)}
    known, expected = verdicts(), defaultdict(dict)
    for claim, figure in of.items():
        expected[figure][claim] = known[claim]
    for figure, (_, told) in rows().items():
        groups = re.findall(r"([a-z ]+?) ((?:C\d\d(?:, )?)+)", told)
        found = {claim: verdict.strip() for verdict, claims in groups for claim in claims.split(", ") if claim}
        assert found == expected[figure], figure


def test_the_sentences_are_what_is_drawn() -> None:
    quality = drawn("branchnorm:1")
    postln, deepnorm = quality["Quality", "Post-LN gain=1"], quality["Quality", "DeepNorm"]
    assert (deepnorm < postln).all()
    assert deepnorm[1] - postln[1] < 2 * (deepnorm[0] - postln[0])
    assert (drawn("branchnorm:4")["Against DeepNorm", "BranchNorm"] > 0).all()
    data = drawn("branchnorm:5")
    gains = [own[0] - own[-1] for (panel, name), own in data.items() if not panel.startswith("1%") and len(own) == 3]
    assert len(gains) == 4
    assert max(gains) < 0.05
    growth = drawn("branchnorm:7")
    assert np.abs(growth["Against linear growth", "exp growth"]).max() < 0.05
    assert growth["Held-out loss", "sigmoid growth"][-1] > growth["Held-out loss", "linear growth"][-1] + 2
    alike = drawn("branchnorm:8")
    assert (alike["Encoder", "DeepNorm"][:-1] < alike["Encoder", "BranchNorm"][:-1]).all()
    assert alike["Encoder", "DeepNorm"][-1] > 0.9 * alike["Encoder", "BranchNorm"][-1]
    assert np.abs(np.log(alike["Decoder", "DeepNorm"] / alike["Decoder", "BranchNorm"])).max() < np.log(1.5)
    sparsity = drawn("branchnorm:9")
    for stack in ("Encoder", "Decoder"):
        assert (sparsity[stack, "DeepNorm"] < sparsity[stack, "BranchNorm"]).all()
    ramps = drawn("branchnorm:T")["After training", "lr 0.001"]
    assert abs(ramps[0] - ramps[1]) < 0.05
    assert ramps[2:].min() > ramps[0] + 0.5
    init = drawn("deepnet:3")
    assert init["Held-out loss", "Post-LN-init gain=1"][-1] < init["Held-out loss", "Post-LN gain=1"][-1]
    assert init["Last decoder layer", "Post-LN-init gain=1"].max() < init["Last decoder layer", "Post-LN gain=1"].min()
    early = [drawn("deepnet:4")["Model update", name][-1] for name in (
        "Post-LN gain=1, no warm-up", "Post-LN gain=1, warm-up 4000", "Post-LN-init gain=1, warm-up 4000")]  # fmt: skip
    assert early == sorted(early, reverse=True)
    own = {name: y for (panel, name), y in drawn("deepnet:6").items() if panel == "The papers' own"}
    assert own["DeepNorm"][1] < own["DeepNorm"][0]
    assert own["Post-LN"][1] > own["Post-LN"][0]
    others = [own[name][1] for name in ("Post-LN-init", "Pre-LN", "BranchNorm", "Admin")]
    assert own["DeepNorm"][1] > max(others)
    deep = drawn("deepnet:8")["Quality and three fits", "DeepNorm"]
    assert (np.diff(deep[:4]) < 0).all()
    assert deep[4] > deep[3]
