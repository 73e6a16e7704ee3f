"""Parameters and memory of a run, measured on models of one and two layers and extended to the asked depth."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from ..config import Config
from ..data import Batch, Dataset
from ..errors import ResourceError
from ..models import build_model
from .recipe import token_losses


@dataclass(frozen=True)
class Footprint:
    """``parameters`` exactly; ``state`` bytes of weights, gradients, Adam's moments and theta_0; ``activations`` bytes
    that the forward pass of one micro-batch keeps for the backward pass; with activation checkpointing the input of
    each layer, and the inside of the largest one."""

    parameters: int
    state: int
    activations: int

    @property
    def total(self) -> int:
        return self.state + self.activations


def estimate(config: Config, dataset: Dataset) -> Footprint:
    """Both quantities are affine in the numbers of encoder and decoder layers, so tiny models determine them."""
    batch = max((dataset.micro_batch(step) for step in range(8)), key=lambda b: b.labels.numel())

    n, m = config.model.encoder_layers, config.model.decoder_layers

    def at(encoder: int, decoder: int, again: bool) -> tuple[int, int]:
        layers = {"encoder_layers": encoder if n else 0, "decoder_layers": decoder if m else 0}
        return _measure(config, layers, dataset, batch, again)

    def around(again: bool) -> tuple[tuple[int, int], ...]:
        return at(1, 1, again), at(2, 1, again), at(1, 2, again)

    again = config.train.activation_checkpointing
    base, more_encoder, more_decoder = around(again)
    parameters, activations = (
        base[i] + max(n - 1, 0) * (more_encoder[i] - base[i]) + max(m - 1, 0) * (more_decoder[i] - base[i])
        for i in range(2)
    )
    if again:  # the backward pass holds the inside of one layer at a time
        one, *two = around(again=False)
        activations += max(layer[1] - one[1] for layer in two)
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


def _measure(config: Config, layers: dict[str, int], dataset: Dataset, batch: Batch, again: bool) -> tuple[int, int]:
    settings = config.model.model_copy(update=layers)
    model = build_model(settings, source_vocab=dataset.source_vocab, target_vocab=dataset.target_vocab)
    for stack in model.stacks.values():
        stack.checkpointing = again
    with torch.random.fork_rng():
        model.calibrate(**batch.inputs)
    parameters = {p.data_ptr(): p.numel() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.random.fork_rng(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = token_losses(model(**batch.inputs), batch.labels, batch.weight, 0.0)
    del loss  # it held the graph, so that no storage could be freed and counted twice
    return sum(parameters.values()), sum(kept.values())
