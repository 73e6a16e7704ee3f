"""What is said of forecasts, held against what was stored: the page, README, the table of errors, the fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from made_tables import told_by_the_range_test, write

from stabilitylab.forecast import fitted

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "results" / "forecast"
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")


def apart(text: str) -> tuple[str, list[float]]:
    """A text without its numbers, and these: a last digit may differ on another processor."""
    return NUMBER.sub("#", text), [float(number) for number in NUMBER.findall(text)]


def same(one: str, other: str, by: float = 0.021) -> bool:
    words, numbers = apart(one)
    others = apart(other)
    return words == others[0] and np.allclose(numbers, others[1], rtol=by, atol=by)


def test_the_page_says_what_the_ledger_says(scripts: Any) -> None:
    for page in scripts.tell.PAGES:
        text = page.read_text(encoding="utf-8")
        assert same(text, scripts.tell.anew(text)), "python results/forecast/tell.py --write"


def test_the_table_of_errors_and_the_fit_follow_from_the_ledger(scripts: Any) -> None:
    stored = fitted()
    if stored is None:
        assert not (FOLDER / "scores.md").exists(), "a table of errors, and no fit: python results/forecast/fit.py"
        return
    made = scripts.fit.fitted(FOLDER)
    assert same(made.errors, stored.errors)
    assert (made.goal, made.final_goal) == (stored.goal, stored.final_goal)
    assert made.version == stored.version
    assert (made.runs, made.archs) == (stored.runs, stored.archs)
    score, load = scripts.score, scripts.loading.load
    tables, new, last = (load(FOLDER, seeds) for seeds in (scripts.truth.SEEDS, score.NEW, score.FINAL))
    edges = [
        [fit.line.edge(x) for x in scripts.loading.x_of(tables, tables.edges).to_dict("records")]
        for fit in (made, stored)
    ]
    np.testing.assert_allclose(*edges, atol=0.01)
    own = score.judged(tables)[0], score.judged(new)[0], score.final(last)
    for name, found in zip(("scores.md", "new-seeds.md", "final.md"), own, strict=True):
        assert same(found.text, (FOLDER / name).read_text().split("\n", 1)[1]), f"{name}: score.py"


def test_readme_says_what_a_forecast_is_worth() -> None:
    stored = fitted()
    row = next(
        line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `check`, `forecast`")
    )
    if stored is None:
        assert "until its fit is made" in row
        return
    assert ("misses its goals" in row) == (not (stored.goal and stored.final_goal))
    numbers = re.search(
        r"off by a factor of (\S+) \(median; the median edge of the others: (\S+)\), within 2 for (\d+)% of \d+ "
        r"\(goal: (\d+)%\); .* names the right one (\d+)% .* At (\d+) layers, .* within 2 for (\d+)% of",
        stored.errors,
    )
    assert numbers
    off, others, near, goal, right, layers, deep = numbers.groups()
    assert (
        f"on architectures left out the edge is off by a factor of {off} (the median edge of the others: {others}), "
        f"within 2 for {near} % of them (at {layers} layers {deep} %) where {goal} % was the goal; of two, one of "
        f"which fails, it names that one {right} % of the time"
    ) in row


def test_blocks_of_a_ledger(scripts: Any, tmp_path: Path) -> None:
    write(tmp_path, scripts.truth, told_by_the_range_test)
    nothing = scripts.tell.Ledger(tmp_path, tmp_path / "fitted.json").blocks
    assert nothing["worth"]() == [scripts.tell.NOT_YET]
    assert nothing["scores"]() == [scripts.tell.NO_SCORES]
    assert nothing["new"]() == [scripts.tell.NO_SCORES]
    assert nothing["final"]() == [scripts.tell.NO_FINAL]
    runs = len((tmp_path / "runs.csv").read_text().splitlines()) - 1
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in nothing["known"]()[2:]]
    assert [row[:5] for row in rows] == [[n, w, "10", "3, 4, 5", "30"] for n in ("12", "36") for w in ("0", "40")]
    assert sum(int(row[5]) for row in rows) == runs

    made = scripts.fit.fitted(tmp_path)
    made.write(tmp_path / "made.json")  # a path that was read once is not read again
    [line] = scripts.tell.Ledger(tmp_path, tmp_path / "made.json").blocks["worth"]()
    assert made.errors in line
    for name, block in (("scores", "scores"), ("new-seeds", "new"), ("final", "final")):
        (tmp_path / f"{name}.md").write_text(f"<!-- written by score.py -->\n| {name} | b |\n")
        assert scripts.tell.Ledger(tmp_path).blocks[block]() == [f"| {name} | b |"]
