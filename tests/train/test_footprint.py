from __future__ import annotations

import gc
from types import SimpleNamespace

import psutil
import pytest
import torch
from rest_slow import rest_slow
from tape import Tape

from stabilitylab.config import parse_set, resolve
from stabilitylab.data import load_data
from stabilitylab.environment import RUNS_PER_DEVICE
from stabilitylab.errors import ResourceError
from stabilitylab.models import build_model
from stabilitylab.train import footprint, plan
from stabilitylab.train.environment import peak_memory
from stabilitylab.train.footprint import Footprint, check_memory, estimate
from stabilitylab.train.recipe import token_losses


@pytest.mark.parametrize("stack", rest_slow(["encoder-decoder", "encoder", "decoder"], ["encoder-decoder"]))
@pytest.mark.parametrize("arch", ["postln", "preln", "admin"])
def test_parameters_are_exact_and_activations_linear(stack: str, arch: str) -> None:
    config = resolve(parse_set([f"model.stack={stack}", f"model.arch={arch}", "data.sentences=4"]), depth=6)
    dataset = load_data(config.data, stack=config.model.stack)
    found = estimate(config, dataset)
    model = build_model(config.model, source_vocab=dataset.source_vocab, target_vocab=dataset.target_vocab)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    direct = estimate(
        resolve(parse_set([f"model.stack={stack}", f"model.arch={arch}", "data.sentences=4"]), depth=2), dataset
    )
    assert found.activations > direct.activations > 0


@pytest.mark.slow
def test_an_estimate_leaves_nothing_in_memory() -> None:
    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    config = resolve(parse_set(["data.sentences=4"]), depth=4)
    dataset, before = load_data(config.data, stack=config.model.stack), tensors()
    estimate(config, dataset)
    assert tensors() == before


def test_a_run_that_cannot_fit_is_refused_before_it_starts() -> None:
    check_memory(Footprint(10, 40, 40), torch.device("cpu"))
    with pytest.raises(ResourceError, match=r"needs about 1048576\.0 GiB .* give a smaller --depth"):
        check_memory(Footprint(10, 2**50, 0), torch.device("cpu"))


