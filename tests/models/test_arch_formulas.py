"""The architectures beyond the first six, and both switches, against their formulas in float64 numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from rest_slow import rest_slow
from test_model_forward import Array, Plain, assert_equals_plain

from stabilitylab.models import ARCHS, Transformer

NEW = {
    *("dsinit", "dsinit-code", "rezero", "rfixup", "tfixup", "dlcl", "dlcl-post", "normformer", "subln"),
    *("sandwich", "periln", "layernorm-scaling", "resi-dual", "keel"),
    *("gpas", "mix-ln", "hybridnorm", "hybridnorm-star", "completep"),
    *("hyper-connections", "hyper-connections-static", "mhc", "siamese-norm", "attnres", "attnres-block"),
}
CONNECTED = ("hyper-connections", "hyper-connections-static", "mhc")
OLD = {"postln", "preln", "postln-init", "deepnorm", "branchnorm", "admin"}


class Written(Plain):
    """Formulas of the papers, one branch of an ``if`` each; what they share with the first six is ``Plain``'s."""

    def arch(self, role: str) -> str:
        return self.config.decoder_arch or self.config.arch if role.startswith("decoder") else self.config.arch

    def linear(self, role: str, x: Array) -> Array:
        bias = self.weights.get(f"{role}.bias")
        assert (bias is None) == (self.arch(role) == "rfixup")
        return x @ self.weights[role].T + (0 if bias is None else bias)

    def norm(self, role: str, x: Array) -> Array:
        if self.config.norm == "layernorm":
            if f"{role}.bias" not in self.weights:
                assert self.arch(role) == "keel" or not self.config.bias
                x = x - x.mean(-1, keepdims=True)
                return self.weights[f"{role}.weight"] * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
            return super().norm(role, x)
        assert f"{role}.bias" not in self.weights
        return self.weights[f"{role}.weight"] * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    def unit(self, role: str, side: str, x: Array) -> Array:
        """QK-norm of one head's queries or keys."""
        gain, bias = self.weights[f"{role}.qk_norm.{side}_weight"], self.weights.get(f"{role}.qk_norm.{side}_bias")
        if self.config.norm == "rmsnorm" or self.arch(role).startswith("hybridnorm"):
            return gain * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        scaled = gain * (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return scaled if bias is None else scaled + bias

    def scores(self, role: str, q: Array, k: Array) -> Array:
        """Scores of one head before masking."""
        if self.config.qk_norm or self.arch(role).startswith("hybridnorm"):
            q, k = self.unit(role, "q", q), self.unit(role, "k", k)
        return q @ k.T / math.sqrt(q.shape[-1])

    def attention(self, role: str, x: Array, other: Array, allowed: Array) -> Array:
        arch, inner = self.arch(role), role.endswith("self_attn")
        q, k, v = self.linear(f"{role}.q", x), self.linear(f"{role}.k", other), self.linear(f"{role}.v", other)
        size = self.config.d_model // self.config.heads
        if self.config.value_residual != "off" and inner:
            if role.split(".")[1] == "1":
                self.first_values = v
            else:
                own = self.weights.get(f"{role}.value_weights", self.config.value_weights)
                v = own[0] * self.first_values + own[1] * v
        heads = []
        for head in range(self.config.heads):
            part = slice(head * size, (head + 1) * size)
            score = np.where(allowed, self.scores(role, q[:, part], k[:, part]), -np.inf)
            weight = np.exp(score - score.max(-1, keepdims=True))
            vh = self.unit(role, "v", v[:, part]) if arch.startswith("hybridnorm") else v[:, part]
            heads.append(weight / weight.sum(-1, keepdims=True) @ vh)
            if arch == "normformer" and inner:
                heads[-1] = heads[-1] * self.weights[f"{role}.head_scale"][head]
        if self.config.attention_gate != "off":
            gate = 1 / (1 + np.exp(-self.linear(f"{role}.gate", x)))
            heads = [h * g for h, g in zip(heads, np.split(gate, len(heads), axis=-1), strict=True)]
        mixed = np.concatenate(heads, axis=-1)
        if arch == "subln" and inner:
            mixed = self.norm(f"{role}.inner_norm", mixed)
        out = self.linear(f"{role}.out", mixed)
        return self.norm(f"{role}.outer_norm", out) if arch == "normformer" and inner else out

    def act(self, role: str, x: Array) -> Array:
        """The inside of a feed-forward block, behind its activation."""
        hidden = self.linear(f"{role}.fc1", x)
        if self.arch(role) != "rfixup":
            return np.maximum(hidden, 0.0)
        before, after = (self.weights[f"{role}.activation.{place}.b"] for place in ("before", "after"))
        return np.maximum(hidden - before, 0.0) - after

    def ffn(self, role: str, x: Array) -> Array:
        arch = self.arch(role)
        hidden = self.act(role, x)
        if arch in ("normformer", "subln"):
            hidden = self.norm(f"{role}.inner_norm", hidden)
        return self.linear(f"{role}.fc2", hidden)

    def join(self, arch: str, role: str, x: Array, f) -> Array:
        stack, layer, _ = role.split(".")
        if arch in OLD:
            return super().join(arch, role, x, f)
        if arch in ("dsinit", "dsinit-code", "dlcl-post"):
            return self.norm(f"{role}.norm", x + f(x))
        if arch in ("dlcl", "normformer", "subln"):
            return x + f(self.norm(f"{role}.norm", x))
        if arch in ("sandwich", "periln"):
            return x + self.norm(f"{role}.outer_norm", f(self.norm(f"{role}.norm", x)))
        if arch == "layernorm-scaling":
            return x + f(self.norm(f"{role}.norm", x) / math.sqrt(int(layer)))
        if arch == "tfixup":
            return x + f(x)
        if arch == "gpas":
            y = x + f(self.norm(f"{role}.norm", x))
            gate = self.weights[f"{stack}.{layer}.self_attn.depth_gate"].item()  # the layer's one
            return y * (1 - gate / (1 + math.exp(-gate)))
        if arch == "completep":
            layers = getattr(self.config, f"{stack}_layers")
            return x + 2 / layers * f(self.norm(f"{role}.norm", x))
        if arch == "mix-ln":
            post = int(layer) <= math.floor(getattr(self.config, f"{stack}_layers") / 4)
            return self.norm(f"{role}.norm", x + f(x)) if post else x + f(self.norm(f"{role}.norm", x))
        if arch.startswith("hybridnorm"):
            if arch.endswith("star") and layer == "1":
                return x + f(self.norm(f"{role}.norm", x))
            return x + f(x) if role.endswith("ffn") else self.norm(f"{role}.norm", x + f(x))
        if arch == "keel":
            layers, above = getattr(self.config, f"{stack}_layers"), stack == "decoder" and self.config.encoder_layers
            alpha = 1 if layer == "1" else (3 if above else 2) * layers
            total = alpha * x + f(self.norm(f"{role}.inner_norm", x))
            return total if role.endswith(".1.self_attn") else self.norm(f"{role}.norm", total)
        if arch == "rezero":
            return x + self.weights[f"{stack}.{layer}.self_attn.scale"] * f(x)  # the layer's one
        if arch == "rfixup":
            return x + self.weights[f"{role}.scale"] * f(x - self.weights[f"{role}.shift.b"])
        if arch in CONNECTED:
            gather, carry, spread = self.connections(arch, role, x)
            branch = f(self.norm(f"{role}.norm", np.einsum("tn,ntd->td", gather, x)))
            return np.einsum("tmn,ntd->mtd", carry, x) + np.einsum("tn,td->ntd", spread, branch)
        if arch == "siamese-norm":
            entering = self.norm(f"{role}.inner_norm", x + self.norm(f"{role}.plain_norm", self.dual))
            branch, scale = f(entering), self.config.options.get("depth_scale", "layer")
            self.dual = self.dual + branch
            depth = {"layer": int(layer), "twice": 2 * int(layer), "off": 1}[scale]
            return self.norm(f"{role}.norm", x + branch / math.sqrt(depth))
        if arch.startswith("attnres"):
            return self.attended(arch, role, f(self.norm(f"{role}.norm", x)))
        assert arch == "resi-dual"
        branch = f(x)
        self.dual = self.dual + branch
        return self.norm(f"{role}.norm", x + branch)

    def number(self, role: str) -> tuple[int, int]:
        """(The number of a sub-layer in its stack, from 0; all sub-layers of that stack)."""
        stack, layer, sublayer = role.split(".")
        across = stack == "decoder" and self.config.encoder_layers
        order = ["self_attn", "cross_attn", "ffn"] if across else ["self_attn", "ffn"]
        return len(order) * (int(layer) - 1) + order.index(sublayer), len(order) * getattr(
            self.config, f"{stack}_layers"
        )

    def connections(self, arch: str, role: str, x: Array) -> tuple[Array, Array, Array]:
        """What gathers, carries and spreads n streams (n, T, D), for each token."""
        n, length, width = x.shape
        w = {key.removeprefix(f"{role}."): value for key, value in self.weights.items() if key.startswith(f"{role}.")}
        if arch == "mhc":
            whole = x.transpose(1, 0, 2).reshape(length, n * width)
            found = whole / np.sqrt((whole**2).mean(-1, keepdims=True) + 1e-5) @ w["phi"]
            pre, post, mixed = found[:, :n], found[:, n : 2 * n], found[:, 2 * n :].reshape(length, n, n)
            matrix = np.exp(w["scales"][2] * mixed + w["carry_bias"])
            for _ in range(20):
                matrix = matrix / matrix.sum(1, keepdims=True)
                matrix = matrix / matrix.sum(2, keepdims=True)
            gather = 1 / (1 + np.exp(-(w["scales"][0] * pre + w["gather_bias"])))
            return gather, matrix, 2 / (1 + np.exp(-(w["scales"][1] * post + w["spread_bias"])))
        gather, carry, spread = (
            np.tile(w[key], (length,) + (1,) * w[key].ndim) for key in ("gather", "carry", "spread")
        )
        if arch == "hyper-connections":
            normed = np.stack([self.norm(f"{role}.stream_norm", each) for each in x], 1)  # (T, n, D)
            gather = gather + w["mixture_scale"] * np.tanh(normed @ w["gather_from"])[..., 0]
            carry = carry + w["mixture_scale"] * np.tanh(normed @ w["carry_from"])
            spread = spread + w["spread_scale"] * np.tanh(normed @ w["spread_from"])[..., 0]
        return gather, carry.transpose(0, 2, 1), spread

    def attended(self, arch: str, role: str, branch: Array) -> Array:
        """The input of the sub-layer behind this one: attention over the embedding and the blocks so far."""
        index, total = self.number(role)
        size = math.ceil(total / self.config.options.get("blocks", 8)) if arch == "attnres-block" else 1
        self.outputs = [*(self.outputs if index else []), branch]
        blocks = [sum(self.outputs[first : first + size]) for first in range(0, index + 1, size)]
        sources = np.stack([self.dual, *blocks])  # self.dual: the embedding
        keys = self.weights[f"{role}.depth_gain"] * sources / np.sqrt((sources**2).mean(-1, keepdims=True) + 1e-5)
        score = keys @ self.weights[f"{role}.depth_query"]
        share = np.exp(score - score.max(0)) / np.exp(score - score.max(0)).sum(0)
        return (share[..., None] * sources).sum(0)

    def stack(self, name: str, arch: str, tokens: Array, keys: Array, memory: Array | None, memory_keys) -> Array:
        if arch in OLD and self.config.norm == "layernorm" and not self.config.qk_norm:
            return super().stack(name, arch, tokens, keys, memory, memory_keys)
        x, length = self.embed(f"{name}.embedding", tokens), len(tokens)
        if arch == "periln":
            x = self.norm(f"{name}.embedding_norm", x)
        self.dual = x
        if arch in CONNECTED:
            x = np.stack([x] * self.config.options.get("n", 4))
        history = [x]
        across = None if memory is None else np.tile(memory_keys, (length, 1))
        allowed = np.tril(np.ones((length, length), dtype=bool)) if name == "decoder" else np.tile(keys, (length, 1))
        depth = getattr(self.config, f"{name}_layers")
        for layer in range(1, depth + 1):
            role = f"{name}.{layer}"
            if arch.startswith("dlcl"):
                x = self.combined(name, arch, history)

            def attend(z: Array, role: str = f"{role}.self_attn") -> Array:
                return self.attention(role, z, z, allowed)

            def look(z: Array, role: str = f"{role}.cross_attn") -> Array:
                return self.attention(role, z, memory, across)

            def feed(z: Array, role: str = f"{role}.ffn") -> Array:
                return self.ffn(role, z)

            x = self.join(arch, f"{role}.self_attn", x, attend)
            x = x if memory is None else self.join(arch, f"{role}.cross_attn", x, look)
            x = self.join(arch, f"{role}.ffn", x, feed)
            history.append(x)
        if arch.startswith("dlcl"):
            x = self.combined(name, arch, history)
        if arch == "resi-dual":
            x = x + self.norm(f"{name}.dual_norm", self.dual)
        if arch == "siamese-norm":
            x = x + self.norm(f"{name}.plain_norm", self.dual)
        if arch in CONNECTED:
            x = x.mean(0)
        if arch == "rfixup":
            x = x - self.weights[f"{name}.shift.b"]
            x = self.weights["encoder.scale"] * x if name == "encoder" else x
        pre = ("preln", "dlcl", "normformer", "subln", "sandwich", "periln", "layernorm-scaling")
        pre = (*pre, "gpas", "mix-ln", "hybridnorm", "hybridnorm-star", "completep")
        pre = (*pre, *CONNECTED, "attnres", "attnres-block")
        return self.norm(f"{name}.norm", x) if arch in pre else x

    def combined(self, name: str, arch: str, history: list[Array]) -> Array:
        """DLCL's input of layer l+1, or its output behind the last."""
        row = self.weights[f"{name}.combination"][len(history) - 1]
        x = row[0] * history[0]
        for k in range(1, len(history)):
            y = history[k] if arch == "dlcl-post" else self.norm(f"{name}.history_norm.{k - 1}", history[k])
            x = x + row[k] * y
        last = len(history) - 1
        return self.norm(f"{name}.history_norm.{last - 1}", x) if arch == "dlcl-post" and last else x


def compare(model: Transformer, pairs) -> None:
    assert_equals_plain(model, pairs, Written(model))


def test_every_architecture_is_written_out_here_or_there() -> None:
    assert set(ARCHS) == NEW | OLD


@pytest.mark.parametrize(
    ("arch", "stack"), [(arch, stack) for arch in sorted(NEW) for stack in ARCHS[arch].defined_for]
)
def test_forward_equals_the_formula(arch, stack, small, randomise, pairs) -> None:
    compare(randomise(small(arch, stack=stack, depth=6).double()), pairs)


@pytest.mark.parametrize("norm", rest_slow(["layernorm", "rmsnorm"], ["rmsnorm"]))
@pytest.mark.parametrize("arch", sorted(NEW | OLD))
def test_both_switches_work_with_every_architecture(arch, norm, small, randomise, pairs) -> None:
    model = randomise(small(arch, norm=norm, qk_norm=not arch.startswith("hybridnorm"), heads=4).double())
    if model.schedule is not None:
        model.schedule.set(0.3)
    compare(model, pairs)


@pytest.mark.parametrize(
    ("encoder", "decoder"), [("rfixup", "dlcl"), ("resi-dual", "rezero"), ("tfixup", "subln"), ("periln", "rfixup")]
)
def test_mixed_architectures(encoder, decoder, small, randomise, pairs) -> None:
    compare(randomise(small(encoder, decoder_arch=decoder).double()), pairs)


@pytest.mark.parametrize("arch", rest_slow(sorted(NEW), {"siamese-norm", "rezero", "sandwich"}))
def test_the_comparison_can_fail(arch, small, randomise, pairs) -> None:
    """Every parameter that the architecture adds moves the output: none of them is left out of both sides."""
    model = randomise(small(arch).double())
    plain = Written(model)
    added = model.parameter_roles().keys() - small("preln").parameter_roles().keys()
    idle = {f"{stack}.1.self_attn.carry_bias" for stack in ("encoder", "decoder")}  # it mixes equal streams
    for role in sorted(added - idle) or ["encoder.1.ffn.fc1"]:
        before = plain.weights[role]
        plain.weights[role] = before * 1.5 + 0.1
        with pytest.raises(AssertionError):
            assert_equals_plain(model, pairs, plain)
        plain.weights[role] = before
