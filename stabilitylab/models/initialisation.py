"""Initial weights, each drawn from a stream of its own name: two architectures with one seed differ in gains only."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .archs.deepnorm import deepnorm_gain
from .base import Residual, table_gain, xavier_gain
from .transformer import Transformer

GAINS: dict[str, Callable[[Residual, str], float]] = {
    "arch": lambda residual, matrix: residual.gain(matrix),
    "xavier": lambda residual, matrix: xavier_gain(residual.place, matrix),
    "deepnorm": lambda residual, matrix: deepnorm_gain(residual.place, matrix),
}
GAINS |= {f"{init}-1": GAINS[init] for init in ("arch", "xavier")}  # the same, over the base in Place.qkv_gain
for _base in ("gpt2", "normal"):  # the same, over the base in Place.base
    GAINS |= {f"arch-{_base}": GAINS["arch"], f"base-{_base}": GAINS["xavier"]}


def named_normal(seed: int, role: str, shape: torch.Size) -> Tensor:
    """Return standard-normal numbers that depend only on the seed and the role."""
    digest = hashlib.sha256(f"{seed}:{role}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Draw Xavier-normal times the gain for every matrix, 0 for every bias, N(0, 1/d) times the gain for embeddings and
    the output and learned positions. The extra parameters of an architecture keep the initial values of their class."""
    config, stacks = model.config, model.stacks
    for residual in model.residuals():
        for matrix, (linear, rows) in residual.f.matrices.items():
            module = residual.f.get_submodule(linear)
            assert isinstance(module, nn.Linear)
            weight = module.weight if rows is None else module.weight[rows]
            gain = GAINS[config.init](residual, matrix)
            rows_of_q = matrix == "gate" and residual.place.sublayer != "ffn"  # drawn as if they were rows of q
            given = {"q": config.qk_gain, "k": config.qk_gain, "v": config.v_gain}
            chosen = given.get("q" if rows_of_q else matrix)
            if chosen is not None:
                gain = chosen
            std = gain * math.sqrt(2 / (2 * weight.shape[1] if rows_of_q else sum(weight.shape)))
            weight.copy_(named_normal(seed, f"{residual.place}.{matrix}", weight.shape) * std)
            if module.bias is not None:
                module.bias.zero_()
    own = config.init.startswith("arch")
    gains = {stack.embedding.weight: stack.arch.embedding_gain(stack.place) for stack in reversed(stacks.values())}
    gains = {model.output.weight: model.last_stack.arch.output_gain} | gains  # the lowest stack decides on a shared one
    tables = {f"{name}.embedding": stack.embedding.weight for name, stack in stacks.items()}
    tables |= {f"{name}.positions": each.positions.weight for name, each in stacks.items() if each.positions}
    base = table_gain(model.last_stack.place)
    for role, weight in ({"output": model.output.weight} | tables).items():  # a shared one keeps its role's numbers
        numbers = named_normal(seed, role, weight.shape) / math.sqrt(config.d_model)
        gain = base * (gains.get(weight, 1.0) if own else 1.0)
        weight.copy_(numbers if gain == 1.0 else numbers * gain)
