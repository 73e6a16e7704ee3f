"""results/h200/make.py as it is called: what is refused, and a whole trial on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from stabilitylab.store import load_runs

MAKE = Path(__file__).resolve().parents[2] / "results" / "h200" / "make.py"


def make(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(MAKE), *arguments], capture_output=True, text=True, check=False, cwd=cwd)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--data", "nowhere"], 4, "has no train.de.gz: name a folder with train, val, test_2016_flickr"),
        (["--data", "half"], 4, "has no val.en.gz"),
        ([], 2, "name the corpus with --data PATH/multi30k, or give --smoke"),
        (["--smoke", "--minutes", "0"], 2, "numbers of minutes above 0"),
        (["--smoke", "--part", "nonsense"], 2, "invalid choice"),
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


def recorded(folder: Path) -> dict[str, pd.DataFrame]:
    clocks = ["tokens_per_second", "memory_bytes"]
    runs = load_runs(folder / "runs", [])
    return {run.path.relative_to(folder).as_posix(): run.metrics.drop(columns=clocks) for run in runs}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_trial_stops_in_time_goes_on_and_is_what_its_parts_alone_make(tmp_path: Path) -> None:
    """A call of two seconds, then the rest; beside it two parts alone, in another order."""
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    first = make("--smoke", "--out", "cut", "--part", "figure5", "--minutes", "0.03", cwd=tmp_path)
    assert first.returncode == 1
    assert "the same command goes on with figure5" in first.stdout
    state = json.loads((cut / "state.json").read_text())
    assert state["parts"].keys() == {"figure5"}
    assert state["parts"]["figure5"]["state"] == "partial"
    assert make("--smoke", "--out", "cut", "--minutes", "9", cwd=tmp_path).returncode == 0
    for part in ("figure3", "figure5"):
        alone = make("--smoke", "--out", "whole", "--part", part, cwd=tmp_path)
        assert (alone.returncode, f"{part} is complete" in alone.stdout) == (0, True)
    one, other = recorded(cut), recorded(whole)
    assert len(one) == 6
    assert len(other) == 4
    for name, metrics in other.items():
        pd.testing.assert_frame_equal(metrics, one[name], check_like=True)
    state = json.loads((cut / "state.json").read_text())
    assert {entry["state"] for entry in state["parts"].values()} == {"complete"}
    assert len(state["calls"]) == 2
    shown = {path.relative_to(cut / "h200").as_posix() for path in (cut / "h200").rglob("*") if path.is_file()}
    assert {"runs.csv", "claims.csv", "claims.json", "log.txt", "parts.md", "tests.txt", "calls.json"} <= shown
    assert {"figures/branchnorm-3.png", "figures/branchnorm-3.csv", "benchmarks/shared_gpu.md"} <= shown
    rows = pd.read_csv(cut / "h200" / "runs.csv")
    assert rows["bleu"].notna().sum() == 2
    assert set(rows["state"]) == {"finished"}
    assert str(tmp_path) not in "".join((cut / "h200" / name).read_text() for name in ("log.txt", "runs.csv"))
    assert not list(cut.glob("runs/h200/*/*/checkpoints/*"))
    last = make("--smoke", "--out", "cut", cwd=tmp_path)  # all is complete: nothing is made again
    assert last.returncode == 0
    assert "part figure5" not in last.stdout
