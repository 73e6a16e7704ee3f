"""The subject of a one-step run: a float64 model at its initialisation, over one fixed batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import Config
from ..data import Batch, Dataset
from ..models import Transformer, build_model
from ..models.idle import refuse_idle, say_equal
from ..probes import Sites, find_sites
from ..probes.parameters.pieces import GROUP_OF, Parameters
from ..probes.places.attending import Part
from ..schema import Cells, Phase, Row, Table

Filled = tuple[Table, Cells]
Hook = Callable[[nn.Module, tuple[Any, ...], Any], None]


@dataclass(frozen=True, eq=False)
class Subject:
    """The model of a configuration as in row 0 of a run (alpha_{t0}, Admin calibrated), without dropout."""

    config: Config
    model: Transformer
    batch: Batch
    sites: Sites
    parameters: Parameters

    @classmethod
    def of(cls, config: Config, dataset: Dataset, device: torch.device) -> Subject:
        """Build the subject. The batch is the first micro-batch of a training run, with which that run calibrates Admin
        too."""
        refuse_idle(config.model)
        say_equal(config.model)
        still = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
        model = build_model(
            config.model.model_copy(update=still),
            source_vocab=dataset.source_vocab,
            target_vocab=dataset.target_vocab,
            seed=config.train.seed,
        ).to(device, torch.float64)
        batch = dataset.micro_batch(0).to(device)
        model.calibrate(**batch.inputs)
        model.set_row(0)  # after the change of type, so that alpha is not rounded to float32
        sites = find_sites(model)
        return cls(config, model, batch, sites, Parameters(model, sites.place))

    @property
    def names(self) -> list[str]:
        """Return the names of the parameters in the order of ``parameters.tensors``."""
        return [name for name, _ in self.model.named_parameters()]

    def real(self, stack: str) -> Tensor:
        """Return (B, L): True on the real tokens of a stack."""
        return self.batch.masks[stack]

    @torch.no_grad()
    def output(self) -> Tensor:
        """Return F at the real tokens: the last stack's output after its last norm, (tokens, D)."""
        return self.model.hidden(**self.batch.inputs)[self.real(next(reversed(self.model.stacks)))]

    def loss(self) -> tuple[Tensor, Tensor]:
        """Return (label-smoothed cross-entropy, unsmoothed nll) in nats per counted token, as in training but
        float64."""
        counted = self.batch.weight > 0
        logits, labels = self.model(**self.batch.inputs)[counted], self.batch.labels[counted]
        smoothed = F.cross_entropy(logits, labels, label_smoothing=self.config.train.label_smoothing)
        return smoothed, F.cross_entropy(logits.detach(), labels)

    def matrices(self) -> dict[str, tuple[str, slice | None]]:
        """Return role ("encoder.3.self_attn.q") -> (parameter, its rows), for the matrices of all branches."""
        roles = self.model.parameter_roles()
        return {role: where for role, where in roles.items() if role.rpartition(".")[2] in GROUP_OF}


def part_of(tensor: Tensor, part: Part) -> Tensor:
    return tensor if part is None else tensor[part]


@contextmanager
def hooked(hooks: Iterable[tuple[nn.Module, Hook]]) -> Iterator[None]:
    """Attach these forward hooks within this context."""
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def moved(tensors: Sequence[Tensor], by: Iterable[Tensor], factor: float) -> Iterator[None]:
    """Set ``tensors`` to ``tensors + factor * by`` within this context, then restore them bit for bit. ``by`` is
    iterated once, one tensor at a time."""
    own = [tensor.clone() for tensor in tensors]
    try:
        for tensor, step in zip(tensors, by, strict=True):
            tensor.add_(step, alpha=factor)
        yield
    finally:
        torch._foreach_copy_(tensors, own)  # pyright: ignore


def filled(
    name: str,
    rows: Sequence[Row],
    columns: Mapping[str, Sequence[Any]],
    *,
    unit: str,
    definition: str,
    phase: Phase,
    log: bool,
    total: str = "",
) -> Filled:
    """Return a table with its numbers: one sequence of floats or 0-dim tensors a column, the main column first."""
    values = np.array([[float(value) for value in column] for column in columns.values()]).T
    table = Table(name, tuple(columns), tuple(rows), unit, " ".join(definition.split()), total, phase=phase, log=log)
    return table, Cells(values.reshape(len(rows), len(columns)), np.zeros(len(rows), dtype=bool))
