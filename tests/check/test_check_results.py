"""results/check: the counts that are promised, rows that are what the check says now, and pages that say the same."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loose_scripts import scripts_of

HERE = Path(__file__).resolve().parents[2] / "results" / "check"
BY_HAND = ("GPT by hand", "LSTM", "causal convolutions", "MLP-Mixer", "regression", "variational autoencoder")


def rows(name: str) -> list[dict[str, str]]:
    with (HERE / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    with scripts_of("results/check", "results") as load:
        yield load


def test_at_most_one_healthy_model_fails_and_ten_broken_ones_do() -> None:
    healthy, broken = rows("healthy"), rows("broken")
    assert (len(healthy), len(broken)) == (30, 12)
    assert len({row["family"] for row in healthy}) >= 20
    assert sum(row["ok"] != "True" for row in healthy) <= 1
    assert sum(row["ok"] == "False" and row["first"] in row["reasons"].split("; ") for row in broken) >= 10
    assert all(row["without the fault ok"] == "True" for row in broken)


def test_limits_were_set_on_other_models(scripts: Any) -> None:
    others = {row["model"] for row in rows("calibration")}
    assert len(others) == 42
    assert not others & {row["model"] for row in rows("healthy")}
    assert others == {entry.name for entry in scripts("calibration").ENTRIES}


def test_every_healthy_calibration_model_passes() -> None:
    failing = [row["model"] for row in rows("calibration") if row["times"] == "1" and row["ok"] != "True"]
    assert not failing, failing


@pytest.mark.parametrize("name", BY_HAND)
def test_a_healthy_row_is_what_the_check_says_now(scripts: Any, name: str) -> None:
    (entry,) = [own for own in scripts("healthy").ENTRIES if own.name == name]
    (row,) = [own for own in rows("healthy") if own["model"] == name]
    assert scripts("judge").healthy(entry) == row


@pytest.mark.slow
def test_broken_rows_are_what_the_check_says_now(scripts: Any) -> None:
    """All that need no other library, but for the last digits of what was measured."""
    judge = scripts("judge")
    made = [one for one in scripts("broken").BROKEN if one.twin.__name__ != "gpt2"]
    assert len(made) >= 8
    told = {row["fault"]: {**row, "measured": ""} for row in rows("broken")}
    for one in made:
        assert {**judge.broken(one), "measured": ""} == told[one.name]


@pytest.mark.slow
def test_all_healthy_rows_are_what_the_check_says_now(scripts: Any) -> None:
    pytest.importorskip("transformers")
    judge = scripts("judge")
    assert [judge.healthy(entry) for entry in scripts("healthy").ENTRIES] == rows("healthy")


def test_the_page_says_what_the_tables_say(scripts: Any) -> None:
    judge = scripts("judge")
    text = judge.PAGE.read_text(encoding="utf-8")
    assert judge.anew(text) == text
    block = text.index("<!-- results:counts -->")
    place = next(at for at in range(block + len("<!-- results:counts -->"), len(text)) if text[at].isdigit())
    changed = f"{text[:place]}{(int(text[place]) + 1) % 10}{text[place + 1 :]}"
    assert judge.anew(changed) == text


def test_help_and_readme_say_the_counts(run: Any) -> None:
    healthy, broken = rows("healthy"), rows("broken")
    false, right = (sum(row[key] == value for row in own) for own, key, value in
                    ((healthy, "ok", "False"), (broken, "right", "True")))  # fmt: skip
    told = " ".join(run("check", "--help")[1].replace("│", " ").split())
    assert (
        f"broken in {false} of {len(healthy)} healthy small models and in {right} of {len(broken)} with a fault" in told
    )
    readme = " ".join((HERE / "README.md").read_text(encoding="utf-8").split())
    assert f"fails {false} of {len(healthy)} healthy small models, and {right} of {len(broken)} with a fault" in readme
    largest = max(float(row["loss at start"]) for row in rows("calibration") if row["times"] == "1")
    change = max(float(row["output change"]) for row in rows("calibration") if row["times"] == "1")
    assert f"calibration.csv goes up to {largest:.2f}; weights" in readme
    assert f"calibration.csv goes up to {change:.2f}, and".replace(" 0.", " .") in readme
