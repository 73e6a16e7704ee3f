"""Parameters and memory of a run; activations are measured on models of one and two layers and extrapolated."""

from __future__ import annotations

import os
from collections.abc import Container
from dataclasses import dataclass, replace

import psutil
import torch

from ..config import Config
from ..data import Batch, Dataset
from ..environment import RUNS_PER_DEVICE
from ..errors import ResourceError
from ..models import ARCHS, build_model, parameter_count
from ..probes import chosen
from .environment import aligned
from .fast import some_run_directly
from .recipe import token_losses

# Bytes of a process beside its tensors. On a GPU: CUDA's context, kernels, the allocator's slack. Else: Python, torch.
CONTEXT, PROCESS = 2**30, 2**29
FEW = 4  # rows of the batches that are measured


@dataclass(frozen=True)
class Footprint:
    """The memory of a run. ``parameters``: their exact number. ``state``: bytes of weights, gradients, Adam's moments
    and the copies that probes keep. ``activations``: bytes that the forward pass of one micro-batch keeps for the
    backward pass; with activation checkpointing, the input of each layer and the inside of the largest layer.
    ``graphs``: further bytes that recorded updates hold if some updates run directly, since graphs do not share their
    memory."""

    parameters: int
    state: int
    activations: int
    graphs: int = 0

    @property
    def total(self) -> int:
        return self.state + self.activations + self.graphs


def estimate(config: Config, dataset: Dataset, device: torch.device | None = None, recorded: bool = False) -> Footprint:
    """Estimate the memory of a run. Activations are affine in the numbers of encoder and decoder layers and in the rows
    of a batch. Models of one or two layers and a few rows determine them, in the precision of the run. ``recorded``:
    updates are replayed."""
    device = device or torch.device("cpu")
    batch = aligned(max((dataset.micro_batch(step) for step in range(8)), key=lambda b: b.labels.numel()), device)

    n, m = config.model.encoder_layers, config.model.decoder_layers

    def at(encoder: int, decoder: int, again: bool) -> int:
        layers = {"encoder_layers": encoder if n else 0, "decoder_layers": decoder if m else 0}
        return _measure(config, layers, dataset, batch, again)

    def around(again: bool) -> tuple[int, int, int]:
        return at(1, 1, again), at(2, 1, again), at(1, 2, again)

    again = config.train.activation_checkpointing
    base, more_encoder, more_decoder = around(again)
    activations = base + max(n - 1, 0) * (more_encoder - base) + max(m - 1, 0) * (more_decoder - base)
    if again:  # the backward pass holds the inside of one layer at a time
        one, *two = around(again=False)
        activations += max(layer - one for layer in two)
    parameters = parameter_count(config.model, source_vocab=dataset.source_vocab, target_vocab=dataset.target_vocab)
    graphs = (recorded and some_run_directly(dataset, config.train.accumulate)) * activations
    return Footprint(parameters, 4 * _copies(config, device) * parameters, activations, graphs)


def _copies(config: Config, device: torch.device) -> int:
    """Return the number of copies of the parameters: weights, gradients and Adam's two moments, and theta_t and theta_0
    of the probes. On a GPU the probes' copies take only memory that is left
    (:func:`stabilitylab.probes.parameters.copies.on_host`) and do not count."""
    probes, model = chosen(config.probes.names), config.model
    scheduled = any(ARCHS[name].scheduled for name in (model.arch, model.decoder_arch) if name) or model.prores != "off"
    here = device.type != "cuda"
    return 4 + here * (("update_ratio" in probes) + ("model_update" in probes and scheduled))


def check_memory(footprint: Footprint, device: torch.device) -> None:
    """Raise ResourceError before the start of a run that does not fit.

    The runs of a sweep start at once, while the memory that the others will take is still free. With several runs on
    one device (``STABILITYLAB_RUNS_PER_DEVICE``, set by the sweep), each has an equal part of the whole memory, less
    the memory of a process itself.
    """
    if device.type == "cuda":
        (free, whole), own = torch.cuda.mem_get_info(device), CONTEXT
    else:
        memory = psutil.virtual_memory()
        free, whole, own = memory.available, memory.total, PROCESS
    gib, runs = 2**30, int(os.environ.get(RUNS_PER_DEVICE) or 1)
    if footprint.total > free:
        raise ResourceError(
            f"this run needs about {footprint.total / gib:.1f} GiB and {free / gib:.1f} GiB are free on {device}: "
            "give a smaller --depth, --set data.sentences=... or --set model.d_model=..."
        )
    part = whole / runs - own
    if runs > 1 and footprint.total > part:
        raise ResourceError(
            f"this run needs about {footprint.total / gib:.1f} GiB, and each of {runs} at a time on {device} has "
            f"{max(part, 0) / gib:.1f} GiB of its {whole / gib:.0f}: give a smaller --jobs."
        )


def _measure(config: Config, layers: dict[str, int], dataset: Dataset, batch: Batch, again: bool) -> int:
    settings = config.model.model_copy(update=layers)
    model = build_model(settings, source_vocab=dataset.source_vocab, target_vocab=dataset.target_vocab)
    for stack in model.stacks.values():
        stack.checkpointing = again
    with torch.random.fork_rng(devices=[]):
        model.calibrate(**_head(batch, FEW).inputs)
    parameters = {p.data_ptr() for p in model.parameters()}
    rows = len(batch.labels)
    if rows <= 2 * FEW:
        return _kept(config, model, batch, parameters)
    few, twice = (_kept(config, model, _head(batch, n), parameters) for n in (FEW, 2 * FEW))
    return few + (twice - few) * (rows - FEW) // FEW


def _head(batch: Batch, rows: int) -> Batch:
    """Return the first ``rows`` rows of a batch, in its padded shape."""
    cut = {name: tensor[:rows] for name, tensor in batch.inputs.items()}
    return replace(batch, inputs=cut, labels=batch.labels[:rows], weight=batch.weight[:rows])


def _kept(config: Config, model: torch.nn.Module, batch: Batch, parameters: Container[int]) -> int:
    """Return the bytes that one forward pass keeps without the weights. Copies of weights in another precision
    count."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output that its own node keeps would never be freed

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    low = torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.train.precision == "bf16")
    with torch.random.fork_rng(devices=[]), hooks:
        with low:
            logits = model(**batch.inputs)
        loss, _ = token_losses(logits, batch.labels, batch.weight, 0.0)
    del loss  # kept until here: the loss holds the graph, so that no storage was freed and its address counted twice
    return sum(kept.values())
