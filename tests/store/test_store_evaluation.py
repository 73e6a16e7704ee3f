"""evaluation.json and evaluation.tsv are files of the run like any other: its own, whole and bounded, or refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from store_cases import new_run

from stabilitylab.decode import translations
from stabilitylab.errors import DamagedError, InputError
from stabilitylab.store import Run, files
from stabilitylab.store.evaluation import write_evaluation
from stabilitylab.store.verify import verify

WHOLE = {
    "bleu": 12.5,
    "chrf": 30.0,
    "signature": "tok:13a",
    "beam": 4,
    "length_penalty": 0.6,
    "penalty_kind": "fairseq",
    "row": 3,
    "alpha": None,
    "sentences": 2,
    "truncated": 0,
}


@pytest.fixture
def evaluated(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    writer = new_run(path, 0, 1, 2)
    writer.set_status("finished", 3)
    writer.close()
    write_evaluation(path, WHOLE)
    translations.write(path, ["a", "b"], ["a", "c"])
    return path


def outside(path: Path) -> None:
    path.rename(elsewhere := path.parent.parent / "elsewhere")
    path.symlink_to(elsewhere)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def deep(path: Path) -> None:
    path.write_text('{"bleu": ' + "[" * 100_000)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (outside, "is a link out of the run"),
    "pipe": (pipe, "is a pipe"),
    "half": (lambda path: path.write_text('{"bleu": 1'), "is damaged"),
    "list": (lambda path: path.write_text("[1]"), "is damaged"),
    "deep": (deep, "is damaged"),
    "nan": (lambda path: path.write_text('{"bleu": NaN}'), "is damaged"),
    "no score": (lambda path: path.write_text('{"row": 3}'), "is damaged"),
    "text for a score": (lambda path: path.write_text('{"bleu": "12"}'), "is damaged"),
    "a number beyond numbers": (lambda path: path.write_text('{"bleu": 1' + "0" * 400 + "}"), "is damaged"),
    "bytes": (lambda path: path.write_bytes(b"\xff"), "is damaged"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_evaluation_is_refused_by_who_reads_it_and_found_by_verify(evaluated: Path, case: str) -> None:
    run = Run.open(evaluated)
    assert run.evaluation == WHOLE
    assert verify(evaluated).findings == []
    damage, words = BROKEN[case]
    damage(evaluated / "evaluation.json")
    with pytest.raises(DamagedError, match=words) as caught:
        _ = run.evaluation
    assert (caught.value.run, len(str(caught.value)) < 600) == (evaluated, True)
    assert any(words in finding for finding in verify(evaluated).findings)


def test_a_run_that_was_not_evaluated(evaluated: Path) -> None:
    (evaluated / "evaluation.json").unlink()
    assert Run.open(evaluated).evaluation is None


@pytest.mark.parametrize(("damage", "words"), [(outside, "is a link out of the run"), (pipe, "is a pipe")])
def test_translations_are_the_runs_own(evaluated: Path, damage: Callable[[Path], None], words: str) -> None:
    damage(evaluated / "evaluation.tsv")
    with pytest.raises(InputError, match=words):
        translations.read(evaluated)


def read_all(path: Path) -> None:
    run = Run.open(path)
    _ = run.status, run.evaluation, translations.read(path), run.metrics


@pytest.mark.parametrize("name", ["run.json", "status.json", "evaluation.json", "evaluation.tsv", "inventory.jsonl"])
def test_a_file_beyond_any_that_a_run_has_is_not_read(
    evaluated: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (evaluated / name).open("r+b") as file:
        file.truncate(files.LARGEST + 1)  # sparse
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read whole"))
    with pytest.raises(InputError, match=f"{name} holds 1,000 MB, more than 1000 MB"):
        read_all(evaluated)


@pytest.mark.timeout(60)  # opening a pipe waits for a writer
@pytest.mark.parametrize(
    "name",
    ["status.json", "inventory.jsonl", ".lock", "metrics/part-000001.parquet", "probes/grad_norm/part-000001.parquet"],
)
def test_a_pipe_in_a_run_keeps_nobody_waiting(evaluated: Path, name: str) -> None:
    pipe(evaluated / name)
    if name == ".lock":
        assert Run.open(evaluated).status.state == "finished"
        return
    with pytest.raises(DamagedError, match="is a pipe"):
        _ = Run.open(evaluated).status, Run.open(evaluated).metrics, Run.open(evaluated).frame("grad_norm")
    assert any("is a pipe" in finding for finding in verify(evaluated).findings)


def test_paired_refuses_half_an_evaluation(run, evaluated: Path) -> None:
    write_evaluation(evaluated, {"bleu": 1.0})
    code, _, err = run("evaluate", str(evaluated), str(evaluated), "--paired")
    assert (code, "evaluation.json holds half an evaluation" in err.replace("\n", " ")) == (4, True), err
