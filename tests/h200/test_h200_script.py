"""results/h200/make.py as it is called: what is refused, and a whole trial on the CPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from rest_slow import EVERY, slow

MAKE = Path(__file__).resolve().parents[2] / "results" / "h200" / "make.py"


def make(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(MAKE), *arguments], capture_output=True, text=True, check=False, cwd=cwd)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        slow(
            ["--data", "nowhere"],
            4,
            "has no train.de.gz: name a folder with train, val, test_2016_flickr",
        ),
        slow(["--data", "half"], 4, "has no val.en.gz"),
        slow([], 2, "name the corpus with --data PATH/multi30k, or give --smoke"),
        slow(["--smoke", "--minutes", "0"], 2, "numbers of minutes above 0"),
        (["--smoke", "--part", "nonsense"], 2, "invalid choice"),
        (["--smoke", "--occasion", "9"], 2, "invalid choice"),
    ],
)
def test_what_is_wrong_is_one_sentence_before_anything_is_made(
    arguments: list[str], code: int, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "half").mkdir()
    for name in ("train.de.gz", "train.en", "val.de.gz"):
        (tmp_path / "half" / name).touch()
    ended = make(*arguments, "--out", "out", cwd=tmp_path)
    assert ended.returncode == code
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_measures_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "val", "test_2016_flickr"):
        for side in ("de", "en"):
            (data / f"{split}.{side}").touch()
    ended = make("--data", str(data), "--out", "out", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (5, "")
    assert ended.stderr.startswith("make.py: torch")
    assert "sees no CUDA device" in ended.stderr
    assert ended.stderr.count("\n") == 1


def files_of(out: Path) -> list[str]:
    """What comes back: checked against what may."""
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) <= 8
    assert all(path.parent == out and path.stat().st_size <= 16 * 2**20 for path in files)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", path.name) for path in files)
    return sorted(path.name for path in files)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_trial_that_is_cut_goes_on_elsewhere_from_what_came_back(bare_machine, script, run) -> None:
    """A bare machine, cut at any time (SIGKILL), and another one that has nothing but the files of the first.

    Of what is made alike, a part is there before it begins; with ``EVERY=1`` nothing is.
    """
    bare_machine.carry("pydantic", "pydantic_core", "annotated-types", "typing-inspection", "plotly")
    folder = bare_machine.folder
    if not EVERY:
        begin(script, run, folder / "one")
    command = ["--smoke", "--minutes", "20"]
    cut = bare_machine.start(*command, "--out", "first", "--work", "one")
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline and "part benchmarks: complete" not in text_of(folder / "one" / "log.txt"):
        assert cut.poll() is None
        time.sleep(0.1)
    os.killpg(cut.pid, signal.SIGKILL)
    cut.wait()
    assert "kept-0.tar.gz" in files_of(folder / "first")
    shutil.rmtree(folder / "one")
    kept = bare_machine.carried / "kept"
    kept.mkdir()
    for path in (folder / "first").iterdir():
        shutil.copy(path, kept)
    ended = bare_machine.make(*command, "--out", "second", "--work", "two")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "carried: annotated_types-" in ended.stdout
    assert "goes on from 1 archive" in ended.stdout
    assert "part checks" not in ended.stdout
    assert {"kept-0.tar.gz", "kept-1.tar.gz", "log.txt", "parts.md"} <= {*files_of(folder / "second")}
    work = folder / "two"
    state = json.loads((work / "state.json").read_text())
    assert {entry["state"] for entry in state["parts"].values()} == {"complete"}
    made = ["checks", "benchmarks", "figure5", "figures89", "figure3", "rungs", "judged", "rest", "studies", "report"]
    assert [*state["parts"]] == made
    assert {*state["decided"]["checks"].values()} == {"done"}
    shown = {path.relative_to(work / "h200").as_posix() for path in (work / "h200").rglob("*") if path.is_file()}
    assert {"runs.csv", "claims.csv", "claims.json", "log.txt", "parts.md", "tests.txt", "calls.json"} <= shown
    assert {"figures/branchnorm-3.png", "benchmarks/shared_gpu.md", "checks/kernels.json"} <= shown
    rows = pd.read_csv(work / "h200" / "runs.csv")
    assert len(rows) == 6
    assert {*rows["state"]} == {"finished"}
    assert str(folder) not in "".join((work / "h200" / name).read_text() for name in ("log.txt", "runs.csv"))
    alone = bare_machine.make("--smoke", "--part", "figure3", "--out", "third", "--carried", "nothing-but-wheels")
    assert alone.returncode == 5  # without its wheels
    # All is complete: nothing is made again. Without --part, the tables and figures are.
    last = bare_machine.make(*command, "--out", "second", "--work", "two", "--part", "figure5")
    assert last.returncode == 0
    assert "figure5 is complete" in last.stdout
    assert "part figure5: " not in last.stdout


def begin(script, run, work: Path) -> None:
    """What a call has left in ``work``: checks, a benchmark and pilots that other tests try."""
    place = script.at(work)
    command = script.checks.short_run("recorded", "on")(place)
    assert run(*command[command.index("stabilitylab") + 1 :])[0] == 0
    shutil.copytree(work / "pairs" / "recorded-1", work / "pairs" / "again-1")
    names = ("fsdp", "capture", "recorded", "again", "compared-again", "memory-direct", "memory-recorded", "kernels")
    place.state.decided["checks"] = dict.fromkeys(names, "done")
    place.state.decided["benchmarks"] = {"shared_gpu": "done"}
    place.state.decided["steps"] = 8
    first = script.parts.arms_of(place)[0]
    place.state.decided["choice"] = {arm: {} for arm in script.parts.arms_of(place)}
    rate, seed = script.parts.one_gpu.RATES[0], script.parts.protocol.CHOICE_SEEDS[0]
    place.state.decided["choice"][first] = {f"{rate:g}": {str(seed): 4.0}}
    place.state.save()
    for left in ("checks/kernels.json", "benchmarks/shared_gpu.md"):
        (work / left).parent.mkdir(exist_ok=True)
        (work / left).write_text("{}")


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""
