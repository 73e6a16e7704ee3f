"""One decoder step at a time: keys and values of what was decoded are kept, those of the source computed once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from ..models import Transformer
from ..models.residuals import Residual
from ..models.sublayers import Attention, CrossAttention, SelfAttention
from ..models.transformer import additive, positions


class Cached(nn.Module):
    """An attention sub-layer with its keys and values so far; stands in for it within the residual."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def __init__(self, f: Attention) -> None:
        super().__init__()
        self.f = f

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)


class CachedSelfAttention(Cached):
    """Appends the new token's key and value; needs no mask, since nothing later exists yet."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # (R, 1, D)
        f = cast(SelfAttention, self.f)
        q, k, v = f.qkv(x).unflatten(2, (3, f.heads, -1)).unbind(2)
        if self.keys is None or self.values is None:
            self.keys, self.values = k, v
        else:
            self.keys, self.values = torch.cat([self.keys, k], 1), torch.cat([self.values, v], 1)  # (R, t, H, D/H)
        return f.attend(q, self.keys, self.values, None, causal=False)


class CachedCrossAttention(Cached):
    """Keys and values of the source, computed at the first step."""

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        f = cast(CrossAttention, self.f)
        if self.keys is None or self.values is None:
            self.keys, self.values = f.kv(memory).unflatten(2, (2, f.heads, -1)).unbind(2)  # (R, S, H, D/H)
        return f.attend(f.q(x).unflatten(2, (f.heads, -1)), self.keys, self.values, mask, causal=False)


class Steps:
    """The decoder over ``source`` (N, S), fed one token of each row at a time; made by :func:`stepping`."""

    def __init__(self, model: Transformer, caches: list[Cached], source: Tensor, mask: Tensor) -> None:
        assert model.encoder is not None
        assert model.decoder is not None
        self.model, self.decoder, self.caches = model, model.decoder, caches
        self.mask = additive(mask, model.encoder.embedding.weight)
        self.memory = model.encoder(source, self.mask)  # (N, S, D)
        self.place = 0

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may stand there several times."""
        for cache in self.caches:
            cache.select(rows)
        self.memory = self.memory.index_select(0, rows)
        self.mask = None if self.mask is None else self.mask.index_select(0, rows)

    def next(self, tokens: Tensor) -> Tensor:
        """Logits (R, V) after ``tokens`` (R,), the tokens at the next place."""
        decoder = self.decoder
        x = decoder.embedding(tokens[:, None]) * decoder.scale  # (R, 1, D)
        x = x + positions(self.place + 1, x)[-1]
        if decoder.input_scale is not None:
            x = decoder.input_scale * x
        for layer in decoder.layers:
            x = layer(x, None, self.memory, self.mask)
        self.place += 1
        x = x if decoder.norm is None else decoder.norm(x)
        return self.model.logits(x)[:, 0]


@contextmanager
def stepping(model: Transformer, source: Tensor, mask: Tensor) -> Iterator[Steps]:
    """Within it the decoder of ``model`` caches; afterwards the model is as it was. Eval mode, no gradients."""
    assert model.decoder is not None
    swapped: list[tuple[Residual, nn.Module]] = []
    training = model.training
    try:
        model.eval()
        for residual in model.decoder.residuals():
            kinds = {SelfAttention: CachedSelfAttention, CrossAttention: CachedCrossAttention}
            if (kind := kinds.get(type(residual.f))) is not None:  # type: ignore[call-overload]
                swapped.append((residual, residual.f))
                residual.f = kind(cast(Attention, residual.f))  # type: ignore[assignment]
        with torch.no_grad():
            yield Steps(model, [cast(Cached, residual.f) for residual, _ in swapped], source, mask)
    finally:
        for residual, f in swapped:
            residual.f = f  # type: ignore[assignment]
        model.train(training)
