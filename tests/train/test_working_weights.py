"""Working weights in bf16: the run of autocast bit for bit, with two calls in place of a cast at each use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from rest_slow import long
from tape import Tape
from torch.utils._python_dispatch import TorchDispatchMode

from stabilitylab.config import parse_set, resolve
from stabilitylab.errors import UsageError
from stabilitylab.store import Run, RunWriter
from stabilitylab.train import checkpoint, plan
from stabilitylab.train.fast.graph_replays import Replays
from stabilitylab.train.loop import Trainer

pytestmark = pytest.mark.two_runs

CLOCKS = ["tokens_per_second", "memory_bytes"]
COMMON = (
    "data.sentences=4 data.held_out=6 data.max_length=12 model.d_model=16 model.d_ffn=32 model.T=10 train.steps=12 "
    "train.warmup=4 train.lr=1e-3 train.precision=bf16 probes.every=3 probes.update_every=5"
)


def trainer(folder: Path, *settings: str, recorder: Any = None, state: Any = None) -> Trainer:
    prepared = plan(resolve(parse_set([*COMMON.split(), *settings]), depth=4))
    if state is None:
        writer = RunWriter.create(folder, {"config": prepared.config.model_dump(mode="json")})
    else:
        writer = RunWriter.resume(folder, part=state["part"], manifest={})
    made = Trainer(prepared.config, prepared.dataset, writer, prepared.device, state, recorder=recorder)
    if recorder is not None:
        return made
    for group in made.optimizer.param_groups:
        group["lr"] = torch.zeros(())
    return made


def fit(folder: Path, *settings: str, recorder: Any = None) -> Trainer:
    made = trainer(folder, *settings, recorder=recorder)
    made.fit(lambda: False, lambda report: None)
    made.watcher.close()
    return made


def same(first: Trainer, second: Trainer) -> None:
    one, two = Run.open(first.run.path), Run.open(second.run.path)
    for name in one.tables:
        assert len(one.frame(name))
        pd.testing.assert_frame_equal(one.frame(name), two.frame(name), check_exact=True)
    metrics = [run.metrics.drop(columns=CLOCKS) for run in (one, two)]
    pd.testing.assert_frame_equal(*metrics, check_like=True, check_exact=True)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


ON = "train.working_weights=true"


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("model.arch=admin", "model.dropout=0.1"),
        long("model.arch=normformer", "train.clip_norm=0.5", "model.tie=none"),
        long("model.tie=none", "train.accumulate=3"),
        long("model.stack=decoder", "train.activation_checkpointing=true", "model.dropout=0.1"),
        long("probes.names=['all']", "probes.every=1", "probes.update_every=1"),
    ],
    ids=lambda settings: " ".join(settings) or "defaults",
)
def test_it_is_the_run_of_autocast(settings: tuple[str, ...], tmp_path: Path) -> None:
    """With the held-out pass's weights of row 0 in between, which working weights must not stand for."""
    cast = fit(tmp_path / "cast", *settings)
    working = fit(tmp_path / "working", ON, *settings)
    same(cast, working)
    assert working.working is not None
    tied = "model.tie=none" not in settings
    matrices = [name for name, p in working.model.named_parameters() if any(p is w for w in working.working.weights)]
    assert ("output.weight" in matrices) is not tied
    assert sum("fc1" in name for name in matrices) == 2 * sum(len(s.layers) for s in working.model.stacks.values())


def test_a_parameter_that_has_no_gradient_gets_none(tmp_path: Path) -> None:
    """Of a table that tells no gradient from 0."""
    made = trainer(tmp_path / "run", ON)
    assert made.working is not None
    frozen = made.model.stacks["decoder"].layers[0].ffn.f
    frozen.fc1.working[0].requires_grad_(False)
    batches = [made._micro_batch(0, 0)]
    made.forward_backward(batches, torch.tensor(1.0))
    assert frozen.fc1.weight.grad is None
    assert frozen.fc2.weight.grad is not None
    assert all(short.grad is None for short in made.working._working)
    made.watcher.close()


def test_an_update_that_failed_leaves_no_gradient_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a recording does that fails between a backward pass and the end of the update."""
    made = trainer(tmp_path / "run", ON)
    assert made.working is not None

    def fail() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with monkeypatch.context() as patch:
        patch.setattr(made.working, "widen", fail)
        with pytest.raises(RuntimeError, match="capturing"):
            made.update()
    assert all(tensor.grad is None for tensor in (*made.working._working, *made.model.parameters()))
    made.watcher.close()


@pytest.mark.slow
def test_replayed_and_resumed(tmp_path: Path) -> None:
    direct = fit(tmp_path / "direct", ON, "train.checkpoint_every=5")
    replayed = fit(tmp_path / "replayed", ON, "train.checkpoint_every=5", recorder=Tape())
    same(direct, replayed)
    assert isinstance(replayed.apply, Replays)
    assert replayed.apply.recorded
    seen: list[int] = []
    broken = trainer(tmp_path / "broken", ON, "train.checkpoint_every=5")
    assert broken.fit(lambda: len(seen) >= 7, lambda report: seen.append(report.row)) is None
    broken.watcher.close()
    rest = trainer(tmp_path / "broken", ON, state=checkpoint.load(broken.run.path / "checkpoints", broken.device))
    rest.fit(lambda: False, lambda report: None)
    rest.watcher.close()
    same(direct, rest)


@pytest.mark.slow
def test_it_saves_a_cast_at_each_use(tmp_path: Path) -> None:
    class Casts(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func._schema.name == "aten::_to_copy"
            return func(*args, **(kwargs or {}))

    found = {}
    for name, settings in (("cast", ()), ("working", (ON,))):
        made = trainer(tmp_path / name, *settings, "probes.names=['none']", "train.evaluations=0")
        made.update()
        made.row += 1
        with Casts() as casts:
            made.update()
        made.watcher.close()
        found[name] = casts.count
    matrices = len(made.working.weights) if made.working is not None else 0
    assert matrices > 30
    assert found["cast"] - found["working"] == 2 * matrices


@pytest.mark.parametrize("other", ["train.precision=fp32", "train.parallel=ddp"])
def test_what_it_does_not_go_with(other: str) -> None:
    with pytest.raises(UsageError, match=r"train\.working_weights needs train\.precision = 'bf16'"):
        resolve(parse_set(["train.precision=bf16", ON, other]), depth=2)