@pytest.mark.parametrize(
    ("stack", "streams"), rest_slow([("encoder-decoder", 2), ("encoder", 1), ("decoder", 1)], [("encoder", 1)])
)
def test_with_checkpointing_a_layer_keeps_its_input_alone(stack: str, streams: int) -> None:
    """One float32 residual stream a layer, and once the inside of the largest layer."""
    sets = [f"model.stack={stack}", "model.arch=postln", "model.dropout=0.1", "data.sentences=4"]
    config = resolve(parse_set(sets))
    dataset = load_data(config.data, stack=config.model.stack)
    step = 2 if stack == "encoder-decoder" else 1

    def activations(depth: int, again: str) -> int:
        config = resolve(parse_set([*sets, f"train.activation_checkpointing={again}"]), depth=depth)
        return estimate(config, dataset).activations

    batch = max((dataset.micro_batch(step) for step in range(8)), key=lambda b: b.labels.numel())
    tokens = sum(batch.inputs[name].numel() for name in ("source", "target", "tokens") if name in batch.inputs)
    assert activations(10 + step, "true") - activations(10, "true") == 4 * 64 * tokens
    layers = activations(10 + step, "false") - activations(10, "false")  # an encoder's and a decoder's, or one
    base = activations(2, "false") - (2 // step) * layers  # embeddings and logits
    inside = activations(2, "true") - (2 // step) * 4 * 64 * tokens - base
    assert layers / streams <= inside <= layers


def test_state_counts_what_each_probe_keeps() -> None:
    def copies(*sets: str, device: str = "cpu") -> int:
        return footprint._copies(resolve(parse_set(sets), depth=2), torch.device(device))

    assert copies("probes.names=['none']", "model.arch=deepnorm") == 4  # weights, gradients, two moments
    assert copies("probes.names=['update_ratio']") == 5
    assert copies("model.arch=deepnorm") == 5
    assert copies() == 6  # BranchNorm: theta_0 too
    assert copies(device="cuda") == 4  # where there is no room they wait on the host


@pytest.mark.slow
def test_what_recorded_updates_hold_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of graphs is theirs alone, so that what runs directly beside them takes as much again."""

    def graphs(*sets: str, recorded: bool = True) -> tuple[float, int]:
        config = resolve(parse_set(["data.sentences=4", *sets]), depth=2)
        dataset = load_data(config.data, stack=config.model.stack)
        found = estimate(config, dataset, recorded=recorded)
        assert found.total == found.state + found.activations + found.graphs
        return found.graphs / found.activations, len(dataset.buckets)

    assert graphs() == (0, 2)
    assert graphs("train.accumulate=3") == (0, 2)  # 16 kinds
    assert graphs("train.accumulate=4") == (0, 2)  # 32: halves of updates are recorded apart, 2 shapes
    monkeypatch.setattr("stabilitylab.train.fast.graph_replays.MOST", 3)
    assert graphs() == (1, 2)  # 4 kinds: some run directly
    assert graphs("data.max_length=6") == (0, 1)
    assert graphs(recorded=False) == (0, 2)
    monkeypatch.setattr("stabilitylab.train.fast.graph_replays.MOST", 1)
    assert graphs("train.accumulate=4") == (1, 2)  # shapes


@pytest.mark.slow
def test_a_run_that_fits_without_graphs_alone_goes_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def planned(asked: str):
        sets = ["data.sentences=4", f"train.cuda_graphs={asked}"]
        return plan(resolve(parse_set(sets), depth=2))

    monkeypatch.setattr("stabilitylab.train.fast.graph_replays.MOST", 3)  # of 4 kinds
    monkeypatch.setattr("stabilitylab.train.run.recorder_for", lambda *_: Tape())
    room = planned("auto").footprint
    assert room.graphs
    assert planned("auto").recorder is not None
    memory = SimpleNamespace(available=room.total - 1, total=2**50)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    went = planned("auto")
    assert (went.recorder, went.footprint.graphs) == (None, 0)
    assert "CUDA graphs are off: with them this run needs about" in caplog.text
    with pytest.raises(ResourceError, match="this run needs about"):
        planned("on")
    memory.available = room.state
    with pytest.raises(ResourceError, match="this run needs about"):
        planned("auto")


def test_the_peak_is_what_nobody_else_could_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5)
    assert peak_memory(torch.device("cuda")) == 7


def test_a_few_rows_tell_what_all_of_them_keep() -> None:
    """Against all rows at once, summed with no help of the estimate's."""
    config = resolve(parse_set(["model.arch=preln", "data.sentences=40", "model.dropout=0.1"]), depth=2)
    dataset = load_data(config.data, stack=config.model.stack)
    batch = max((dataset.micro_batch(step) for step in range(8)), key=lambda b: b.labels.numel())
    model = build_model(config.model, source_vocab=dataset.source_vocab, target_vocab=dataset.target_vocab)
    weights = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = token_losses(model(**batch.inputs), batch.labels, batch.weight, 0.0)
    assert len(batch.labels) > 2 * footprint.FEW
    assert estimate(config, dataset).activations == pytest.approx(sum(kept.values()), rel=1e-3)
    del loss


@pytest.mark.slow
def test_the_precision_of_the_run_counts() -> None:
    sizes = {}
    for precision in ("fp32", "bf16"):
        config = resolve(
            parse_set([f"train.precision={precision}", "model.arch=deepnorm", "data.sentences=64"]), depth=2
        )
        sizes[precision] = estimate(config, load_data(config.data, stack=config.model.stack)).activations
    assert 0.4 * sizes["fp32"] < sizes["bf16"] < 0.9 * sizes["fp32"]


@pytest.mark.parametrize(("device", "own"), [("cpu", footprint.PROCESS), ("cuda", footprint.CONTEXT)])
def test_each_of_several_runs_has_its_part_of_the_device(
    device: str, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gib = 2**30
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=70 * gib, total=80 * gib))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda where: (70 * gib, 80 * gib))
    where = torch.device(device)
    check_memory(Footprint(10, 60 * gib, 0), where)
    monkeypatch.setenv(RUNS_PER_DEVICE, "1")
    check_memory(Footprint(10, 60 * gib, 0), where)
    monkeypatch.setenv(RUNS_PER_DEVICE, "8")
    check_memory(Footprint(10, 10 * gib - own, 0), where)
    with pytest.raises(
        ResourceError, match=rf"each of 8 at a time on {device} has .* of its 80: give a smaller --jobs"
    ):
        check_memory(Footprint(10, 10 * gib - own + 1, 0), where)


def test_an_estimate_asks_nothing_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeping the random states of all GPUs starts CUDA on each, and warns where there are many."""
    asked = []
    fork = torch.random.fork_rng

    def watched(devices=None, **others):
        asked.append(devices)
        return fork(devices, **others)

    monkeypatch.setattr(torch.random, "fork_rng", watched)
    config = resolve(parse_set(["model.arch=admin", "data.sentences=4"]), depth=2)
    estimate(config, load_data(config.data, stack=config.model.stack))
    assert asked
    assert None not in asked
