"""Small subjects for the tests of one-step runs, and roles read by name alone."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import Tensor

from stabilitylab.config import Config, merge, resolve
from stabilitylab.data import load_data
from stabilitylab.onestep.initial_model import Filled, Subject
from stabilitylab.onestep.standard_probes import ordinary

SMALL: dict[str, Any] = {
    "model": {"d_model": 16, "d_ffn": 24, "heads": 2, "T": 10},
    "data": {"sentences": 4, "max_length": 9, "held_out": 4, "seed": 3, "vocab_size": 200},
    "train": {"seed": 3, "device": "cpu"},
}
STACKS = {"encoder-decoder": (2, 3), "encoder": (2, 0), "decoder": (0, 2)}


def config_of(arch: str, stack: str = "encoder-decoder", seed: int = 3, **model: Any) -> Config:
    encoder, decoder = STACKS[stack]
    own = {"arch": arch, "stack": stack, "encoder_layers": encoder, "decoder_layers": decoder, **model}
    return resolve(merge(SMALL, {"model": own, "train": {"seed": seed}}))


@functools.cache
def dataset(stack: Any) -> Any:
    return load_data(config_of("postln", stack).data, stack=stack)


def subject_of(arch: str, stack: str = "encoder-decoder", seed: int = 3, **model: Any) -> Subject:
    """With its gradients."""
    config = config_of(arch, stack, seed, **model)
    subject = Subject.of(config, dataset(stack), torch.device("cpu"))
    ordinary(subject)
    return subject


def column(table: Filled, name: str = "value") -> dict[str, float]:
    """Site -> number."""
    layout, cells = table
    return dict(zip((r.site for r in layout.rows), cells.values[:, layout.columns.index(name)].tolist(), strict=True))


def real_tokens(subject: Subject, stack: str) -> Tensor:
    """(B, L), from the inputs of the model."""
    inputs = subject.batch.inputs
    side = {"encoder": "source_mask", "decoder": "target_mask"}[stack]
    return inputs[side] if side in inputs else inputs["mask"]


def weights_of(subject: Subject, pattern: str) -> dict[str, Tensor]:
    """Role -> 1 where a parameter belongs to a role that ``pattern`` matches, else 0; by parameter name."""
    chosen = {name: torch.zeros_like(parameter) for name, parameter in subject.model.named_parameters()}
    for role, (name, rows) in subject.model.parameter_roles().items():
        if re.fullmatch(pattern, role):
            chosen[name][slice(None) if rows is None else rows] = 1
    return chosen
