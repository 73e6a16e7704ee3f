"""Each architecture against its formula, written out again in float64 with loops and no fusion."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stabilitylab.models import Transformer
from stabilitylab.models.transformer import positions

Array = np.ndarray
ARCH_NAMES = ["postln", "preln", "postln-init", "deepnorm", "branchnorm", "admin"]


class Plain:
    """The Transformer as its formulas say, from a dictionary of weights by role."""

    def __init__(self, model: Transformer) -> None:
        named = dict(model.named_parameters())
        self.weights = {
            role: (named[name] if rows is None else named[name][rows]).detach().numpy()
            for role, (name, rows) in model.parameter_roles().items()
        }
        self.config = model.config
        self.alpha = model.schedule.get() if model.schedule is not None else None

    def linear(self, role: str, x: Array) -> Array:
        return x @ self.weights[role].T + self.weights[f"{role}.bias"]

    def norm(self, role: str, x: Array) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        variance = (centred**2).mean(-1, keepdims=True)
        return self.weights[f"{role}.weight"] * centred / np.sqrt(variance + 1e-5) + self.weights[f"{role}.bias"]

    def attention(self, role: str, x: Array, other: Array, allowed: Array) -> Array:  # one sentence: (T, D), (L, D)
        q, k, v = self.linear(f"{role}.q", x), self.linear(f"{role}.k", other), self.linear(f"{role}.v", other)
        size = self.config.d_model // self.config.heads
        mixed = np.zeros_like(q)
        for head in range(self.config.heads):
            part = slice(head * size, (head + 1) * size)
            for t in range(len(x)):
                score = np.array([q[t, part] @ k[s, part] / math.sqrt(size) for s in range(len(other))])
                weight = np.where(allowed[t], np.exp(score - score[allowed[t]].max()), 0.0)
                mixed[t, part] = weight / weight.sum() @ v[:, part]
        return self.linear(f"{role}.out", mixed)

    def ffn(self, role: str, x: Array) -> Array:
        return self.linear(f"{role}.fc2", np.maximum(self.linear(f"{role}.fc1", x), 0.0))

    def join(self, arch: str, role: str, x: Array, f) -> Array:
        stack = role.split(".")[0]
        n, m = self.config.encoder_layers, self.config.decoder_layers
        if arch in ("postln", "postln-init"):
            return self.norm(f"{role}.norm", x + f(x))
        if arch == "preln":
            return x + f(self.norm(f"{role}.norm", x))
        if arch == "deepnorm":
            if n and m:
                alpha = 0.81 * (n**4 * m) ** (1 / 16) if stack == "encoder" else (3 * m) ** (1 / 4)
            else:
                alpha = (2 * max(n, m)) ** (1 / 4)
            return self.norm(f"{role}.norm", alpha * x + f(x))
        if arch == "branchnorm":
            return self.norm(f"{role}.norm", x + self.alpha * f(x))
        assert arch == "admin"
        return self.norm(f"{role}.norm", self.weights[f"{role}.omega"] * x + f(x))

    def embed(self, role: str, tokens: Array) -> Array:
        width = self.config.d_model
        place = np.zeros((len(tokens), width))
        for position in range(len(tokens)):
            for i in range(width // 2):
                angle = position / 10_000 ** (2 * i / width)
                place[position, i], place[position, width // 2 + i] = math.sin(angle), math.cos(angle)
        shared = "decoder.embedding" if self.config.tie == "all" else role
        return self.weights[shared][tokens] * math.sqrt(width) + place

    def stack(self, name: str, arch: str, tokens: Array, keys: Array, memory: Array | None, memory_keys) -> Array:
        x = self.embed(f"{name}.embedding", tokens)
        length = len(tokens)
        causal = np.tril(np.ones((length, length), dtype=bool))
        allowed = causal if name == "decoder" else np.tile(keys, (length, 1))
        for layer in range(1, getattr(self.config, f"{name}_layers") + 1):
            role = f"{name}.{layer}"
            x = self.join(
                arch,
                f"{role}.self_attn",
                x,
                lambda z, role=role: self.attention(f"{role}.self_attn", z, z, allowed),
            )
            if memory is not None:
                across = np.tile(memory_keys, (length, 1))
                x = self.join(
                    arch,
                    f"{role}.cross_attn",
                    x,
                    lambda z, role=role, across=across: self.attention(f"{role}.cross_attn", z, memory, across),
                )
            x = self.join(arch, f"{role}.ffn", x, lambda z, role=role: self.ffn(f"{role}.ffn", z))
        return self.norm(f"{name}.norm", x) if arch == "preln" else x

    def logits(self, source: Array | None, target: Array, keys: Array) -> Array:  # one sentence
        decoder_arch = self.config.decoder_arch or self.config.arch
        if self.config.stack == "encoder-decoder":
            memory = self.stack("encoder", self.config.arch, source, keys, None, None)
            hidden = self.stack("decoder", decoder_arch, target, None, memory, keys)
        else:
            hidden = self.stack(self.config.stack, self.config.arch, target, keys, None, None)
        last = "encoder" if self.config.stack == "encoder" else "decoder"
        return hidden @ self.weights["output" if self.config.tie == "none" else f"{last}.embedding"].T


def assert_equals_plain(model: Transformer, pairs: dict[str, torch.Tensor], plain: Plain | None = None) -> None:
    plain = plain or Plain(model)
    both = model.config.stack == "encoder-decoder"
    inputs = pairs if both else {"tokens": pairs["target"], "mask": pairs["target_mask"]}
    with torch.no_grad():
        logits = model(**inputs).numpy()
    for row in range(2, 4):  # the third and fourth sentence hold padding on both sides
        source = pairs["source"][row].numpy() if both else None
        keys = (pairs["source_mask"] if both else pairs["target_mask"])[row].numpy()
        expected = plain.logits(source, pairs["target"][row].numpy(), keys)
        real = pairs["target_mask"][row].numpy()
        np.testing.assert_allclose(logits[row][real], expected[real], rtol=0, atol=1e-10)


@pytest.mark.parametrize("stack", ["encoder-decoder", "encoder", "decoder"])
@pytest.mark.parametrize("arch", ARCH_NAMES)
def test_forward_equals_the_formula(arch, stack, small, randomise, pairs) -> None:
    model = randomise(small(arch, stack=stack).double())
    if model.schedule is not None:
        model.schedule.set(0.3)
    assert_equals_plain(model, pairs)


@pytest.mark.parametrize(("encoder", "decoder"), [("postln", "preln"), ("deepnorm", "admin"), ("preln", "branchnorm")])
def test_mixed_architectures(encoder, decoder, small, randomise, pairs) -> None:
    model = randomise(small(encoder, decoder_arch=decoder).double())
    model.set_row(0)  # again, in double
    assert_equals_plain(model, pairs)


@pytest.mark.parametrize("sizes", [(1, 3), (3, 1)])
def test_unequal_stacks(sizes, small, randomise, pairs) -> None:
    model = small("deepnorm", encoder_layers=sizes[0], decoder_layers=sizes[1]).double()
    assert_equals_plain(randomise(model), pairs)


@pytest.mark.parametrize("tie", ["output", "all", "none"])
def test_tied_and_untied_matrices(tie, small, randomise, pairs) -> None:
    model = randomise(small("postln", tie=tie).double())
    shared = {"output": 2, "all": 1, "none": 3}[tie]
    assert model.encoder is not None
    assert model.decoder is not None
    tables = (model.encoder.embedding.weight, model.decoder.embedding.weight, model.output.weight)
    assert len({id(table) for table in tables}) == shared
    assert_equals_plain(model, pairs)


def test_hidden_and_logits_make_the_forward_pass(small, pairs) -> None:
    model = small("preln")
    hidden = model.hidden(**pairs)
    assert hidden.shape == (5, 7, 16)
    assert torch.equal(model.logits(hidden), model(**pairs))


@pytest.mark.parametrize(("length", "width"), [(1, 2), (9, 16), (5000, 64)])
def test_positions_have_mean_square_one_half(length, width) -> None:
    wave = positions(length, torch.zeros(1, width, dtype=torch.float64))
    assert wave.shape == (length, width)
    torch.testing.assert_close(wave.square().mean(1), torch.full((length,), 0.5, dtype=torch.float64))
