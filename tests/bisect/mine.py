"""Functions that a command is given."""

from __future__ import annotations

import torch
from planted import GPT, faulty, ids, loss_in_bf16, loss_of


def reference() -> dict[str, object]:
    return {"model": GPT(2), "batch": ids(), "loss_fn": loss_of}


def candidate() -> dict[str, object]:
    return {"model": faulty(GPT(2), "wrong scale"), "batch": ids(), "loss_fn": loss_of}


def in_bf16() -> dict[str, object]:
    return {"model": GPT(2), "batch": ids(), "loss_fn": loss_in_bf16}


def in_float64() -> dict[str, object]:
    return {"model": GPT(2).to(torch.float64), "batch": ids(), "loss_fn": loss_of}


def broken() -> dict[str, object]:
    raise RuntimeError("no such weights")
