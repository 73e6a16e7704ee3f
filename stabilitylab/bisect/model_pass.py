"""One forward and backward of a model on a batch, and its fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import InputError, StabilityLabError, UsageError
from ..probes import Mask, Watcher, random_states_kept
from ..probes.state import StateSnapshot, seed_all, survey
from ..schema import Cells, Table
from ..silence import silenced
from .prints import Fingerprint, of_tables

LossFunction = Callable[[nn.Module, Any], Tensor]


class _Row:
    """A sink that keeps the last row."""

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}
        self.cells: Mapping[str, Cells] = {}

    def open(self, tables: Sequence[Table]) -> None:
        self.tables = {table.name: table for table in tables}

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        self.cells = dict(tables)

    def close(self) -> None:
        pass


@contextmanager
def comparable(model: nn.Module, seed: int) -> Iterator[None]:
    """Put a model into the state in which two models can be compared, and restore everything afterwards, buffers and
    attributes that a forward pass writes included. The state is: evaluation mode, except for the flag of the model
    itself, which a watcher reads; the random states of ``seed``; and no gradients."""
    held = StateSnapshot(model, [one.name for one in survey(model).tensors if one.kind != "parameter"])
    training = {module: module.training for module in model.modules()}
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    with random_states_kept(model):
        try:
            for module in training:
                module.training = False
            model.training = True
            for parameter, _ in gradients:
                parameter.grad = None
            seed_all(seed)
            yield
        finally:
            for module, flag in training.items():
                module.training = flag
            for parameter, gradient in gradients:
                parameter.grad = gradient
            held.compare()


def fingerprint_of(
    model: nn.Module, batch: Any, loss_fn: LossFunction, label: str, *, mask: Mask | None = None, seed: int = 0
) -> Fingerprint:
    """Return the fingerprint of one forward and backward pass, in evaluation mode and with the random states of
    ``seed``. Its facts contain a digest of the batch as ``batch``.

    Raises InputError if ``loss_fn`` fails, UsageError if the model has no layers.
    """
    row = _Row()
    with comparable(model, seed):
        watcher = Watcher(model, row, probes="fingerprint", every=1, reference=None, mask=mask, strict=True)
        try:
            with silenced():  # the result has all that its reader needs
                loss_of(model, batch, loss_fn).backward()
                watcher.step()
                watcher.flush()
        finally:
            watcher.close()
    device = str(next(model.parameters()).device)
    facts = {"torch": torch.__version__, "device": device, "batch": digest(batch)}
    return of_tables(label, 0, row.tables, row.cells, facts=facts)


def loss_of(model: nn.Module, batch: Any, loss_fn: LossFunction) -> Tensor:
    try:
        loss = loss_fn(model, batch)
    except StabilityLabError:
        raise
    except Exception as error:
        raise InputError(f"loss_fn(model, batch) failed: {type(error).__name__}: {error}") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UsageError("loss_fn(model, batch) must return one number with a gradient.")
    return loss.reshape(())


def digest(batch: Any) -> str:
    """Return a digest of the numbers of a batch, whatever holds them."""
    found = hashlib.blake2b(digest_size=8)

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            found.update(f"{tuple(value.shape)}".encode())
            real = torch.view_as_real(value) if value.is_complex() else value
            found.update(real.detach().cpu().double().contiguous().numpy().tobytes())
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            found.update(f"{value.shape}".encode())
            found.update(value.astype(complex if value.dtype.kind == "c" else float).tobytes())
        elif isinstance(value, bool | int | float):
            found.update(repr(float(value)).encode())
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                add(value[key])
        elif isinstance(value, Sequence) and not isinstance(value, str):
            for item in value:
                add(item)

    add(batch)
    return found.hexdigest()
