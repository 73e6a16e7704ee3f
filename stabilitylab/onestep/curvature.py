"""The longest first update that does not raise the loss, and the curvature of the loss at the initialisation."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.groups import groups_of
from ..probes import Watcher
from ..train.recipe import param_groups
from .initial_model import Filled, Subject
from .standard_probes import Gathered

KNOWN = ("critical_sharpness", "preconditioned_sharpness", "sharpness")  # plug-ins may need more


def curvature(subject: Subject, probes: Sequence[str]) -> list[Filled]:
    """Return the tables of the probes of curvature, for AdamW's first update at the run's full rate, without warm-up.

    A headroom below 1 means that this update raises the loss of its own batch. The model does not change.
    """
    config, model, batch, sink = subject.config.train, subject.model, subject.batch, Gathered()
    counted = batch.weight > 0

    def losses() -> Tensor:
        logits = model(**batch.inputs)[counted]
        return F.cross_entropy(logits, batch.labels[counted], label_smoothing=config.label_smoothing, reduction="none")

    before = [parameter.detach().clone() for parameter in model.parameters()]
    groups = param_groups(config.model_copy(update={"warmup": 0, "schedule": "constant"}), groups_of(model))
    optimizer = torch.optim.AdamW(groups, config.lr, (config.beta1, config.beta2), config.eps, config.weight_decay)
    watcher = Watcher(
        model,
        sink,
        probes=probes,
        optimizer=optimizer,
        curvature_loss=losses,
        total_every_step=False,
        strict=True,
    )
    try:
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        losses().mean().backward()
        watcher.step()
        optimizer.step()
        watcher.flush()
    finally:
        watcher.close()
        for parameter, own, gradient in zip(model.parameters(), before, gradients, strict=True):
            parameter.data.copy_(own)
            parameter.grad = gradient
    del watcher, optimizer
    gc.collect()  # a watcher is part of cycles, and the model would stay in memory with it
    return [(table, sink.cells[table.name]) for table in sink.tables]
