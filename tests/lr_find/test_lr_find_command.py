"""The command ``lr-find``: what it prints, its exit codes, its folders, and one sentence for everything that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from stabilitylab.commands.lr_find import subject_of_factory
from stabilitylab.lr_find import RateResult, RateTrial
from stabilitylab.terminal.rates import RateDisplay, line

MINE = """
import copy
import torch
from torch import nn

def batches(count, seed):
    g = torch.Generator().manual_seed(seed)
    y = [torch.randint(0, 4, (16,), generator=g) for _ in range(count)]
    return [(torch.eye(4)[one] + torch.randn(16, 4, generator=g), one) for one in y]

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def ready(scale=8):
    model = nn.Sequential(nn.Linear(4, scale), nn.Tanh(), nn.Linear(scale, 4))
    return {"model": model, "batches": batches(20, 0), "loss_fn": loss, "held_out": batches(3, 1),
            "optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), "clipping": 1.0, "warmup": 4,
            "causal": False}

def pair():
    one = ready()
    return one["model"], one["batches"][0], loss, one["optimizer"]

def nan():
    return {**ready(), "loss_fn": lambda model, batch: loss(model, batch) * float("nan")}

def constant():
    one = ready()
    other = copy.deepcopy(one["model"])
    return {**one, "loss_fn": lambda model, batch: loss(other, batch)}

def foreign():
    return {**ready(), "rate": 3}

def tensor():
    return torch.zeros(3)

def broken():
    raise RuntimeError("no data here")

def lbfgs():
    one = ready()
    return {**one, "optimizer": torch.optim.LBFGS(one["model"].parameters(), 0.1)}

def alone():
    return ready()
"""


@pytest.fixture
def mine(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Calls ``lr-find`` beside a module mine.py."""
    (tmp_path / "mine.py").write_text(MINE.replace("def alone():", "def alone(x=1):"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield lambda *arguments: run("lr-find", *arguments)
    sys.modules.pop("mine", None)


STREAM = """
import torch
from torch.utils.data import DataLoader, IterableDataset

class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(5, 4, 2) * torch.arange(5.0)[:, None, None])

def ready():
    model = torch.nn.Linear(2, 1)
    return {"model": model, "batch": torch.zeros(4, 2), "batches": DataLoader(Stream(), batch_size=None),
            "loss_fn": lambda model, batch: model(batch).square().mean() + batch.mean()}
"""


def test_a_loader_of_a_stream_which_has_no_length_gives_the_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "streamed_batches.py").write_text(STREAM)
    monkeypatch.syspath_prepend(tmp_path)
    subject = subject_of_factory("streamed_batches:ready", {"horizon": 20, "seeds": (0,), "warmup": None}, 0)
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    assert [float(next(iter(subject.losses(model, t, 0))).detach()) for t in range(7)] == [0, 1, 2, 3, 4, 0, 1]


@pytest.mark.slow
def test_a_factory_gets_its_three_numbers(mine, tmp_path: Path) -> None:
    code, out, err = mine("mine:ready", "--horizon", "40", "--seeds", "0,1")
    assert code == 0
    for words in ("best rate", "largest safe rate", "least warm-up", "held-out loss after 40 updates, 2 seeds"):
        assert words in out
    assert "About" in err.splitlines()[0]
    assert "rate 0.1, 40 updates: loss" in err
    assert max(map(len, out.splitlines()[:-1])) <= 100
    again, out, _ = mine("mine:ready", "--horizon", "40", "--seeds", "0,1", "-q")
    assert again == 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"lr-find-mine-ready", "lr-find-mine-ready-2"}


