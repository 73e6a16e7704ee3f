"""The command line as a user meets it: output, exit codes, and one sentence for each kind of bad input."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typer
from rest_slow import rest_slow
from rich.markup import render

from stabilitylab.cli import build
from stabilitylab.store import RunWriter
from stabilitylab.verdict import STATES

FAST = ["--depth", "2", "--steps", "3", "--set", "data.sentences=4", "--set", "data.held_out=6"]


def spawn(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "stabilitylab", *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
    )


def test_a_run_leaves_tables_that_pandas_reads_and_a_summary(run, tmp_path: Path) -> None:
    code, out, err = run("probe", "--arch", "Branch_Norm", *FAST, "--name", "first")
    assert code == 0
    assert "run: runs/first" in out
    assert "ln_input" in out
    assert "400 validation sentences: nll - unigram" in out
    assert err.splitlines()[0].startswith("branchnorm 1L-1L, 64-128-2")
    assert "step 3/3" in err
    frame = pd.read_parquet(tmp_path / "runs" / "first" / "probes" / "ln_input")
    assert {"step", "site", "stack_name", "layer", "sublayer", "value", "absent"} <= {*frame.columns}
    assert json.loads((tmp_path / "runs/first/status.json").read_text())["state"] == "finished"


def test_json_and_quiet_keep_stdout_clean(run) -> None:
    code, out, err = run("probe", "--arch", "postln", *FAST, "--json", "--quiet")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert facts["run"] == "runs/postln-2-s0"
    assert facts["verdict"]["state"] in STATES
    code, out, err = run("probe", "--arch", "postln", *FAST, "--quiet")
    assert (code, out, err) == (0, "runs/postln-2-s0-2\n", "")


def test_dry_run_trains_nothing(run, tmp_path: Path) -> None:
    code, out, _ = run("probe", "--depth", "1000", "--dry-run")
    assert code == 0
    assert "model.encoder_layers" in out
    assert "memory" in out
    assert not (tmp_path / "runs").exists()
    facts = json.loads(run("probe", "--depth", "4", "--dry-run", "--json", "--set", "train.lr=1e-3")[1])
    assert facts["config"]["train"]["lr"] == 1e-3
    assert facts["memory_bytes"]["total"] > facts["parameters"] * 16


@pytest.mark.slow
def test_list_and_runs(run) -> None:
    listing = json.loads(run("list", "--json")[1])
    assert {"admin", "branchnorm", "deepnorm", "postln", "postln-init", "preln"} <= listing["archs"].keys()
    assert {"grad_norm", "model_update"} <= listing["probes"].keys()
    assert listing["presets"]["base"] == "512-2048-8"
    other = {name: set(facts) ^ FACTS for name, facts in listing["archs"].items() if set(facts) != FACTS}
    assert other == {}, "list archs --json: these architectures lack facts, or have others"
    assert "DeepNet" in run("list", "archs")[1]
    assert len(run("list", "archs")[1].splitlines()) == len(listing["archs"])
    assert "rms" in run("list", "probes", "update_ratio")[1]
    assert run("list", "presets", "tiny")[0] == run("list", "archs", "nope")[0] == 2
    assert (
        "give one of archs, probes, figures, detectors, signals, sources, sweeps, commands"
        in run("list", "presets", "tiny")[2]
    )
    for kind in ("signals", "sweeps"):  # what an entry is, and not what its class is
        name, line = next(iter(listing_of(run, kind).items()))
        assert line.split(";")[0] in run("list", kind, name)[1].replace("\n    ", " ")
    assert "LN(alpha x_l + F(x_l))" in run("list")[1]
    assert run("probe", "--arch", "postln", *FAST, "--quiet")[0] == 0
    (row,) = json.loads(run("runs", "--json")[1])["runs"]
    assert (row["run"], row["state"], row["arch"], row["step"]) == ("postln-2-s0", "finished", "postln", "3/3")
    assert "postln-2-s0" in run("runs")[1]


def test_runs_tells_a_loop_of_ones_own_whose_loss_is_not_finite(run, tmp_path: Path) -> None:
    for name, last in (("broken", math.nan), ("even", 5.0)):
        with RunWriter.create(tmp_path / "runs" / name, {"kind": "watched", "config": {}}) as writer:
            writer.open([])
            writer.append(0, {"loss": 6.0}, {})
            writer.append(1, {"loss": last}, {})
            writer.set_status("finished", 1)
    broken, even = json.loads(run("runs", "--json")[1])["runs"]
    assert (broken["state"], broken["verdict"], even["verdict"]) == ("finished", "not finite", "-")
    code, table, told = run("runs")
    assert (code, "not finite" in table) == (0, True)
    assert "broken: Step 1: the loss is nan" in told
    assert "even" not in told


def listing_of(run, kind: str) -> dict[str, str]:
    return json.loads(run("list", kind, "--json")[1])[kind]


def test_runs_counts_the_trials_of_a_search_instead_of_listing_them(run, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    for name in ("own", "lr-find-gpt2/lr0.001-s0", "lr-find-gpt2/lr0.002-s0"):
        with RunWriter.create(folder / name, {"kind": "watched", "config": {}}) as writer:
            writer.open([])
            writer.append(0, {"loss": 6.0}, {})
            writer.set_status("finished", 0)
    (folder / "lr-find-gpt2" / "plan.json").write_text("{}")
    searches = {row["run"]: row["search"] for row in json.loads(run("runs", "--json")[1])["runs"]}
    assert searches == {
        "own": None,
        "lr-find-gpt2/lr0.001-s0": "lr-find-gpt2",
        "lr-find-gpt2/lr0.002-s0": "lr-find-gpt2",
    }
    table = run("runs")[1]
    assert "own" in table
    assert "lr0.001-s0" not in table
    assert "lr-find-gpt2: 2 trials of lr-find: stabilitylab runs runs/lr-find-gpt2 lists them" in table
    assert "lr0.001-s0" in run("runs", "runs/lr-find-gpt2")[1]


FACTS = {"formula", "source", "remarks", "learns", "options", "choices", "gains", "defined_for", "constants", "equal"}


def test_list_archs_prints_formula_source_extras_and_the_constants_of_a_depth(run) -> None:
    name, *blocks = run("list", "archs", "Deep_Norm")[1].splitlines()[:8]
    assert name == "deepnorm"
    assert [line.strip() for line in blocks] == [
        "x_{l+1} = LN(alpha x_l + F(x_l)); v, out, fc1, fc2 drawn with gain beta",
        "source: DeepNet, Figure 2",
        "learns besides: nothing",
        "remarks: For controls, `arch.beta` replaces beta, and `model.alpha` replaces alpha.",
        "initial gains: its own, in place of the base",
        "options (--set): arch.beta = None",
        "at 200 layers, encoder-decoder: encoder: alpha = 3.41574, beta = 0.20631; "
        "decoder: alpha = 4.16179, beta = 0.169904",
    ]
    single = run("list", "archs", "deepnorm", "--depth", "24", "--stack", "decoder")[1]
    assert "at 24 layers, decoder: decoder: alpha = 2.63215, beta = 0.268642" in single
    only = run("list", "archs", "tfixup", "--depth", "24", "--stack", "decoder")[1]
    assert "defined for encoder-decoder models only" in only
    assert "arch.start = staggered (or preln)" in run("list", "archs", "mhc")[1]
    small = ("--depth", "3", "--stack", "decoder")
    assert "the decoder equals that of preln" in run("list", "archs", "mix-ln", *small)[1]
    assert "equals that of" not in run("list", "archs", "attnres", *small)[1]
    found = json.loads(run("list", "archs", "--depth", "36", "--json")[1])["archs"]
    assert found["subln"]["constants"]["encoder"]["gamma"] == pytest.approx(2.182857, abs=6e-7)
    assert found["admin"]["learns"] == "omega: d a sub-layer"
    code, _, err = run("list", "archs", "--depth", "3")
    assert (code, "--depth 3 is odd" in err) == (2, True)


def test_a_toml_file_and_flags_over_it(run, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nlr = 1e-3\nsteps = 7\n")
    facts = json.loads(run("probe", "--config", "run.toml", "--steps", "9", "--depth", "2", "--dry-run", "--json")[1])
    assert (facts["config"]["train"]["lr"], facts["config"]["train"]["steps"]) == (1e-3, 9)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--arch", "postlnn"], 2, "unknown architecture 'postlnn'; choose one of"),
        (["--arch", "mixnorm"], 2, "'mixnorm' is not built: no paper defines it"),
        (["--decoder-arch", "nope"], 2, "unknown architecture 'nope'"),
        (["--depth", "0"], 2, "--depth 0 is out of range"),
        (["--depth", "7"], 2, "--depth 7 is odd"),
        (["--depth", "1000000000"], 2, "--depth 1000000000 is out of range"),
        (["--depth", "twelve"], 2, "Invalid value for '--depth'"),
        (["--depht", "12"], 2, "No such option"),
        (["--stack", "sideways"], 2, "Invalid value for '--stack'"),
        (["--set", "train.learning_rate=1"], 2, "unknown setting 'train.learning_rate'; known are"),
        (["--set", "nonsense"], 2, "not of the form section.key=value"),
        (["--every", "0"], 2, "probes.every must be at least 1"),
        (["--every", "often"], 2, "probes.every"),
        (["--probes", "ln_inputs"], 2, "ln_input"),
        (["--preset", "huge"], 2, "unknown preset 'huge'"),
        (["--preset", "llama"], 2, "'llama' is a model: give --model llama"),
        (["--arch", "GPT2"], 2, "'GPT2' is a model and no architecture: give --model gpt2"),
        (["--arch", "hybridnorm", "--set", "model.qk_norm=true", "--depth", "2"], 2, "qk_norm = true changes nothing"),
        (["--data", "ftp:x"], 2, "ftp:x"),
        (["--data", "text:absent.de,absent.en"], 4, "absent.de"),
        (["--config", "absent.toml"], 4, "cannot read absent.toml (No such file or directory)"),
        (["--device", "cuda"], 5, "CUDA devices"),
        (["--device", "tpu"], 2, "unknown device 'tpu'"),
        (["--resume", "absent"], 4, "absent"),
        (["--resume", "absent", "--arch", "postln"], 2, "only --steps may go with it"),
        (["--set", "model.d_model=65536", "--set", "model.d_ffn=1048576", "--depth", "20000"], 5, "GiB"),
        (["--set", "model.alpha=2", "--arch", "postln"], 2, "has no alpha"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence_and_its_exit_code(
    run, tmp_path: Path, arguments: list[str], code: int, sentence: str
) -> None:
    if arguments[-1] == "cuda":
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a CUDA device")
    if "--depth" not in arguments:
        arguments = [*arguments, *([] if "--resume" in arguments else ["--depth", "2"])]
    got, out, err = run("probe", *arguments)
    assert (got, out) == (code, "")
    assert sentence in err
    assert err.startswith("stabilitylab: ")
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_text_files_that_do_not_match_or_are_not_text(run, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x y z\n" * 30)
    (tmp_path / "b").write_text("x y z\n" * 29)
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin").write_bytes("caf\xe9\n".encode("latin-1") * 30)
    for data, words in (
        ("text:a,b", ("30", "29")),
        ("text:a,empty", ("empty",)),
        ("text:a,latin", ("latin", "UTF-8")),
        ("text:a", ("text:",)),
    ):
        code, _, err = run("probe", "--depth", "2", "--data", data)
        assert code == (2 if data == "text:a" else 4), err
        assert all(word in err for word in words)
        assert len(err.strip().splitlines()) == 1


def test_an_existing_run_is_never_overwritten(run, tmp_path: Path) -> None:
    assert run("probe", *FAST, "--name", "mine", "--quiet")[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    code, _, err = run("probe", *FAST, "--name", "mine")
    assert code == 2
    assert "--resume" in err
    assert before == {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}


@pytest.mark.slow
def test_divergence_is_a_result_unless_asked_to_fail(run) -> None:
    wild = [*FAST, "--set", "train.lr=1e30", "--set", "train.warmup=0", "--steps", "6"]
    code, out, _ = run("probe", *wild, "--json", "-q")
    assert code == 0
    facts = json.loads(out, parse_constant=pytest.fail)  # NaN is no JSON
    assert facts["verdict"]["state"] == "diverged"
    code, _, err = run("probe", *wild, "--fail-on-divergence", "-q")
    assert code == 3
    assert "the run diverged" in err
    facts = json.loads(run("probe", *wild, "--on-divergence", "stop", "--json", "-q")[1])
    assert facts["state"] == "diverged"
    assert facts["step"] < 6
    shown = " ".join(run("probe", *wild)[1].split())
    assert "nll - unigram nan" in shown or "nll - unigram +inf" in shown
    assert "+nan" not in shown + run("runs", "runs")[1]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), *rest_slow([(signal.SIGTERM, 143)], [])])
def test_stopping_flushes_and_checkpoints(tmp_path: Path, number: signal.Signals, code: int) -> None:
    steps = ["--depth", "2", "--steps", "100000", "--set", "data.sentences=4", "--every", "1"]
    child = spawn("probe", *steps, "--name", "long", cwd=tmp_path)
    metrics = tmp_path / "runs/long/journal-000001.records"
    deadline = time.monotonic() + 120
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == code, err
    assert "--resume runs/long" in out
    status = json.loads((tmp_path / "runs/long/status.json").read_text())
    assert status["state"] == "interrupted"
    frame = pd.read_parquet(tmp_path / "runs/long/metrics")
    assert list(frame["step"]) == list(range(status["step"]))
    assert list((tmp_path / "runs/long/checkpoints").iterdir())


def test_an_internal_error_shows_no_traceback_without_v(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("oh")

    monkeypatch.setattr("stabilitylab.commands.listing.catalogue", broken)
    code, _, err = run("list")
    assert (code, err) == (1, "stabilitylab: internal error: RuntimeError: oh (-v shows where).\n")


def test_help_of_each_command_names_the_exit_codes(run) -> None:
    for arguments in ([], ["probe"], ["list"], ["runs"]):
        code, out, _ = run(*arguments, "--help")
        assert code == 0
        assert "Usage" in out
    assert "130 / 143" in run("probe", "--help")[1]
    assert run()[0] == 2


@pytest.mark.slow
def test_help_swallows_no_word_in_brackets() -> None:
    """rich takes [word] for a style."""
    commands: Any = typer.main.get_command(build())
    for command in commands.commands.values():
        for text in (command.help, *(getattr(parameter, "help", None) for parameter in command.params)):
            assert render(text or "").plain == (text or "").replace("\\[", "[")


@pytest.mark.slow
def test_no_colour_where_none_is_wanted(tmp_path: Path) -> None:
    child = spawn("probe", *FAST, cwd=tmp_path)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0
    assert "\x1b" not in out + err
