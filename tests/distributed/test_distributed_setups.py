"""``check_ranks``: what it finds, what it leaves alone, and what it says where one rank fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

READY = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def loss_fn(model, x):
    if model.training and BROKEN and dist.get_rank() == 1:
        raise KeyError("labels")
    return (model(x) - 1).square().mean()


def made(same):
    global BROKEN
    BROKEN = False
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)))
    torch.manual_seed(0 if same else dist.get_rank())
    return model, torch.randn(4, 6), loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-3)


def ready():
    return made(same=False)


def same():
    return made(same=True)


def broken():
    global BROKEN
    given = made(same=False)
    BROKEN = True
    return given


def alone():
    return nn.Linear(2, 2), torch.randn(3, 2), loss_fn
"""
NOT_KNOWN = "no two ranks are known to share a batch"


def same(found: tuple[Any, ...]) -> Any:
    """Return what the first rank says, after a look that all say the same."""
    assert all(one == found[0] for one in found), found
    return found[0]


@pytest.mark.parametrize("case", ["setups_right", "setups_sharded"])
def test_a_right_set_up_has_no_finding_and_no_bit_of_it_changes(ranks: Any, case: str) -> None:
    """Parameters, buffers, gradients, optimizer, random numbers and modes; and two updates later."""
    for found in ranks(case):
        assert found["answers"]["findings"] == []
        assert found["changed"] == []
        assert found["later"] == []
    assert ranks(case)[0]["answers"] == ranks(case)[1]["answers"]


def test_a_question_that_cannot_be_asked_says_why(ranks: Any) -> None:
    told = same(tuple(one["answers"] for one in ranks("setups_right")))["checks"]
    assert told["tensor batch"] == ("not checked", NOT_KNOWN)
    assert told["dropout on tensor ranks"] == ("not checked", NOT_KNOWN)
    assert told["copied shards"][0] == "not checked"
    assert told["evaluation"] == ("not checked", "evaluate= was not given: pass the evaluation of your loop")
    assert told["buffers"] == ("ok", "DistributedDataParallel broadcasts them")
    assert told["dropout on data ranks"][0] == "ok"
    sharded = same(tuple(one["answers"] for one in ranks("setups_sharded")))["checks"]
    assert sharded["copied shards"] == ("ok", "the parts of 6 parameters differ from rank to rank")
    assert sharded["replicas"] == ("not checked", "no two ranks hold the same part of a parameter")


@pytest.mark.parametrize(
    ("case", "findings", "sentence"),
    [
        ("same", ["same batch"], "ranks 0 and 1: up to 100% of a rank's samples are also on another data rank"),
        ("cut_copies", ["copied shards"], "3 of 3: up.weight, up.bias, down.weight: the parts of ranks 0 and 1 are"),
        ("summed", ["gradient scale"], "every kind of parameter: the gradient is 2 times the derivative"),
        ("around", ["gradient copies"], "differ between data ranks (ranks 0 and 1)"),
        ("missing", ["optimizer misses"], "2 of 6: norm.weight, norm.bias on ranks 0 and 1"),
        ("stale", ["evaluation"], "it leaves norm.weight, norm.bias gathered"),
        ("scattered", ["replicas", "buffers"], "norm.weight: rank 1 holds other values than the rest"),
        ("cut_drawn", ["dropout on tensor ranks"], "ranks 0 and 1 drop other entries of the same activation"),
    ],
)
def test_a_fault_is_the_first_finding(ranks: Any, case: str, findings: list[str], sentence: str) -> None:
    found = same(ranks(f"setups_{case}"))
    assert found["findings"][: len(findings)] == findings
    assert found["ok"] is False
    assert sentence in found["checks"][findings[0]][1]
    assert found["text"].startswith("2 processes: ")
    assert f"not ready to train; look first at {findings[0]}" in found["text"]


def test_the_gradient_of_one_fault_is_the_derivative_of_the_other(ranks: Any) -> None:
    """A sum over two ranks is twice the mean: 2.00, to the three digits that are shown."""
    assert "the gradient is 2 times" in same(ranks("setups_summed"))["checks"]["gradient scale"][1]