def test_json_is_one_object(mine) -> None:
    code, out, _ = mine("mine:pair", "--horizon", "30", "--seeds", "0", "--json", "-q", "--updates", "400")
    found = json.loads(out)
    assert code == 0
    assert found["outcome"] == "found"
    assert found["best"]["value"] > 0
    assert found["scores"] == "smoothed training loss"


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("mine:nan",), 4, "the loss of mine:nan is nan before its first update"),
        (("mine:foreign",), 2, "returned 'rate', which is no argument of lr_find"),
        (("mine:tensor",), 2, "returned Tensor: it must return (model, batch, loss_fn)"),
        (("mine:broken",), 4, "mine:broken failed: RuntimeError: no data here"),
        (("mine:nothing",), 2, "mine has no function 'nothing'"),
        (("mine:redy",), 2, "Did you mean 'ready'?"),
        (("mine",), 2, "must be PACKAGE.MODULE:FACTORY"),
        ((), 2, "name a model: your function as PACKAGE.MODULE:FACTORY, or a reference model with --arch"),
        (("absent:ready",), 4, "no module 'absent' here"),
        (("mine:lbfgs",), 2, "LBFGS needs a closure"),
        (("mine:ready", "--arch", "postln"), 2, "--arch is about reference models"),
        (("mine:ready", "--seeds", "a"), 2, "--seeds a must be whole numbers"),
        (("--arch", "preln", "--seeds", ""), 2, "--seeds must be whole numbers"),
        (("mine:ready", "--minutes", "0"), 2, "minutes"),
        (("mine:pair", "--widths", "8,16"), 2, "calls mine:pair with scale=, which it does not take"),
        (("mine:ready", "--widths", "8"), 2, "one width shows no change"),
        (("mine:ready", "--resume"), 2, "there is no search at"),
        (("mine:ready", "--warmup", "90"), 2, "warmup = 90"),
        (("--arch", "nonsense"), 2, "unknown architecture 'nonsense'"),
        (("--depth", "3"), 2, "--depth 3 is odd"),
        (("--d-model", "50"), 2, "width 50"),
        (("--arch", "rezero", "--data", "text:absent.de,absent.en"), 4, "absent.de"),
    ],
)
def test_everything_that_cannot_be_searched_is_one_sentence(mine, arguments, code: int, sentence: str) -> None:
    found, out, err = mine(*arguments, "--horizon", "40", "-q")
    assert (found, out) == (code, "")
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments", [("forecast", "--depth", "36"), ("recommend",), ("forecast", "mine:ready", "--lr", "1")]
)
def test_the_commands_that_it_replaces_say_so(run, arguments) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert f"'{arguments[0]}' is gone: 'lr-find" in err
    assert "docs/edges.md" in err
    assert len(err.strip().splitlines()) == 1
    assert arguments[0] not in run("--help")[1]


def test_a_constant_loss_is_exit_code_1(mine) -> None:
    code, out, _ = mine("mine:constant", "--horizon", "30", "-q")
    assert code == 1
    assert "at every rate: check that loss_fn calls the model that it" in " ".join(out.split())


def test_a_budget_below_the_first_rung_is_exit_code_1(mine) -> None:
    code, out, _ = mine("mine:ready", "--horizon", "30", "--updates", "60", "-q")
    assert code == 1
    assert "No rung has ended" in out


def test_a_search_of_a_reference_model_goes_on_by_its_folder_alone(mine, tmp_path: Path) -> None:
    model = ("--arch", "preln", "--stack", "decoder", "--depth", "1", "--d-model", "32", "--lr", "0.002")
    code, _, err = mine(*model, "--horizon", "20", "--seeds", "3", "--updates", "60", "--out", "one")
    assert code == 1
    assert "usually takes about 180 updates, so that the search may end without an answer" in err.splitlines()[0]
    begun = json.loads((tmp_path / "one" / "plan.json").read_text())
    code, out, _ = mine("--resume", "--out", "one", "--updates", "140", "-q")
    assert code == 0
    assert "after 20 updates, 1 seed" in " ".join(out.split())
    assert json.loads((tmp_path / "one" / "plan.json").read_text()) == begun
    resumed = json.loads((tmp_path / "one" / "lr-find.json").read_text())["losses"]["20"]
    assert mine(*model, "--horizon", "20", "--seeds", "3", "--updates", "200", "--out", "two", "-q")[0] == 0
    whole = json.loads((tmp_path / "two" / "lr-find.json").read_text())["losses"]["20"]
    assert {rate: whole[rate] for rate in resumed} == resumed
    del begun["config"]
    (tmp_path / "one" / "plan.json").write_text(json.dumps(begun))
    for arguments, sentence in (
        (("--out", "one"), "the plan in one keeps only the name of its model"),
        (("--out", "nowhere"), "there is no search in nowhere"),
        (("--out", "two", "--widths", "8,16"), "several widths"),
        ((), "--resume needs the folder of the search (--out) or its model"),
    ):
        code, out, err = mine("--resume", *arguments)
        assert (code, out) == (2, "")
        assert sentence in err
        assert "name the model again" in err


