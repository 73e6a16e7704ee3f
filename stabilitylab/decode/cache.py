"""A trained encoder-decoder that decodes one target token at a time: no key or value is computed twice."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..models import Residual, Transformer
from ..models.sublayers import CrossAttention, FirstValues, Rotation, SelfAttention
from ..models.transformer import EncoderDecoder, Layer, additive


class GrowingSelfAttention(nn.Module):
    """Self-attention of the newest token over all tokens so far, whose keys and values it keeps."""

    def __init__(self, f: SelfAttention) -> None:
        super().__init__()
        self.f = f
        self.past: tuple[Tensor, Tensor] | None = None  # (R, T, H, D/H) each

    def forward(
        self, x: Tensor, _mask: None = None, turned: Rotation | None = None, first: FirstValues | None = None
    ) -> Tensor:  # (R, 1, D) -> (R, 1, D)
        q, k, v = self.f.projected(x, first)
        if self.past is not None:
            k, v = torch.cat([self.past[0], k], dim=1), torch.cat([self.past[1], v], dim=1)
        self.past = k, v
        return self.f.attend(q, k, v, None, False, turned, self.f.gates(x))  # all keys are of earlier tokens

    def keep(self, rows: Tensor) -> None:
        if self.past is not None:
            k, v = self.past
            self.past = k.index_select(0, rows), v.index_select(0, rows)


class FixedCrossAttention(nn.Module):
    """Cross-attention over keys and values that are made once; all hypotheses of a sentence query the same keys."""

    def __init__(self, f: CrossAttention, memory: Tensor, mask: Tensor | None) -> None:
        super().__init__()
        self.f = f
        self.k, self.v = f.kv(memory).unflatten(2, (2, f.heads, -1)).unbind(2)  # (B, S, H, D/H)
        self.mask = mask  # (B, 1, 1, S)

    def forward(self, x: Tensor) -> Tensor:  # (B K, 1, D) -> (B K, 1, D)
        q = self.f.q(x).view(len(self.k), -1, self.f.heads, self.k.shape[-1])  # (B, K, H, D/H)
        gates = self.f.gates(x)
        gates = None if gates is None else gates.view(*q.shape[:2], -1)  # (B, K, H or D)
        return self.f.attend(q, self.k, self.v, self.mask, causal=False, gates=gates).view_as(x)

    def keep(self, sentences: Tensor) -> None:
        self.k, self.v = self.k.index_select(0, sentences), self.v.index_select(0, sentences)
        if self.mask is not None:
            self.mask = self.mask.index_select(0, sentences)


class CachedDecoder:
    """The decoder of ``model`` over ``source``, which takes one token of each hypothesis at a time.

    Every sentence has the same number of hypotheses; those of sentence b are the rows b K .. b K + K - 1. The layers'
    own residuals join the sub-layers to the stream, so that every architecture is decoded as it was trained.
    ``longest``: the number of tokens that it can take, which learned positions limit; None: any number.
    """

    def __init__(self, model: Transformer, source: Tensor, source_mask: Tensor | None = None) -> None:
        if not isinstance(model, EncoderDecoder):
            raise UsageError(
                f"only an encoder-decoder translates, and this model is a single stack ({model.config.stack})."
            )
        model.require_calibration()
        assert model.encoder is not None
        assert model.decoder is not None
        self.model, self.stack = model, model.decoder
        keys = additive(source_mask, model.encoder.embedding.weight)
        memory = model.encoder(source, keys)  # (B, S, D)
        self.self_attentions: list[GrowingSelfAttention] = []
        self.cross_attentions: list[FixedCrossAttention] = []
        self.layers: list[list[Residual]] = []
        for layer in self.stack.layers:
            assert isinstance(layer, Layer)
            assert layer.cross_attn is not None
            assert isinstance(layer.self_attn.f, SelfAttention)
            assert isinstance(layer.cross_attn.f, CrossAttention)
            own, cross = GrowingSelfAttention(layer.self_attn.f), FixedCrossAttention(layer.cross_attn.f, memory, keys)
            self.self_attentions.append(own)
            self.cross_attentions.append(cross)
            self.layers.append([_joined(layer.self_attn, own), _joined(layer.cross_attn, cross), layer.ffn])
        self.length = 0
        self.longest = None if self.stack.positions is None else self.stack.positions.num_embeddings
        self.shares_values = model.config.value_residual != "off"

    def step(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token after ``tokens``, the newest token of each hypothesis: (B K,) -> (B K, V)."""
        trunk = self.stack.trunk
        stream = trunk.enter(self.stack.embed(tokens[:, None], first=self.length))  # (B K, 1, D)
        self.length += 1
        turned = self.stack.rotations(self.length)
        given = (turned[0] if turned else None, FirstValues(None)) if self.shares_values else turned
        for own, cross, ffn in self.layers:
            y = trunk.before(stream)
            y = ffn(cross(own(y, None, *given)))
            stream = trunk.after(stream, y)
        return self.model.logits(self.stack.leave(stream))[:, 0]

    def keep(self, rows: Tensor, sentences: Tensor | None = None) -> None:
        """Keep only the hypotheses ``rows``, in this order; ``sentences``: the sentences of these hypotheses, if not
        all."""
        for attention in self.self_attentions:
            attention.keep(rows)
        if sentences is not None:
            for attention in self.cross_attentions:
                attention.keep(sentences)


def _joined(residual: Residual, f: nn.Module) -> Residual:
    """Return the same residual around another ``f``; it shares norm, constants and taps with the model's own."""
    twin = copy.copy(residual)
    twin._modules = {**residual._modules, "f": f}
    return twin
