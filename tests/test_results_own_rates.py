"""results/own_rates_page.py: the tables of a comparison at own rates, on made-up ledgers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from loose_scripts import scripts_of

from stabilitylab.sweep import Ledger

COLUMNS = ("label", "layers", "lr", "steps", "seed", "verdict", "metrics", "data")
TITLES = {"keel": ("KEEL", "#D55E00"), "deepnorm": ("DeepNorm", "#E69F00")}
SEEDS = (3, 4, 5)


@pytest.fixture
def known() -> Iterator[SimpleNamespace]:
    with scripts_of("results") as load:
        yield SimpleNamespace(**{name: load(name) for name in ("own_rates", "own_rates_page")})


@pytest.fixture
def study(known):
    arms = {"keel": {"arch": "keel"}, "deepnorm": {"arch": "deepnorm"}}
    return known.own_rates.Study(
        known.own_rates.DECODERS, lambda layers: arms, (2,), 100, SEEDS, search_seeds=(100, 101)
    )


@pytest.fixture
def out(known, study, tmp_path: Path) -> Path:
    """KEEL ends at 3.0, 3.1 and 3.2; DeepNorm .2 above it, but for seed 5, which got stuck."""
    lines = known.own_rates.Lines(tmp_path / "ledger.csv", COLUMNS)
    labels = {arm: known.own_rates_page.label_of(study, arm, 2) for arm in TITLES}

    def line(arm: str, seed: int, loss: float, verdict: str = "trained", **other: object) -> dict[str, object]:
        own = {"label": labels[arm], "layers": 2, "lr": 0.002, "steps": 100, "seed": seed, "verdict": verdict}
        return {**own, "metrics": f"held_out_nll=9 validation_nll={loss}", "data": "text", **other}

    for seed in SEEDS:
        lines.add(line("keel", seed, 2.7 + seed / 10))
        lines.add(line("deepnorm", seed, 2.9 + seed / 10, "stuck" if seed == 5 else "trained"))
    lines.add(line("keel", 3, 1.0, lr=0.004), line("keel", 3, 1.0, steps=40), line("keel", 100, 1.0))
    lines.add(line("keel", 4, 1.0, label="keel"), line("keel", 4, 1.0, layers=4))
    rates = known.own_rates.Lines(tmp_path / "rates.csv", known.own_rates.COLUMNS)
    rates.add(("keel", 2, 0.002, 1, ""), ("deepnorm", 2, 0.002, 1, ""))
    trials = known.own_rates.Lines(tmp_path / "searches" / "keel-2.csv", ("lr", "updates", "seed", "loss"))
    trials.add((0.001, 40, 100, 5.0), (0.001, 100, 100, 3.4), (0.001, 100, 101, 3.6), (0.002, 100, 100, 3.3))
    trials.add((0.002, 100, 102, 1.0), (0.004, 100, 100, "inf"))
    return tmp_path


def test_runs_at_another_rate_length_label_depth_or_seed_are_not_the_comparison(known, study, out) -> None:
    ends = known.own_rates_page.ends_on_page(study, out)
    assert {seed: end.loss for seed, end in ends["keel", 2].items()} == {3: 3.0, 4: 3.1, 5: 3.2}
    assert {seed: end.failed for seed, end in ends["deepnorm", 2].items()} == {3: False, 4: False, 5: True}


def test_two_texts_in_one_ledger_end_it(known, study, out) -> None:
    text = (out / "ledger.csv").read_text().replace("validation_nll=3.1,text", "validation_nll=3.1,other")
    (out / "ledger.csv").write_text(text)
    with pytest.raises(SystemExit, match="runs of several texts"):
        known.own_rates_page.ends_on_page(study, out)


def test_the_table_of_losses(known, study, out) -> None:
    """KEEL: 3.1, and t(2) sigma / sqrt(3) = 4.3027 * .1 / 1.7321 = .248; DeepNorm: two seeds, each .2 above."""
    lines = known.own_rates_page.losses(study, known.own_rates_page.ends_on_page(study, out), "keel", TITLES)
    assert lines[2:] == [
        "| 2 | KEEL | 3 of 3 | 3 trained | 3.100 | [2.852, 3.348] |  |  |",
        "| 2 | DeepNorm | 3 of 3 | 2 trained, 1 stuck | 3.250 | [2.615, 3.885] | +0.200 | [+0.200, +0.200] |",
    ]
    ends = known.own_rates_page.ends_on_page(study, out)
    del ends["keel", 2][5]
    partly = known.own_rates_page.losses(study, ends, "keel", TITLES)
    assert partly[2:] == [
        "| 2 | KEEL | 2 of 3 | 2 trained |  |  |  |  |",
        "| 2 | DeepNorm | 3 of 3 | 2 trained, 1 stuck | 3.250 | [2.615, 3.885] |  |  |",
    ]
    found = known.own_rates.answered(study, ends, [("deepnorm", "keel", 2)])
    (line,) = known.own_rates_page.answers(found, len(SEEDS), TITLES)[2:]
    assert line == "| P1: DeepNorm - KEEL, 2 layers |  |  | 2 of 3 | 1 | open |"
    empty = known.own_rates_page.losses(study, {}, "keel", TITLES)
    assert empty[2] == "| 2 | KEEL | 0 of 3 |  |  |  |  |  |"


def test_the_order_of_the_arms_names_those_that_fail(known, study, out) -> None:
    ends = known.own_rates_page.ends_on_page(study, out)
    lines = known.own_rates_page.order(study, out, ends, TITLES)
    assert lines == [
        "- 2 layers, from the lowest mean loss to the highest: KEEL (3.100); DeepNorm (3.250).",
        "  DeepNorm: 1 of 3 runs fail.",
    ]
    for end in ends["deepnorm", 2]:
        ends["deepnorm", 2][end] = known.own_rates.End(5.0, True, "stuck")
    lines = known.own_rates_page.order(study, out, ends, TITLES)
    assert lines[0].endswith("highest: KEEL (3.100).")
    del ends["keel", 2][5]
    assert known.own_rates_page.order(study, out, ends, TITLES) == ["No depth is complete yet."]


def test_the_table_of_rates_has_the_searching_seeds_at_the_last_update(known, study, out, tmp_path: Path) -> None:
    lines = known.own_rates_page.rates(study, out, TITLES)
    assert lines[0] == "| layers | arm | own rate | 0.001 | 0.002 | 0.004 |"
    assert lines[2] == "| 2 | KEEL | 0.002 | 3.500 | 3.300 | not finite |"
    assert known.own_rates_page.rates(study, tmp_path / "none", TITLES) == ["No rate is chosen yet."]


def test_the_table_of_answers(known, study, out) -> None:
    ends = known.own_rates_page.ends_on_page(study, out)
    found = known.own_rates.answered(study, ends, [("deepnorm", "keel", 2), ("keel", "deepnorm", 4)])
    lines = known.own_rates_page.answers(found, len(SEEDS), TITLES)
    assert lines[2:] == [
        "| P1: DeepNorm - KEEL, 2 layers | +0.200 | [+0.200, +0.200] | 2 of 3 | 1 | cannot tell |",
        "| P2: KEEL - DeepNorm, 4 layers |  |  | 0 of 3 | 1 | open |",
    ]


def test_the_figure_is_drawn(known, study, out) -> None:
    known.own_rates_page.draw(
        study, known.own_rates_page.ends_on_page(study, out), TITLES, out / "figures" / "trained.png"
    )
    assert (out / "figures" / "trained.png").read_bytes()[:8] == bytes.fromhex("89504e470d0a1a0a")


def test_a_run_found_by_its_line_is_the_run_of_the_settings(known, study, tmp_path: Path) -> None:
    """What the page takes from a line is what judge.py takes from the ledger by all settings."""
    line = {"metrics": "held_out_nll=9 validation_nll=3.5", "verdict": "diverged"}
    assert known.own_rates.end_of_line(line) == known.own_rates.End(3.5, True, "diverged")
    assert known.own_rates.end_of_line({**line, "metrics": "validation_nll=nan", "verdict": "trained"}).failed
    experiment = study.experiment("keel", 2, 1e-3, 3, {"data": {"source": "synthetic"}})
    assert known.own_rates.end_of(Ledger(tmp_path / "ledger.csv"), experiment) is None


@pytest.mark.parametrize(
    ("folder", "mark", "blocks", "arm"),
    [("keel", "keel", (5, 4), "KEEL"), ("deepnorm-baseline", "baseline", (6, 3), "Pre-LN")],
)
def test_the_pages_of_a_study_have_the_tables_that_its_files_make(
    folder: str, mark: str, blocks: tuple[int, int], arm: str
) -> None:
    with scripts_of(f"results/{folder}", "results") as load:
        page = load("page").PAGE
        texts = [path.read_text(encoding="utf-8") for path in page.paths]
        assert [*map(page.renewed, texts)] == texts
        assert (texts[0].count("<!-- results:"), texts[1].count(f"<!-- {mark}:")) == blocks
        assert page.renewed(texts[1].replace(f"| 12 | {arm} |", "| 12 | another |")) == texts[1]