def test_where_one_rank_fails_all_say_which_and_why(ranks: Any) -> None:
    found = ranks("setups_failing")
    for one in found:
        assert one["loss"] == "InputError: rank 1: loss_fn(model, batch) failed: KeyError: 'labels'"
        assert one["after"] == "InputError: rank 0: after_backward(model) failed: OSError: disk"
        assert one["other"] == (
            "UsageError: the ranks give different arguments: call check_ranks with the same ones on every rank."
        )
        assert one["layout"].startswith("UsageError: rank 1: the layout failed: share= returns 1 for 'norm.weight'")
        assert one["skip"] == one["wrapped"] == one["other"]
        assert one["step"] == "", "update and evaluation are not checked on any rank"
        assert one["number"].endswith("loss_fn(model, batch) failed: it must return one number with a gradient.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "findings", "sentence"),
    [
        ("cut_batch", ["tensor batch"], "rank 1 has other samples than the tensor ranks beside"),
        ("doubled", ["optimizer doubles"], "1 of 5: first.weight on ranks 0 and 1"),
        ("rates", ["update"], "6 of 6: first.weight, first.bias, norm.weight and 3 more move differently on rank 1"),
    ],
)
def test_another_fault_is_the_first_finding(ranks: Any, case: str, findings: list[str], sentence: str) -> None:
    test_a_fault_is_the_first_finding(ranks, case, findings, sentence)


@pytest.mark.slow
def test_masks_that_are_alike_and_samples_that_two_ranks_share_are_warnings(ranks: Any) -> None:
    alike, overlap = same(ranks("setups_one_seed")), same(ranks("setups_overlap"))
    assert alike["findings"] == ["dropout on data ranks"]
    assert overlap["findings"] == ["same batch"]
    assert "up to 25% of a rank's samples" in overlap["checks"]["same batch"][1], "2 of 8 rows"
    assert alike["ok"] is overlap["ok"] is True
    assert "ok, with warnings; look first at dropout on data ranks" in alike["text"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["cut", "averaged", "resharded", "skipped"])
def test_the_same_without_the_fault_has_no_finding(ranks: Any, case: str) -> None:
    found = same(ranks(f"setups_{case}"))
    assert found["findings"] == []
    if case == "skipped":
        assert found["checks"]["same batch"] == ("not checked", "skip= leaves it out")
    if case == "cut":
        assert found["text"].startswith("2 processes: 1 data rank, each of 2 tensor ranks\n")
        assert found["checks"]["dropout on tensor ranks"][0] == "ok"


@pytest.mark.slow
def test_replicas_of_shards_are_compared_with_each_other(four_ranks: Any) -> None:
    found = same(four_ranks("setups_four"))
    assert found["findings"][0] == "replicas"
    assert "ranks 2 and 3 hold other values than the rest" in found["checks"]["replicas"][1]
    assert found["text"].startswith("4 processes: 4 data ranks\n")


@pytest.mark.slow
def test_the_command_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(READY)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

    def check(factory: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [*start, "-m", "stabilitylab", "check", f"mine:{factory}", *options]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)

    right = check("ready")
    assert right.returncode == 0, right.stderr
    assert right.stdout.startswith("2 processes: 2 data ranks\nok: replicas: 6 parameters")
    assert right.stdout.count("ok: the processes fit together") == 1, "rank 0 alone prints"
    wrong = check("same", "--json")
    assert wrong.returncode == 1, wrong.stderr
    told = json.loads(wrong.stdout)
    assert (told["ok"], told["ranks"], told["suspect"]["bound"]) == (False, 2, "same batch")
    broken = check("broken")
    assert broken.returncode == 1, "torchrun's own code: each rank's is 4"
    assert "stabilitylab: rank 1: loss_fn(model, batch) failed: KeyError: 'labels'" in broken.stderr
    alone = check("alone")
    assert "stabilitylab: torchrun started 2 processes, and mine:alone joined no process group" in alone.stderr
