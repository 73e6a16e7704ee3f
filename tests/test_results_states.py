"""results/states: what stands there is what its runs say; and the script that makes them goes on where it stopped."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from rest_slow import complete
from scipy.stats import binomtest

ROOT = Path(__file__).resolve().parents[1]
STATES = ROOT / "results" / "states"


def called(*words: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Python with the folder's modules at hand."""
    start = f"import sys; sys.path[:0] = [{str(STATES)!r}, {str(ROOT)!r}]; sys.argv = sys.argv[:1] + sys.argv[2:]; "
    command = [sys.executable, "-c", start + str(words[0]), "-", *map(str, words[1:])]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.mark.slow
def test_the_confusion_matrix_is_that_of_the_runs() -> None:
    ended = called("import judge; judge.main()")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.rstrip("\n") == (STATES / "confusion.md").read_text().rstrip("\n")


def test_the_documentation_has_the_same_matrix() -> None:
    text, matrix = (ROOT / "docs" / "states.md").read_text(), (STATES / "confusion.md").read_text()
    rows = [line for line in matrix.splitlines() if line.startswith("| ")]
    tested = rows[: next(i for i, row in enumerate(rows) if row.startswith("| cause"))]
    assert len(tested) > 5
    assert not [row for row in tested if row not in text]


def test_the_error_rate_is_on_runs_that_made_no_constant() -> None:
    table = pd.read_csv(STATES / "states.csv")
    test = table[table["seed"].isin((3, 4, 5, 6))]
    stuck = test[test["state"] == "stuck"]
    assert len(stuck) >= 30
    assert len(test) - len(stuck) >= 30
    assert stuck["arch"].nunique() >= 4
    assert stuck["cause"].nunique() >= 3
    assert not test.duplicated(["cell", "seed"]).any()
    wrong = int((~stuck["stuck_later"]).sum())
    interval = binomtest(wrong, len(stuck)).proportion_ci(method="exact")
    said = f"{wrong} of {len(stuck)}: {wrong / len(stuck):.2f} [{interval.low:.2f}, {interval.high:.2f}]"
    assert f"| `stuck` by the rule | {said} |" in (STATES / "confusion.md").read_text()


MAKE = """
import cells, make, judge
cells.UPDATES = make.UPDATES = judge.UPDATES = 8
cells.LATER = make.LATER = 16
few = ("train.warmup=2", "data.vocab_size=128", "data.sentences=4", "data.held_out=6")
shown = [(cells.Cell(name, "none", name, 2, (*few, *more)), 3) for name, more in
         (("deepnorm", ()), ("postln", ("train.lr=1e-2", "train.schedule=constant")))]
count = int(sys.argv.pop())
make.order = lambda: shown[:count]
make.main()
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, lines in (("train", 120), ("val", 40)):
        for language in ("de", "en"):
            text = "".join(f"{name[0]}{n % 7} {language} ab{n % 5} {n}\n" for n in range(lines))
            (folder / f"{name}.{language}.gz").write_bytes(gzip.compress(text.encode()))
    return folder


@pytest.mark.slow
@complete
def test_the_runs_are_made_once_each_and_go_on_as_the_same_run(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    options = ["--data", corpus, "--runs", tmp_path / "runs", "--out", out]
    first = called(MAKE, *options, 1, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    lines = (out / "runs.csv").read_text()
    second = called(MAKE, *options, 2, cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert (out / "runs.csv").read_text().startswith(lines)  # what stands there is not made again
    runs, course = pd.read_csv(out / "runs.csv"), pd.read_csv(out / "course.csv")
    assert runs["cell"].tolist() == ["deepnorm", "postln"]
    assert runs["lr"].tolist() == [3e-4, 1e-2]
    assert (runs["sentences"] == 40).all()
    for _, run in runs.iterrows():
        own = course[course["cell"] == run["cell"]]
        assert own["step"].tolist() == [*range(17)]  # every row of so short a run, each once
        assert own["nll"].notna().all()
        assert run["nll_1600"] != run["nll_160"]
    assert not [*(tmp_path / "runs").iterdir()]  # of no further use
    judged = called("import judge; judge.UPDATES = 8; print(judge.judged(judge.Path(sys.argv[1])).to_csv())", out)
    assert judged.returncode == 0, judged.stderr
    table = pd.read_csv(io.StringIO(judged.stdout))
    assert table["gap"].tolist() == pytest.approx((runs["nll_160"] - runs["validation_unigram"]).tolist())
    assert table["stuck_later"].tolist() == (runs["nll_1600"] > runs["validation_unigram"] - 0.05).tolist()
    assert (table["state"] != "diverged").all()
