"""Runs of DistributedDataParallel are recorded, replayed and explained by all of their processes together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_explain import BEGINS, JUMP, RESTED, STEPS

WHOLE = (STEPS, STEPS, 7)  # updates that were replayed, that were equal, that have sketches


def same(found: tuple[Any, ...]) -> Any:
    """Return what the first rank says, after a look that all say the same."""
    assert all(one == found[0] for one in found), found
    return found[0]


def kinds(found: Any, accused: bool = True) -> list[tuple[str, str, int]]:
    return [(kind, place, step) for kind, place, step, told, _ in found["findings"] if told is accused]


def test_the_recorder_changes_no_bit(ranks: Any) -> None:
    assert same(ranks("explain_neutral")) == {"same": True}


def test_declared_updates_are_equal_on_every_rank(ranks: Any) -> None:
    found = same(ranks("explain_sound"))
    assert found["verdict"] == "no trouble"
    assert found["findings"] == []
    assert found["replayed"] == WHOLE
    assert found["same"], "the given model was left otherwise than it was given"
    assert [Path(one).parent.name for one in found["files"]] == ["rank-1", "black_box"]


@pytest.mark.slow
def test_a_module_that_computes_otherwise_on_one_rank_is_named_with_it(ranks: Any) -> None:
    found = same(ranks("explain_forward"))
    assert found["verdict"] == "finding"
    [(kind, place, step, _, sentence)] = found["findings"]
    assert (kind, place) == ("forward", "blocks.1.norm2")
    assert BEGINS <= step <= BEGINS + 3
    assert "on rank 1 alone" in sentence


@pytest.mark.slow
def test_other_processes_than_recorded_are_refused(ranks: Any) -> None:
    one, other = ranks("explain_foreign")
    assert one["bare"].startswith("UsageError: 2 processes recorded this run: start as many, as with torchrun")
    assert one["lost"] == other["lost"]
    assert other["lost"].startswith("InputError: rank 1: RUN has no black box of rank 1: record the loop with watch(")


def test_spread_parameters_are_told_in_one_sentence(ranks: Any) -> None:
    why = "its parameters are spread over processes, whose updates cannot be replayed yet"
    assert same(ranks("explain_sharded")) == {"why": why}


@pytest.mark.slow
def test_a_write_on_one_rank_is_named_and_so_are_the_copies_that_differ(ranks: Any) -> None:
    found = same(ranks("explain_write"))
    assert found["verdict"] == "finding"
    assert kinds(found) == [("state written", "head.weight", BEGINS), ("replicas", "head.weight", 16)]


@pytest.mark.slow
def test_bad_batches_of_one_rank_are_named_with_it(ranks: Any) -> None:
    found = same(ranks("explain_data"))
    assert [(kind, step) for kind, _, step in kinds(found)] == [("bad batch", BEGINS)]
    assert "on rank 1 alone" in found["findings"][0][-1]


@pytest.mark.slow
def test_micro_batches_without_averaging_are_replayed_so(ranks: Any) -> None:
    found = same(ranks("explain_parts"))
    assert [(kind, accused) for kind, _, _, accused, _ in found["findings"]] == [("gradient scale", False)]
    assert "are divided by 2, its number of micro-batches" in found["findings"][0][-1]


@pytest.mark.slow
def test_an_intervention_on_all_ranks_decides(ranks: Any) -> None:
    found = same(ranks("explain_rate"))
    assert found["verdict"] == "cause"
    assert found["cause"] == f"learning rate at step {RESTED} (x{JUMP:g})"


@pytest.mark.slow
def test_a_sum_in_another_order_is_a_note(four_ranks: Any) -> None:
    found = same(four_ranks("explain_rounding"))
    assert found["verdict"] == "no trouble"
    assert {accused for *_, accused, _ in found["findings"]} <= {False}
    assert all("differ by rounding" in sentence for *_, sentence in found["findings"])
    replayed, equal, _ = found["replayed"]
    assert replayed - equal <= 1


@pytest.mark.slow
def test_a_fresh_start_of_as_many_processes_explains(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = str(tmp_path / "run")

    def go(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*start, *command], env=env, capture_output=True, text=True, timeout=280, check=False)

    assert (made := go(str(Path(__file__).with_name("rank_explain.py")), run)).returncode == 0, made.stderr
    told = go("-m", "stabilitylab", "explain", run, "--factory", "rank_explain:ready")
    assert told.returncode == 1, told.stderr
    assert told.stdout.count("first in blocks.1.norm2") == 2, "rank 0 alone prints: the head, and the finding"
    assert "on rank 1 alone" in told.stdout
