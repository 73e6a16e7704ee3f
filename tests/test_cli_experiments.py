"""The commands around runs - onestep, sweep, evaluate, claims --fast - as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rest_slow import slow

from stabilitylab import decode, experiments
from stabilitylab.config import read_config_file, resolve
from stabilitylab.store import Run, RunWriter
from stabilitylab.store.evaluation import write_evaluation

pytestmark = pytest.mark.usefixtures("forked_runs")
SMALL = ["--set", "data.sentences=4", "--set", "data.held_out=6", "--set", "data.max_length=8"]


@pytest.mark.slow
def test_onestep_leaves_a_run_and_prints_rates_by_group(run) -> None:
    code, out, _ = run("onestep", "--arch", "deepnorm", "--depth", "4", "--seed", "3", *SMALL)
    assert code == 0
    assert "vo_ffn" in out
    assert "cross_attn" in out
    assert run("onestep", "--arch", "deepnorm", "--depth", "4", "--seed", "3", *SMALL)[1].endswith("-4-s3-2\n")
    stored = Run.open("runs/onestep-deepnorm-4-s3")
    assert stored.manifest["kind"] == "onestep"
    assert {"update_rate", "perturbation", "ln_jacobian", "theorem43", "lemma41"} <= {*stored.tables}
    code, out, err = run("onestep", "--arch", "nonsense")
    assert (code, out) == (2, "")
    assert "unknown architecture" in err


def test_a_grid_is_printed_run_and_then_found_finished(run) -> None:
    axes = ["arch=postln,deepnorm", "depth=2", "seed=3", "steps=2"]
    code, out, _ = run("sweep", "--grid", *axes, *SMALL, "--print")
    assert code == 0
    assert len(out.splitlines()) == 2
    assert all("-m stabilitylab probe --resume auto --config" in line for line in out.splitlines())
    code, out, _ = run("sweep", "--grid", *axes, *SMALL, "-q")
    assert code == 0
    assert "2 runs: 2 finished" in out
    assert Run.open("runs/postln-2-steps2-s3").status.state == "finished"
    code, out, _ = run("sweep", "--grid", *axes, *SMALL, "--status")
    assert code == 0
    assert out.count("finished") == 2


def test_a_figures_sweep_states_its_runs_and_figures_of_one_folder_come_once(run) -> None:
    code, out, _ = run("sweep", "branchnorm:8", "9", "--seeds", "3..4", "--status")
    assert code == 0
    assert out.count(" new ") == 18  # four arms at two depths and one at 6 layers a side, two seeds


def test_one_gpus_runs_are_printed_with_their_length_and_device(run) -> None:
    code, out, _ = run("sweep", "9", "--scale", "h200", "--seeds", "3", "--steps", "700", "--device", "cuda", "--print")
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 4
    settings = read_config_file(Path("runs/h200/branchnorm-8/sweep/branchnorm-36-lr0.0005-s3.toml"))
    assert (settings["train"]["steps"], settings["train"]["device"], settings["model"]["T"]) == (700, "cuda", 28)
    code, out, _ = run("sweep", "--grid", "arch=postln", "depth=2", "--device", "cuda:3", "--out", "grid", "--print")
    assert code == 0
    assert read_config_file(Path("grid/sweep/postln-2-s0.toml"))["train"]["device"] == "cuda:3"


def test_a_grid_takes_its_updates_from_an_option_too(run) -> None:
    code, out, _ = run("sweep", "--grid", "arch=postln", "depth=2", "seed=0..1", "--steps", "60", "--print")
    assert (code, len(out.splitlines())) == (0, 2)
    assert read_config_file(Path("runs/sweep/postln-2-s1.toml"))["train"]["steps"] == 60
    assert run("sweep", "--grid", "arch=postln", "depth=2", "--steps", "0", "--print")[0] == 2


@pytest.mark.slow
def test_a_sweep_whose_time_is_up_says_how_it_stands(run) -> None:
    axes = ["arch=deepnorm", "depth=2", "seed=3..4", "steps=2"]
    code, out, _ = run("sweep", "--grid", *axes, *SMALL, "--minutes", "0", "-q")
    assert (code, out) == (143, "runs: 2 runs: 2 new\n")
    code, out, _ = run("sweep", "--grid", *axes, *SMALL, "--minutes", "10", "-q")
    assert (code, out) == (0, "runs: 2 runs: 2 finished\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sweep"], "name a figure"),
        (["sweep", "branchnorm:5", "--scale", "h200"], "no runs at scale h200"),
        (["sweep", "branchnorm:5", "--steps", "9"], "is fixed"),
        (["sweep", "--grid", "arch=postln", "steps=4,8", "--steps", "9"], "--steps 9 and an axis of steps exclude"),
        (["sweep", "--grid", "train.steps=4", "--steps", "9"], "--steps 9 and an axis of steps exclude"),
        (["sweep", "branchnorm:77"], "unknown figure"),
        (["sweep", "branchnorm:8", "--scale", "paper"], "needs text of yours"),
        (["sweep", "branchnorm:8", "--seeds", "three"], "give them as 3..7"),
        (["sweep", "branchnorm:8", "--set", "train.lr=1"], "--set goes with --grid"),
        (["sweep", "--grid", "arch=postln", "--seeds", "3"], "--seeds goes with figures"),
        slow(["sweep", "--grid", "arch=nonsense"], "unknown architecture"),
        (["evaluate", "a", "b"], "one run at a time"),
        (["evaluate", "a", "--paired"], "at least two"),
    ],
)
def test_bad_usage_is_one_sentence(run, arguments: list[str], sentence: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_evaluate_scores_a_run_and_compares_two(run) -> None:
    for seed in ("3", "4"):
        arguments = ["--arch", "branchnorm", "--depth", "2", "--steps", "3", "--seed", seed, "-q", *SMALL]
        arguments += ["--set", "arch.T=100"]
        assert run("probe", *arguments, "--name", f"s{seed}")[0] == 0
    code, out, _ = run("evaluate", "runs/s3", "--beam", "2", "--penalty-kind", "gnmt")
    assert code == 0
    assert "BLEU" in out
    assert "chrF" in out
    assert "beam 2, length penalty 0.6 (gnmt)" in out
    assert "tok:13a" in out
    assert "reference" in out
    result = json.loads(Path("runs/s3/evaluation.json").read_text())
    assert result["sentences"] == 6
    assert result["alpha"] == pytest.approx(4 / 100)  # after 3 updates, t0 = 1, T = 100
    code, out, _ = run("evaluate", "runs/s3", "runs/s4", "--paired", "--json")
    assert code == 0
    assert len(json.loads(out)["paired"]["systems"]) == 2


def test_paired_uses_earlier_evaluations_of_the_same_options_and_updates_alone(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"beam": 4, "length_penalty": 0.6, "penalty_kind": "fairseq", "data": "text:a,b", "sentences": 9}
    whole = {"bleu": 9.0, "chrf": 20.0, "signature": "s", "alpha": None, "truncated": 0, "row": 100, **options}
    for name in ("a", "b"):
        with RunWriter.create(tmp_path / "runs" / name, {"label": "postln", "config": {}}) as writer:
            writer.open([])
            writer.set_status("finished", 100)
        write_evaluation(tmp_path / "runs" / name, whole)
    made: list[tuple[str, dict[str, Any]]] = []

    def evaluate(path: Path, *, device: str, progress: object, **given: Any) -> dict[str, Any]:
        made.append((path.name, given))
        return whole | given

    monkeypatch.setattr(decode, "evaluate", evaluate)
    monkeypatch.setattr(decode, "paired", lambda *paths: {})
    both = ["evaluate", "runs/a", "runs/b", "--paired", "--json"]
    assert run(*both, "--beam", "4", "--data", "text:a,b", "--sentences", "9")[0] == 0
    assert made == []
    assert run(*both, "--beam", "1")[0] == 0
    assert made == [("a", {"beam": 1}), ("b", {"beam": 1})]
    made.clear()
    write_evaluation(tmp_path / "runs" / "b", whole | {"row": 50})
    assert run(*both)[0] == 0
    assert made == [("b", {})]  # it was trained further since


@pytest.mark.slow
def test_evaluate_says_how_many_sources_it_cut_and_where(run, tmp_path: Path) -> None:
    for side in ("a", "b"):
        short = [f"{side}{i % 7} {side}{i % 5} {side}{i % 3}" for i in range(60)]
        long = [" ".join(f"{side}{(i + k) % 7}" for k in range(20)) for i in range(4)]
        (tmp_path / side).write_text("\n".join(short) + "\n")
        (tmp_path / f"{side}.valid").write_text("\n".join(short[:6] + long) + "\n")
    arguments = ["--arch", "preln", "--depth", "2", "--steps", "3", "--data", "text:a,b", "--valid", "a.valid,b.valid"]
    sets = [*SMALL, "--set", "data.max_length=12", "--set", "data.vocab_size=64"]
    assert run("probe", *arguments, *sets, "-q", "--name", "short")[0] == 0
    code, out, _ = run("evaluate", "runs/short", "-q")
    assert code == 0
    assert "on 10 sentences, 4 of them cut at 12 tokens (--max-length N takes more)\n" in out
    result = json.loads(Path("runs/short/evaluation.json").read_text())
    assert (result["truncated"], result["max_length"]) == (4, 12)
    code, out, _ = run("evaluate", "runs/short", "-q", "--max-length", "60")
    assert (code, "on 10 sentences\n" in out) == (0, True)
    result = json.loads(Path("runs/short/evaluation.json").read_text())
    assert (result["truncated"], result["max_length"]) == (0, 60)
    code, out, _ = run("evaluate", "runs/short", "-q", "--max-length", "3")
    assert "10 of them cut at 3 tokens" in out
    assert run("evaluate", "runs/short", "--max-length", "0")[0] == 2


def test_evaluate_says_what_is_missing(run) -> None:
    code, _, err = run("evaluate", "runs/nothing")
    assert code == 4
    assert "runs/nothing" in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_claims_fast_makes_its_runs_once_and_judges_them(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def few(figure: str, scale: str = "tiny", **_: object) -> list[experiments.Experiment]:
        data = {"sentences": 4, "held_out": 6, "max_length": 8}
        return [
            experiments.Experiment(
                f"deepnorm-{layers}-s{seed}",
                resolve(
                    {
                        "model": {"arch": "deepnorm", "encoder_layers": layers, "decoder_layers": layers},
                        "data": data,
                        "train": {"seed": seed},
                    }
                ),
                "onestep",
            )
            for layers in (1, 2)
            for seed in (3, 4)
        ]

    monkeypatch.setattr(experiments, "experiments", few)
    code, out, _ = run("claims", "--fast", "--jobs", "1", "--claim", "C25", "--json")
    assert code == 0
    (only,) = json.loads(out)["claims"]
    assert only["effects"][0]["seeds"] == [3, 4]
    made = Path("runs/tiny/claims-fast/deepnorm-1-s3/run.json").stat().st_mtime_ns
    assert run("claims", "--fast", "--jobs", "1", "--claim", "C25")[0] == 0
    assert Path("runs/tiny/claims-fast/deepnorm-1-s3/run.json").stat().st_mtime_ns == made
