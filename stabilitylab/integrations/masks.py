"""The masks of real tokens in a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..probes.places.copied import Calling

IGNORED = -100  # the label that Hugging Face's losses leave out


class BatchMasks:
    """The masks of the batch that was read last, by stack; :func:`stabilitylab.watch` takes the object as ``mask``.

    A single stack, or the encoder beside a decoder, has ``attention_mask``. A decoder has ``decoder_attention_mask``,
    or else the places where ``labels`` (B, T) are not -100. A mask that is not (B, T) is ignored, and every mask is
    ignored if the stacks are other ones (an image's beside a text's, for example): then every token counts.
    """

    def __init__(self, stacks: Sequence[str]) -> None:
        self._stacks = tuple(stacks)
        decoders = [name for name in stacks if "decoder" in name]
        pair = len(stacks) == 2 and len(decoders) == 1
        self._decoder = decoders[0] if pair else None
        self._knows = pair or len(stacks) == 1
        self._masks: dict[str, torch.Tensor] = {}

    def read(self, batch: object) -> None:
        """Read the masks of ``batch``; a batch that is not a mapping has none."""
        entries = batch if isinstance(batch, Mapping) and self._knows else {}
        self._masks = {}
        for stack in self._stacks:
            mask = self._of_decoder(entries) if stack == self._decoder else entries.get("attention_mask")
            if isinstance(mask, torch.Tensor) and mask.dim() == 2:
                self._masks[stack] = mask.bool()

    def __call__(self) -> dict[str, torch.Tensor]:
        return self._masks

    def follow(self, model: nn.Module) -> Callable[[], None]:
        """Read the keyword arguments of each call of ``model`` from now on; return the function that ends this."""
        hook = Calling(lambda module, args, kwargs: self.read(kwargs))
        return model.register_forward_pre_hook(hook, with_kwargs=True).remove

    @staticmethod
    def _of_decoder(batch: Mapping[str, Any]) -> Any:
        mask, labels = batch.get("decoder_attention_mask"), batch.get("labels")
        if mask is None and isinstance(labels, torch.Tensor):
            return labels != IGNORED
        return mask
