"""The flight recorder of the reference trainer: the declared update, its batches, and the objects that replay a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Config, complete, validated
from ..data import Batch
from ..errors import UsageError
from ..explain import Recorder
from ..models import build_model
from ..models.groups import groups_of
from ..probes.numerics import attention
from .environment import attention_kernels, prepare_process, resolve_device
from .recipe import optimizer_of, param_groups, token_losses


def recorder_of(config: Config, device: torch.device) -> Recorder | None:
    """Return the recorder that ``probes.record`` asks for; None without it. Raises UsageError for settings under which
    an update cannot be replayed."""
    if not config.probes.record:
        return None
    if config.train.working_weights:
        raise UsageError("--record keeps no copies of weights in bf16: give --set train.working_weights=false.")
    return Recorder(
        loss_of(config, device),
        every=config.probes.record_every,
        clip=config.train.clip_norm or None,
        labels="labels",
        masks="weight",
    )


def held(batch: Batch, tokens: Tensor, row: int) -> dict[str, Any]:
    """Return a micro-batch as the recorder keeps it: with the tokens that its update's losses are divided by, and the
    row that sets alpha."""
    return {
        "inputs": dict(batch.inputs),
        "labels": batch.labels,
        "weight": batch.weight,
        "tokens": tokens,
        "row": row,
    }


def loss_of(config: Config, device: torch.device) -> Callable[[nn.Module, Mapping[str, Any]], Tensor]:
    """Return the loss of a micro-batch that backward is called on, as the trainer computes it."""
    kernels = attention_kernels(config.train, device)
    bf16 = config.train.precision == "bf16"

    def loss_fn(model: Any, batch: Mapping[str, Any]) -> Tensor:
        model.set_row(batch["row"])
        with attention(kernels):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
                logits = model(**batch["inputs"])
            loss, _ = token_losses(logits, batch["labels"], batch["weight"], config.train.label_smoothing)
        return loss / batch["tokens"]

    return loss_fn


def replayed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model, ``loss_fn`` and the optimizer of a run of ``probe``, by its run.json; their state is that of
    the recorded snapshots. No data are read: batches lie in the black box."""
    config = validated(complete(manifest["config"]))
    prepare_process(config.train.threads)
    device = resolve_device(config.train)
    data = manifest["data"]
    vocabularies = {"source_vocab": data["source_vocab"], "target_vocab": data["target_vocab"]}
    model = build_model(config.model, **vocabularies, seed=config.train.seed).to(device)
    there = device if device.type == "cuda" else None
    optimizer = optimizer_of(config.train, param_groups(config.train, groups_of(model), there), device=there)
    return {"model": model, "loss_fn": loss_of(config, device), "optimizer": optimizer}
