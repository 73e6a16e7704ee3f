"""Layers that are computed again in the backward pass: the same run, bit for bit, from less memory."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from rest_slow import rest_slow
from test_resume import CLOCKS, InterruptAt, Silent

from stabilitylab.config import parse_set, resolve
from stabilitylab.models import ARCHS, build_model
from stabilitylab.models.transformer import Layer, Stack
from stabilitylab.store import Run
from stabilitylab.train import plan, resume, start
from stabilitylab.train.run import Plan

pytestmark = pytest.mark.two_runs

COMMON = (
    "model.T=3 model.dropout=0.1 model.attention_dropout=0.1 model.activation_dropout=0.1 train.warmup=1 train.lr=1e-3 "
    "train.steps=3 train.accumulate=2 probes.every=1 probes.update_every=1 data.sentences=4 data.held_out=6"
)
AGAIN = "train.activation_checkpointing=true"


def prepared(*settings: str, depth: int = 4) -> Plan:
    return plan(resolve(parse_set([*COMMON.split(), *settings]), depth=depth))


def differences(first: Path, second: Path) -> list[str]:
    """Names of tables, metrics and parameters in which two runs are not equal to the last bit."""
    one, two = Run.open(first), Run.open(second)
    assert one.tables == two.tables
    different = [name for name in one.tables if not one.frame(name).equals(two.frame(name))]
    metrics: list[pd.DataFrame] = [run.metrics.drop(columns=CLOCKS) for run in (one, two)]
    different += [name for name in metrics[0] if not metrics[0][name].equals(metrics[1][name])]
    last = sorted((first / "checkpoints").iterdir())[-1].name
    states = [torch.load(path / "checkpoints" / last, weights_only=True) for path in (first, second)]
    for part in ("model", "rng"):
        a, b = (state[part] if part == "model" else {part: state[part]} for state in states)
        different += [name for name in a if not torch.equal(a[name], b[name])]
    return different


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "precision"),
    rest_slow(
        [*((arch, "fp32") for arch in sorted(ARCHS)), ("branchnorm", "bf16"), ("preln", "bf16")],
        [("branchnorm", "fp32")],
        [("resi-dual", "fp32"), ("dlcl", "fp32"), ("branchnorm", "bf16")],
    ),
)
def test_a_run_is_the_same_bit_for_bit(arch: str, precision: str, tmp_path: Path) -> None:
    """Losses, gradients (in the tables), every registered probe, parameters, the generator of dropout."""
    settings = (f"model.arch={arch}", f"train.precision={precision}", "probes.names=['all']")
    kept = start(prepared(*settings), tmp_path, "kept", Silent()).path
    again = start(prepared(*settings, AGAIN), tmp_path, "again", Silent()).path
    assert differences(kept, again) == []
    assert len(Run.open(kept).tables) > 12
    assert set(Run.open(kept).frame("grad_norm")["step"]) == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("stack", rest_slow(["encoder", "decoder"], ["decoder"]))
def test_single_stacks_too(stack: str, tmp_path: Path) -> None:
    kept = start(prepared(f"model.stack={stack}"), tmp_path, "kept", Silent()).path
    again = start(prepared(f"model.stack={stack}", AGAIN), tmp_path, "again", Silent()).path
    assert differences(kept, again) == []


@pytest.mark.slow
def test_other_dropout_in_the_second_computation_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = start(prepared(), tmp_path, "kept", Silent()).path
    monkeypatch.setattr(Stack, "draws", property(lambda stack: False, lambda stack, value: None), raising=False)
    again = start(prepared(AGAIN), tmp_path, "again", Silent()).path
    assert {"grad_norm", "loss", "decoder.layers.0.ffn.f.fc1.weight"} <= set(differences(kept, again))


@pytest.mark.slow
def test_a_resumed_run_equals_one_without(tmp_path: Path) -> None:
    kept = start(prepared(), tmp_path, "kept", Silent())
    broken = start(prepared(AGAIN), tmp_path, "broken", InterruptAt(1))
    assert (broken.state, broken.row) == ("interrupted", 2)
    assert Run.open(broken.path).config["train"]["activation_checkpointing"] is True
    assert resume(broken.path, None, Silent()).verdict == kept.verdict
    assert differences(kept.path, broken.path) == []


def calls(training: bool, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Counter[str]:
    """How often each layer is computed in a forward, and where there are gradients a backward pass."""
    model = build_model(depth=4, arch="postln", source_vocab=20, target_vocab=20, **settings).train(training)
    counted: Counter[str] = Counter()
    forward = Layer.forward

    def counting(layer: Layer, *args: Any) -> torch.Tensor:
        counted[str(layer.ffn.place)] += 1
        return forward(layer, *args)

    monkeypatch.setattr(Layer, "forward", counting)
    for stack in model.stacks.values():
        stack.checkpointing = True
    tokens = torch.arange(4, 16).reshape(2, 6)
    with torch.set_grad_enabled(training):
        logits = model(source=tokens, target=tokens)
    if training:
        logits.sum().backward()
    return counted


def test_each_layer_is_computed_twice_in_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [f"{stack}.{layer}.ffn" for stack in ("encoder", "decoder") for layer in (1, 2)]
    assert calls(True, monkeypatch) == dict.fromkeys(places, 2)
    monkeypatch.undo()
    assert calls(False, monkeypatch) == dict.fromkeys(places, 1)


def test_without_dropout_nobody_reads_the_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph could not capture."""

    def refuse() -> torch.Tensor:
        raise AssertionError("the random state was read")

    for draws in ("dropout", "attention_dropout", "activation_dropout"):
        monkeypatch.setattr(torch, "get_rng_state", refuse)
        assert len(calls(True, monkeypatch, dropout=0.0)) == 4
        with pytest.raises(AssertionError, match="random state was read"):
            calls(True, monkeypatch, **{draws: 0.1})
        monkeypatch.undo()


def test_the_flag_and_what_it_saves(run: Any) -> None:
    arguments = ("probe", "--depth", "40", "--dry-run", "--json")
    facts = [json.loads(run(*arguments, *flag)[1]) for flag in ((), ("--activation-checkpointing",))]
    assert [f["config"]["train"]["activation_checkpointing"] for f in facts] == [False, True]
    kept, again = (f["memory_bytes"]["activations"] for f in facts)
    assert again < kept / 3
    code, _, error = run("probe", "--resume", "x", "--activation-checkpointing")
    assert code == 2
    assert "only --steps may go with it" in error


@pytest.mark.gpu
def test_on_a_gpu_the_same_losses_take_less_memory(tmp_path: Path) -> None:
    """Some CUDA kernels of the backward pass add up in an order of their own: equal to a tolerance."""
    losses, peaks = [], []
    for name, settings in (("kept", ()), ("again", (AGAIN,))):
        torch.cuda.reset_peak_memory_stats()
        large = ("train.device=cuda", "train.cuda_graphs=off", "data.sentences=32")  # activations outweigh the state
        path = start(prepared(*large, *settings, depth=100), tmp_path, name, Silent()).path
        losses.append(Run.open(path).metrics["loss"].to_numpy())
        peaks.append(torch.cuda.max_memory_allocated())
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=0, equal_nan=True)
    assert peaks[1] < 0.7 * peaks[0]
