"""Parameters and memory of a run; activations are measured on models of one and two layers and extended."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from ..config import Config
from ..data import Batch, Dataset
from ..errors import ResourceError
from ..models import build_model, parameter_count
from .recipe import token_losses


@dataclass(frozen=True)
class Footprint:
    """``parameters`` exactly; ``state`` bytes of weights, gradients, Adam's moments and theta_0; ``activations`` bytes
    that the forward pass of one micro-batch keeps for the backward pass."""

    parameters: int
    state: int
    activations: int

    @property
    def total(self) -> int:
        return self.state + self.activations


def estimate(config: Config, dataset: Dataset) -> Footprint:
    """Activations are affine in the numbers of encoder and decoder layers, so three tiny models determine them."""
    batch = max((dataset.micro_batch(step) for step in range(8)), key=lambda b: b.labels.numel())

    def at(encoder: int, decoder: int) -> int:
        layers = {"encoder_layers": min(encoder, n), "decoder_layers": min(decoder, m)}
        return _measure(config, layers, dataset, batch)

    n, m = config.model.encoder_layers, config.model.decoder_layers
    base, more_encoder, more_decoder = at(1, 1), at(2, 1), at(1, 2)
    activations = base + max(n - 1, 0) * (more_encoder - base) + max(m - 1, 0) * (more_decoder - base)
    parameters = parameter_count(config.model, source_vocab=dataset.source_vocab, target_vocab=dataset.target_vocab)
    copies = 5  # weights, gradients, Adam's two moments, theta_0 of the probe model_update
    return Footprint(parameters, 4 * copies * parameters, activations)


def check_memory(footprint: Footprint, device: torch.device) -> None:
    """Raises ResourceError before a run that cannot fit is started."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available
    if footprint.total > free:
        raise ResourceError(
            f"this run needs about {footprint.total / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free on {device}: "
            "give a smaller --depth, --set data.sentences=... or --set model.d_model=..."
        )


def _measure(config: Config, layers: dict[str, int], dataset: Dataset, batch: Batch) -> int:
    settings = config.model.model_copy(update=layers)
    model = build_model(settings, source_vocab=dataset.source_vocab, target_vocab=dataset.target_vocab)
    with torch.random.fork_rng():
        model.calibrate(**batch.inputs)
    parameters = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.random.fork_rng(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = token_losses(model(**batch.inputs), batch.labels, batch.weight, 0.0)
    del loss  # it held the graph, so that no storage could be freed and counted twice
    return sum(kept.values())
