"""Forward passes outside of an update: the held-out batch, the batch of curvature, the validation set."""

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
from .environment import aligned, attention_kernels
from .fast import WorkingWeights, as_written
from .recipe import accuracy, token_losses


class Passes:
    """Runs a model on batches whose loss is measured and not trained.

    ``called``: the model, or its wrapper for several ranks. ``first``: the first micro-batch of training, whole;
    ``present``: the micro-batches of the current update. ``masks``: the real tokens of the batch in the current pass,
    which probes read; ``kernels``: the kernels of attention. Both hold for training's own forward passes too.
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
        self.model, self._called, self._working = model, called, working
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
        """Set masks, kernels and autocast for a forward pass of ``batch``; training's masks come back afterwards."""
        training_masks, self.masks = self.masks, batch.masks
        try:
            with attention(kernels), self.autocast():
                yield
        finally:
            self.masks = training_masks

    def reference(self) -> dict[str, Tensor]:
        """Run the reference pass: the fixed held-out batch under the current parameters and alpha."""
        batch = self.held_out
        with self._before_it(batch, self.kernels):
            logits = self._called(**batch.inputs)
        _, nll = token_losses(logits, batch.labels, batch.weight, 0.0)
        return {
            "held_out_nll": nll / batch.tokens,
            "held_out_accuracy": accuracy(logits, batch.labels, batch.weight),
        }

    def curvature_loss(self) -> Tensor:
        """Return the training loss, with its label smoothing, of each real token of the batch named by
        ``probes.curvature_batch``.

        The loss is twice differentiable if attention's kernel is; the caller chooses the kernel.
        """
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
        """Return the curvature batch that is the same in each row: the held-out batch, or the first micro-batch of
        training."""
        held_out = self._config.probes.curvature_batch == "held-out"
        return self.held_out if held_out else self._first().to(self._device)

    def validate(self) -> dict[str, Tensor]:
        """Return loss and accuracy on the whole validation set, under the current parameters and alpha; {} without such
        a set."""
        if not self._validation:
            return {}
        nll = right = torch.zeros((), dtype=torch.float64, device=self._device)
        with evaluation(self._called), as_written(self.model):
            for batch in self._validation:
                with self._before_it(batch, self.kernels):
                    logits = self._called(**batch.inputs)
                nll = nll + token_losses(logits, batch.labels, batch.weight, 0.0)[1]
                right = right + accuracy(logits, batch.labels, batch.weight) * batch.tokens
        tokens = sum(batch.tokens for batch in self._validation)
        return {"validation_nll": nll / tokens, "validation_accuracy": right / tokens}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Around :meth:`read_source`: eval mode without gradients, layers as written, random states kept."""
        with evaluation(self._called), as_written(self.model):
            yield

    def source(self) -> dict[str, Tensor]:
        """Return :meth:`read_source`, and leave the model as it was."""
        with self.measuring():
            return self.read_source()

    def read_source(self) -> dict[str, Tensor]:
        """Return what the decoder gets out of its source, on the held-out batch; {} for a model without an encoder.

        ``source_worth``: by how much the loss [nats/token] grows if each sentence is given the source of the next one.
        ``encoder_distance_within``, ``encoder_distance_between``: mean of 1 - cosine between the encoder's outputs at
        two tokens of one sentence, and at two tokens of different sentences (:func:`cosine_distances`). An encoder
        whose distances are both 0 is a constant function.
        """
        batch, encoder = self.held_out, self.model.encoder
        if encoder is None or "source" not in batch.inputs:
            return {}
        outputs: list[Tensor] = []
        with self._before_it(batch, self.kernels):
            handle = encoder.register_forward_hook(lambda *given: outputs.append(given[-1]))
            try:
                without, own = (
                    token_losses(self._called(**inputs), batch.labels, batch.weight, 0.0)[1]
                    for inputs in (batch.of_other_sources(), batch.inputs)
                )
            finally:
                handle.remove()
            within, between = cosine_distances(outputs[-1], batch.masks["encoder"])
        return {
            "source_worth": (without - own) / batch.tokens,
            "encoder_distance_within": within,
            "encoder_distance_between": between,
        }


def cosine_distances(hidden: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of 1 - cosine over pairs of tokens of one sentence, and over pairs of different sentences.

    ``hidden``: (B, T, D), ``real``: (B, T), True at real tokens. Of unit vectors 1 - cosine is half the squared
    distance, so that the means are taken from variances, in float64: V = mean ||u - mean u||^2 over n tokens is the
    sum of 1 - cosine over all ordered pairs divided by n^2. A distance of 1e-12 is seen where 1 - (mean cosine) would
    round to 0. NaN where there is no such pair.
    """
    hidden, real = hidden.double(), real.bool()
    units = hidden / torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    units = torch.where(real[..., None], units, 0)  # (B, T, D)
    count = real.sum(1).double()  # (B,)

    def deviation(total: Tensor, size: Tensor) -> Tensor:
        off = torch.where(real[..., None], units - total / size.clamp(min=1), 0)
        return off.square().sum(-1)  # (B, T)

    pairs_within = count * deviation(units.sum(1, keepdim=True), count[:, None, None]).sum(1)  # sum of 1 - cosine, (B,)
    pairs = count.sum() * deviation(units.sum((0, 1)), count.sum()).sum()
    within = pairs_within.sum() / (count * (count - 1)).sum()
    between = (pairs - pairs_within.sum()) / (count.sum() ** 2 - count.square().sum())
    return within, between
