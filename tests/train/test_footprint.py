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
