from __future__ import annotations

import pytest
import torch

from stabilitylab.config import parse_set, resolve
from stabilitylab.data import load_data
from stabilitylab.errors import ResourceError
from stabilitylab.models import build_model
from stabilitylab.train.footprint import Footprint, check_memory, estimate


@pytest.mark.parametrize("stack", ["encoder-decoder", "encoder", "decoder"])
@pytest.mark.parametrize("arch", ["postln", "preln", "admin"])
def test_parameters_are_exact_and_activations_linear(stack: str, arch: str) -> None:
    config = resolve(parse_set([f"model.stack={stack}", f"model.arch={arch}", "data.sentences=4"]), depth=6)
    dataset = load_data(config.data, stack=config.model.stack)
    footprint = estimate(config, dataset)
    model = build_model(config.model, source_vocab=dataset.source_vocab, target_vocab=dataset.target_vocab)
    assert footprint.parameters == sum(p.numel() for p in model.parameters())
    direct = estimate(
        resolve(parse_set([f"model.stack={stack}", f"model.arch={arch}", "data.sentences=4"]), depth=2), dataset
    )
    assert footprint.activations > direct.activations > 0


def test_a_run_that_cannot_fit_is_refused_before_it_starts() -> None:
    check_memory(Footprint(10, 40, 40), torch.device("cpu"))
    with pytest.raises(ResourceError, match=r"needs about 1048576\.0 GiB .* give a smaller --depth"):
        check_memory(Footprint(10, 2**50, 0), torch.device("cpu"))


@pytest.mark.parametrize(("stack", "streams"), [("encoder-decoder", 2), ("encoder", 1), ("decoder", 1)])
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
