"""Forwards outside of an update: the held-out batch, the batch of curvature, the validation set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import Config
from ..data import Batch, Dataset
from ..models import Transformer
from ..probes import evaluation
from ..probes.numerics import attention
from .compiling import as_written
from .environment import aligned, attention_kernels
from .recipe import accuracy, token_losses
from .working_weights import WorkingWeights


class Passes:
    """Runs a model on batches whose loss is measured and not trained.

    ``called``: the model, or what wraps it for several ranks. ``first``: the first micro-batch of training, whole;
    ``present``: those of the update that is being made.
    ``masks``: the real tokens of the batch that the model has before it, which probes read; ``kernels``: those of
    attention; both hold for training's own forwards too.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        device: torch.device,
        model: Transformer,
        called: nn.Module,
        working: WorkingWeights | None,
        first: Callable[[], Batch],
        present: Callable[[], Sequence[Batch]],
    ) -> None:
        self._config, self._device = config, device
        self._model, self._called, self._working = model, called, working
        self._first, self._present = first, present
        self.kernels = attention_kernels(config.train, device)
        self.held_out = aligned(dataset.held_out, device).to(device)
        self.masks = self.held_out.masks
        self._validation = [aligned(batch, device).to(device) for batch in dataset.validation()]

    def autocast(self) -> torch.autocast:
        bf16 = self._config.train.precision == "bf16"
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=bf16)

    @contextmanager
    def _before_it(self, batch: Batch, kernels: Sequence[str] | None) -> Iterator[None]:
        """While the model has ``batch`` before it, and not that of training."""
        training_masks, self.masks = self.masks, batch.masks
        try:
            with attention(kernels), self.autocast():
                yield
        finally:
            self.masks = training_masks

    def reference(self) -> dict[str, Tensor]:
        """The reference pass: the fixed held-out batch under the current parameters and alpha."""
        batch = self.held_out
        with self._before_it(batch, self.kernels):
            logits = self._called(**batch.inputs)
        _, nll = token_losses(logits, batch.labels, batch.weight, 0.0)
        return {
            "held_out_nll": nll / batch.tokens,
            "held_out_accuracy": accuracy(logits, batch.labels, batch.weight),
        }

    def curvature_loss(self) -> Tensor:
        """What is trained, smoothed as there, of each real token of the batch that ``probes.curvature_batch`` names;
        twice differentiable where attention's kernel is, which is its caller's to say where gradients are taken."""
        update = self._config.probes.curvature_batch == "update"
        batches = [own.to(self._device) for own in self._present()] if update else [self._curvature_batch]
        return torch.cat([self._smoothed(batch) for batch in batches])

    def _smoothed(self, batch: Batch) -> Tensor:
        kernels = None if torch.is_grad_enabled() else self.kernels
        aside = nullcontext() if self._working is None else self._working.set_aside()
        with self._before_it(batch, kernels), aside:
            logits = self._called(**batch.inputs)
        real = batch.weight > 0
        return F.cross_entropy(
            logits[real].float(),
            batch.labels[real],
            label_smoothing=self._config.train.label_smoothing,
            reduction="none",
        )

    @cached_property
    def _curvature_batch(self) -> Batch:
        """The one that is the same in each row."""
        held_out = self._config.probes.curvature_batch == "held-out"
        return self.held_out if held_out else self._first().to(self._device)

    def validate(self) -> dict[str, Tensor]:
        """Loss and accuracy on the whole validation set, under the current parameters and alpha; {} without one."""
        if not self._validation:
            return {}
        nll = right = torch.zeros((), dtype=torch.float64, device=self._device)
        with evaluation(self._called), as_written(self._model):
            for batch in self._validation:
                with self._before_it(batch, self.kernels):
                    logits = self._called(**batch.inputs)
                nll = nll + token_losses(logits, batch.labels, batch.weight, 0.0)[1]
                right = right + accuracy(logits, batch.labels, batch.weight) * batch.tokens
        tokens = sum(batch.tokens for batch in self._validation)
        return {"validation_nll": nll / tokens, "validation_accuracy": right / tokens}

    def source_worth(self) -> dict[str, Tensor]:
        """By how much the held-out batch's loss [nats/token] grows where each sentence is given the source of the next
        one: what a model's decoder gets out of its own. {} without an encoder."""
        batch = self.held_out
        if "source" not in batch.inputs:
            return {}
        with evaluation(self._called), as_written(self._model), self._before_it(batch, self.kernels):
            without, own = (
                token_losses(self._called(**inputs), batch.labels, batch.weight, 0.0)[1]
                for inputs in (batch.of_other_sources(), batch.inputs)
            )
        return {"source_worth": (without - own) / batch.tokens}
