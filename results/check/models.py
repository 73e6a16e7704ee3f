"""The arguments of ``stabilitylab.preflight`` for a model of a list: its batch, its loss and its recipe.

All models have random weights, made from configurations; nothing is downloaded. A recipe is what a small model of the
kind is commonly trained with: optimizer, peak rate, warm-up.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilitylab.check import Preflight

VOCABULARY, LENGTH, SAMPLES = 96, 20, 6
Loss = Callable[[nn.Module, Any], Tensor]
Given = dict[str, Any]  # the arguments of preflight


@dataclass(frozen=True)
class Entry:
    """A model of a list. ``make()``: model, batch and loss; ``rate``: the peak; ``warmup``: updates to it."""

    name: str
    family: str
    make: Callable[[], Given]
    rate: float = 1e-3
    warmup: int = 0
    optimizer: str = "adamw"

    def given(self, seed: int = 0) -> Given:
        """Return the arguments of preflight, drawn from ``seed``."""
        with quiet():
            torch.manual_seed(seed)
            made = self.make()
        rates = made.pop("rates", None)  # of parameter groups
        groups = rates(made["model"], self.rate) if rates else made["model"].parameters()
        return {"warmup": self.warmup, **made, "optimizer": optimizer(self.optimizer, groups, self.rate)}


def optimizer(kind: str, parameters: Any, rate: float) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=1e-4)
    return {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[kind](parameters, lr=rate)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence other libraries while they are imported and make models."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def tokens(samples: int = SAMPLES, length: int = LENGTH, vocabulary: int = VOCABULARY, seed: int = 1) -> Tensor:
    """Draw random tokens from 4 on: lower ones are often special."""
    return torch.randint(4, vocabulary, (samples, length), generator=torch.Generator().manual_seed(seed))


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that a model of transformers returns."""
    return model(**batch).loss


def causal(model: nn.Module) -> Given:
    ids = tokens()
    return {"model": model, "batch": {"input_ids": ids, "labels": ids}, "loss_fn": own_loss}


def masked(model: nn.Module, mask: int = 3) -> Given:
    """15 % of the tokens are to be guessed."""
    ids = tokens()
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.3
    batch = {"input_ids": ids.masked_fill(hidden, mask), "labels": ids.masked_fill(~hidden, -100)}
    return {"model": model, "batch": batch, "loss_fn": own_loss}


def translating(model: nn.Module) -> Given:
    batch = {"input_ids": tokens(), "labels": tokens(length=LENGTH - 4, seed=2)}
    return {"model": model, "batch": batch, "loss_fn": own_loss}


def classes_of(samples: int, classes: int) -> Tensor:
    return torch.arange(samples) % classes


def sentences(model: nn.Module, classes: int = 3) -> Given:
    """A class for each sentence."""
    batch = {"input_ids": tokens(), "labels": classes_of(SAMPLES, classes)}
    return {"model": model, "batch": batch, "loss_fn": own_loss}


def tagging(model: nn.Module, classes: int = 5) -> Given:
    """A class for each token."""
    ids = tokens()
    return {"model": model, "batch": {"input_ids": ids, "labels": ids % classes}, "loss_fn": own_loss}


def pictures(model: nn.Module, size: int = 32, classes: int = 5, channels: int = 3) -> Given:
    x = torch.randn(SAMPLES, channels, size, size, generator=torch.Generator().manual_seed(1))
    batch = {"pixel_values": x, "labels": classes_of(SAMPLES, classes)}
    return {"model": model, "batch": batch, "loss_fn": own_loss}


def hugging_face(architecture: str, config: str, **settings: Any) -> nn.Module:
    """A model of transformers, by the names of its classes."""
    import transformers

    return getattr(transformers, architecture)(getattr(transformers, config)(**settings))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of the model's output for the first tensor and the classes in the second."""
    logits, labels = model(batch[0]), batch[1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def told(result: Preflight) -> dict[str, str]:
    """Columns of a table: the bounds that are broken, each once, and the checks that were not made."""
    bounds = {
        f"{severity}s": "; ".join(dict.fromkeys(one.bound for one in result.findings if one.severity == severity))
        for severity in ("fail", "warn")
    }
    return bounds | {"not checked": "; ".join(one.name for one in result.checks if one.state == "not checked")}
