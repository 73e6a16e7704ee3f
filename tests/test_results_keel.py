"""results/keel: its arms, its rules as code, and what its script would run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loose_scripts import scripts_of

DATA = {"data": {"source": "synthetic"}}
HERE = Path(__file__).resolve().parents[1] / "results" / "keel"


@pytest.fixture
def study() -> Iterator[SimpleNamespace]:
    with scripts_of("results/keel", "results") as load:
        names = ("protocol", "judge", "make", "page", "own_rates", "own_rates_page")
        yield SimpleNamespace(**{name: load(name) for name in names})


def test_arms_and_their_settings(study) -> None:
    assert {*study.protocol.arms(12)} == {"keel", "keel-no-inner", "deepnorm", "branchnorm"}
    assert {*study.protocol.arms(200)} == set(study.protocol.DEEP_ARMS)
    ablation = study.protocol.STUDY.experiment("keel-no-inner", 36, 1e-3, 3, DATA).config
    assert ablation.model.options == {"inner": False}
    branchnorm = study.protocol.STUDY.experiment("branchnorm", 12, 1e-3, 3, DATA).config
    assert (branchnorm.model.T, branchnorm.train.warmup, branchnorm.train.steps) == (40, 100, 1000)
    assert (branchnorm.train.beta2, branchnorm.train.weight_decay, branchnorm.model.stack) == (0.95, 0.01, "decoder")


def test_200_layers_have_two_rates_and_three_seeds(study) -> None:
    runs = list(study.protocol.deep(DATA))
    assert len(runs) == 18
    assert len({experiment.name for *_, experiment in runs}) == 18
    for arm, rate, seed, experiment in runs:
        assert (experiment.config.model.arch, experiment.config.model.decoder_layers) == (arm, 200)
        assert (experiment.config.train.lr, experiment.config.train.seed) == (rate, seed)
        assert (experiment.config.train.steps, experiment.config.train.warmup) == (300, 30)
    assert [experiment.config.model.T for arm, *_, experiment in runs if arm == "branchnorm"] == [12] * 6


def ended(study: Any, *failed: bool) -> dict[int, Any]:
    return {
        seed: study.own_rates.End(3.0, bad, "stuck" if bad else "trained")
        for seed, bad in zip(study.protocol.DEEP_SEEDS, failed, strict=False)
    }


def test_the_largest_rate_at_which_all_seeds_train(study) -> None:
    fine, one, some = ended(study, False, False, False), ended(study, False, True, False), ended(study, False)
    assert study.judge.largest_rate({1e-3: fine, 3e-4: fine}) == "0.001"
    assert study.judge.largest_rate({1e-3: one, 3e-4: fine}) == "0.0003"
    assert study.judge.largest_rate({1e-3: one, 3e-4: one}) == "none"
    assert study.judge.largest_rate({1e-3: one, 3e-4: some}) == study.judge.largest_rate({}) == "open"
    lines = study.judge.deep_table({("keel", 1e-3): one, ("keel", 3e-4): fine})
    assert lines[0] == (
        "keel at 200 layers: 0.001: trained, stuck, trained; 0.0003: trained, trained, trained; "
        "largest rate at which all train: 0.0003"
    )
    assert lines[1] == "deepnorm at 200 layers: 0.001: open; 0.0003: open; largest rate at which all train: open"
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("verdict", "trains"),
    [("trained", True), ("learning", True), ("descending", False), ("cannot tell", False), ("stuck", False)],
)
def test_a_run_trains_below_the_loss_of_word_frequencies(study, verdict: str, trains: bool) -> None:
    own = {seed: study.own_rates.End(3.0, False, verdict) for seed in study.protocol.DEEP_SEEDS}
    assert study.judge.largest_rate({1e-3: own, 3e-4: own}) == ("0.001" if trains else "none")


def test_six_questions(study) -> None:
    def six(loss: float) -> dict[int, Any]:
        return {seed: study.own_rates.End(loss + 0.002 * seed, False) for seed in study.protocol.STUDY.seeds}

    ends = {(arm, 12): six(loss) for arm, loss in (("keel", 3.0), ("deepnorm", 3.2), ("branchnorm", 3.01))}
    lines = study.judge.answers(ends | {("keel-no-inner", 12): six(3.4)})
    assert [line.split(" (")[0] for line in lines] == [
        "P1: keel less deepnorm at 12 layers: better",
        "P2: keel less deepnorm at 36 layers: open",
        "P3: keel less branchnorm at 12 layers: alike",
        "P4: keel less branchnorm at 36 layers: open",
        "P5: keel-no-inner less keel at 12 layers: worse",
        "P6: keel-no-inner less keel at 36 layers: open",
    ]


def test_the_table_of_rates_takes_whole_runs_of_known_arms(study, tmp_path: Path, monkeypatch) -> None:
    """A run of a search that was stopped at its first rung, and one of another model, have no place in it."""
    known = study.own_rates_page.label_of(study.protocol.STUDY, "keel-no-inner", 12)
    columns = ("label", "layers", "steps", "lr", "seed", "verdict")
    search = study.own_rates.Lines(tmp_path / "search.csv", columns)
    search.add((known, 12, 1000, 1e-3, 100, "trained"), (known, 12, 400, 1e-3, 101, "stuck"))
    search.add(("keel llama", 12, 1000, 1e-3, 100, "stuck"))
    deep = study.own_rates.Lines(tmp_path / "deep.csv", columns)
    deep.add((study.own_rates_page.label_of(study.protocol.STUDY, "branchnorm", 200), 200, 300, 3e-4, 3, "diverged"))
    monkeypatch.setattr(study.page, "HERE", tmp_path)
    told = [(one.arm, one.layers, one.updates, one.rate, one.seed, one.verdict) for one in study.page.ends_by_rate()]
    assert told == [
        ("KEEL, no inner norm", 12, 1000, 1e-3, 100, "trained"),
        ("BranchNorm", 200, 300, 3e-4, 3, "diverged"),
    ]


def test_the_scripts_say_what_they_do(study, capsys, monkeypatch) -> None:
    for script in (study.make, study.judge):
        monkeypatch.setattr("sys.argv", ["script", "--help"])
        with pytest.raises(SystemExit) as ended:
            script.main()
        assert ended.value.code == 0
        assert "--test" in capsys.readouterr().out
    assert Path(study.make.__file__).parent.name == "keel"