@pytest.mark.slow
def test_several_processes_find_the_same(mine, tmp_path: Path) -> None:
    common = "mine:ready", "--horizon", "30", "--seeds", "0,1", "-q"
    assert mine(*common, "--out", "one")[0] == 0
    assert mine(*common, "--out", "two", "--jobs", "2")[0] == 0
    found = [json.loads((tmp_path / name / "lr-find.json").read_text()) for name in ("one", "two")]
    for one in found:
        del one["seconds"], one["out"]
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_keeps_what_is_known_and_resume_goes_on(mine, tmp_path: Path, jobs: str) -> None:
    command = [sys.executable, "-m", "stabilitylab", "lr-find", "mine:ready", "--horizon", "300", "--jobs", jobs]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        trials = tmp_path / "runs" / "lr-find-mine-ready" / "trials.jsonl"
        until = time.monotonic() + 120
        while time.monotonic() < until and not (trials.exists() and trials.read_text().count("\n") >= 9):
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "SIGINT stopped the search" in out
    code, out, err = mine("mine:ready", "--horizon", "300", "--resume", "--updates", "12000")
    assert code == 0
    assert "after 300 updates" in " ".join(out.split())


@pytest.mark.slow
def test_a_killed_search_goes_on(mine, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stabilitylab", "lr-find", "mine:ready", "--horizon", "60", "--seeds", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        trials = tmp_path / "runs" / "lr-find-mine-ready" / "trials.jsonl"
        until = time.monotonic() + 120
        while time.monotonic() < until and not (trials.exists() and trials.read_text().count("\n") >= 2):
            time.sleep(0.02)
        process.kill()
    code, _, _ = mine("mine:ready", "--resume", "-q")  # with the horizon and the seeds that it was begun with
    assert code == 0
    whole, _, _ = mine("mine:ready", "--horizon", "60", "--seeds", "0", "-q", "--out", "whole")
    assert whole == 0
    found = [
        json.loads((tmp_path / name / "lr-find.json").read_text()) for name in ("runs/lr-find-mine-ready", "whole")
    ]
    assert found[0]["losses"] == found[1]["losses"]
    assert found[0]["best"] == found[1]["best"]


@pytest.mark.parametrize("width", [80, 140])
def test_the_live_table_fits_the_terminal(width: int) -> None:
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=width)
    display = RateDisplay(console, quiet=True)
    display.planned((150, 450, 1350, 4050, 12_150, 40_000, 100_000), "held-out loss")
    for power in range(12):
        rate = 1e-5 * 2**power
        for rung in display.rungs:
            for seed in (0, 1, 2):
                failed = "the loss is nan at update 3" if power == 11 else ""
                display.ended(
                    RateTrial(rate, seed, rung), RateResult(12.3456 if not failed else float("inf"), failed=failed)
                )
    display.ended(RateTrial(1e-3, 0, 40_000, 160), RateResult(12.3))
    display.moved(RateTrial(1e-3, 2, 100_000), 99_000, 12.345)
    console.print(display.table())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "100,000" in text
    assert "failed" in text
    assert "w160" in text
    if width == 140:
        assert "99000/100000 12.345 seed 2" in text


def test_a_line_of_a_trial_has_its_end() -> None:
    assert line(RateTrial(1e-3, 0, 150), RateResult(2.34567)) == "rate 0.001, 150 updates: loss 2.3457"
    failed = RateResult(float("inf"), False, failed="the loss is nan at update 3")
    told = line(RateTrial(1e-3, 1, 1500, 10), failed)
    assert told == "rate 0.001, warm-up 10, seed 1, 1,500 updates: failed: the loss is nan at update 3"
