"""The committed second corpus: what was frozen is what is there, its tables and the package's rules follow from it, and
pages say what tables say."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from rest_slow import complete

from stabilitylab.alarm import fitted
from stabilitylab.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "results" / "alarm" / "second"
FROZEN = "3c4dcbda7827bc28"  # committed before the test half was gathered


@pytest.fixture
def lines(scripts: Any) -> Any:
    """``lines("alarms")``: the rows of a committed table."""
    return lambda name: list(scripts("second_corpus").lines(HERE, f"{name}.csv"))


def percent(line: dict[str, str]) -> str:
    return f"{100 * float(line['share']):.0f} %"


def test_what_was_frozen_is_what_is_there(scripts: Any, lines: Any) -> None:
    freeze = scripts("second_freeze")
    frozen, _ = freeze.load(HERE)
    assert freeze.digest(HERE / "frozen.json") == FROZEN
    assert frozen["features"] == {name: freeze.digest(HERE / name) for name in frozen["features"]}
    chosen = {line["seed"] for line in lines("runs") if line["half"] == "choose"}
    assert {f"features/seed-{seed}.parquet" for seed in chosen} == {*frozen["features"]}


def test_the_corpus_is_whole(lines: Any) -> None:
    halves = [line["half"] for line in lines("runs")]
    assert {half: halves.count(half) for half in halves} == {"choose": 396, "test": 660, "calibrate": 400}
    assert sum(path.stat().st_size for path in (HERE / "features").iterdir()) < 20e6


def test_the_package_has_the_rules_that_the_goals_allow(scripts: Any, lines: Any) -> None:
    """Weights and thresholds are the frozen ones, and rates are those of the table; the whole is made again by the slow
    test."""
    publish = scripts("second_publish")
    frozen, _ = scripts("second_freeze").load(HERE)
    told = {line["threshold"]: line for line in lines("alarms") if line["rule"] == "combination"}
    wanted = {"default": ["0.03 union"] if publish.reached() else [], "loud": ["0.2"]}
    for name, limits in wanted.items():
        rules = fitted(name)
        assert rules.fitted == FROZEN
        assert [rule.name for rule in rules.rules] == ["combination"] * len(limits)
        for rule, at in zip(rules.rules, limits, strict=True):
            assert dict(rule.weights) == frozen["fit"]["weights"]
            assert rule.threshold == pytest.approx(frozen["thresholds"]["combination"][at], abs=1e-12)
            assert rule.measured is not None
            assert rule.measured.announced[0] == pytest.approx(float(told[at]["announced"]), abs=1e-4)
            assert rule.measured.events == int(told[at]["announced_of"])
    with pytest.raises(UsageError, match="no rules 'both'; there are default and loud"):
        fitted("both")


def test_pages_say_what_tables_say(scripts: Any) -> None:
    say = scripts("second_say")
    assert say.page_blocks.differing(say.PAGES, say.anew) == []


def test_help_and_readme_say_the_shares(run: Any, lines: Any) -> None:
    """What diagnose and the alarm did on the test half, in one sentence each, and which goals were missed."""
    found = {line["measure"]: line for line in lines("findings")}
    healthy = found["healthy runs accused by diagnose"]
    ill, both = found["failures said to be ill by diagnose"], found["failures said to be ill by diagnose or the alarm"]
    cause = found["right cause first, of what can be known"]
    goals = {line["goal"]: line["reached"] for line in lines("verdict")}
    missed = [goal for goal, reached in goals.items() if reached != "1"]
    assert missed == ["healthy runs accused"], "the words below say which goal is missed"

    helped = " ".join(run("diagnose", "--help")[1].replace("│", " ").split())
    assert f"{percent(healthy)} of {healthy['share_of']} healthy" in helped
    assert f"{percent(ill)} of {ill['share_of']} failures ({percent(both)} with the alarm)" in helped
    assert f"right cause first in {percent(cause)} of {cause['share_of']}" in helped
    worst = [found[f"healthy runs accused by diagnose or the alarm: {arch}"] for arch in ("sandwich", "subln")]
    together = found["healthy runs accused by diagnose or the alarm"]
    assert f"with the alarm the share is {percent(worst[0])[:-2]} and {percent(worst[1])} for Sandwich-LN" in helped
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{percent(healthy)} of the healthy and {percent(ill)} of the failures" in readme
    assert f"right cause first in {percent(cause)}" in readme

    helped = " ".join(run("alarm", "--help")[1].replace("│", " ").split())
    for name in ("default", "loud"):
        [rule] = fitted(name).rules
        told = rule.measured
        assert told is not None
        accused = f"{round(told.accused[0] * told.healthy)} of {told.healthy} healthy runs"
        assert f"{accused} and announced {100 * told.announced[0]:.0f} %" in helped, name
    told = f"One goal was missed: the alarm and diagnose together accused {percent(together)} of the healthy runs, and"
    assert f"{told} the goal was at most 5 %." in helped


def test_prose_says_what_tables_say(scripts: Any, lines: Any) -> None:
    """Sentences of docs outside the blocks: shares with their intervals."""
    say = scripts("second_say")
    alarms = {line["threshold"]: line for line in lines("alarms") if line["rule"] == "combination"}
    share = {line["measure"]: say.with_ends(line, "share") for line in lines("findings")}
    of = {line["measure"]: line["share_of"] for line in lines("findings")}
    default, loud = (say.with_ends(alarms[at], "announced") for at in ("0.03 union", "0.2"))
    events, lead = alarms["0.2"]["announced_of"], say.whole(alarms["0.03 union"]["lead"])
    healthy, ill = "healthy runs accused by diagnose", "failures said to be ill by diagnose"
    plain, right = f"{healthy}, without the calibration's sets", "right cause first, of what can be known"
    wanted = {
        "alarm": (
            f"announces {default} of {events} events, with a median lead of {lead} rows",
            f'`alarm="loud"` announces {loud} of them',
            f"say of {share[f'{ill} or the alarm']} of the failures that they are ill",
            f"They accuse {share[f'{healthy} or the alarm']} of {of[healthy]} healthy runs",
        ),
        "diagnose": (
            f"{share[healthy]} of {of[healthy]}; with the default alarm {share[f'{healthy} or the alarm']}",
            f"`diagnose` accuses {share[plain]} of {of[plain]}",
            f"{share[ill]} of {of[ill]}; with the default alarm {share[f'{ill} or the alarm']}",
            f"{share[right]} of the {of[right]} runs",
            f"({of['no wrong cause, of what cannot be known']} runs), no wrong cause was named",
        ),
    }
    for name, sentences in wanted.items():
        page = " ".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").split())
        assert [text for text in sentences if text not in page] == []


@pytest.mark.slow
@complete
def test_tables_follow_from_the_features(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table, made again; and the rules of the package."""
    score, publish = scripts("second_score"), scripts("second_publish")
    monkeypatch.setattr(scripts("second_corpus"), "refuse_unfrozen", lambda folder: None)
    for name in ("runs.csv", "frozen.json", "features"):
        (tmp_path / name).symlink_to(HERE / name)
    score.tables(tmp_path)
    for path in sorted(tmp_path.glob("*.csv")):
        with path.open(newline="") as made, (HERE / path.name).open(newline="") as committed:
            for one, other in zip(csv.DictReader(made), csv.DictReader(committed), strict=True):
                assert one.keys() == other.keys()
                for key, value in one.items():
                    assert value == other[key] or float(value) == pytest.approx(float(other[key]), rel=1e-3), path.name
    publish.main(tmp_path, tmp_path)
    ours, theirs = (folder / "fitted.json" for folder in (tmp_path, ROOT / "stabilitylab" / "alarm"))
    assert ours.read_text() == theirs.read_text()
