"""12 models with one fault each, beside the same model without it: what ``check`` must fail, and for which reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from healthy import GPT2 as SIZES
from healthy import CausalConvolutions, Mixer, Nano, labelled_pictures, next_tokens
from models import Entry, Given, causal, hugging_face, tokens
from torch import Tensor, nn


@dataclass(frozen=True)
class Broken:
    """``reasons``: the bounds that name the fault; ``twin``: the model without it."""

    name: str
    reasons: tuple[str, ...]
    make: Callable[[], Given]
    twin: Callable[[], Given]
    rate: float = 1e-3
    twin_rate: float = 1e-3

    def entries(self) -> tuple[Entry, Entry]:
        return Entry(self.name, "", self.make, self.rate), Entry(self.name, "", self.twin, self.twin_rate)


def gpt2() -> Given:
    return causal(hugging_face("GPT2LMHeadModel", "GPT2Config", **SIZES))


def nano(**settings: int) -> Given:
    return next_tokens(Nano(**settings))


def thirtyfold() -> Given:
    """Every weight is drawn 30 times as wide as GPT-2's are."""
    given = gpt2()
    with torch.no_grad():
        for parameter in given["model"].parameters():
            if parameter.dim() > 1:
                parameter.mul_(30)
    return given


def not_masked() -> Given:
    """Attention looks at all tokens."""
    given = nano()
    for block in given["model"].blocks:
        block.attention.attend = F.scaled_dot_product_attention
    return given


def padded_twice() -> Given:
    """Convolutions are padded at both ends."""
    return next_tokens(CausalConvolutions(both_sides=True))


def not_shifted() -> Given:
    """The labels are the inputs themselves."""
    ids = tokens()
    return {**nano(), "batch": (ids, ids)}


def shifted_twice() -> Given:
    """The labels were shifted beforehand, and GPT-2 shifts them once more."""
    given, ids = gpt2(), tokens(length=21)
    return {**given, "batch": {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}}


class OverSamples(Mixer):
    """A softmax over the wrong dimension: pictures compete with each other."""

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.softmax(x.mean(dim=(1, 2, 3)), dim=0)
        return super().forward(x) * (1 + gate[:, None])


def copied_halves() -> Given:
    """Two tensor-parallel ranks drew their halves of the feed-forward layers from one seed."""
    given = nano()
    with torch.no_grad():
        for block in given["model"].blocks:
            up, down = block.mlp[0], block.mlp[2]
            half = up.weight.shape[0] // 2
            up.weight[half:], up.bias[half:] = up.weight[:half].clone(), up.bias[:half].clone()
            down.weight[:, half:] = down.weight[:, :half].clone()
    return given


class AlwaysDrops(Nano):
    """F.dropout without training=self.training."""

    def embedded(self, ids: Tensor) -> Tensor:
        return F.dropout(super().embedded(ids), 0.1)


class ThroughNumpy(nn.Sequential):
    """A feed-forward layer whose result goes through NumPy: the gradient ends there."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(super().forward(x).detach().numpy())


def detached() -> Given:
    given = nano()
    block = given["model"].blocks[1]
    block.mlp = ThroughNumpy(*block.mlp)
    return given


def tied_by_data() -> Given:
    """The head holds the embedding's memory, but is a parameter of its own."""
    given = nano(tied=False)
    given["model"].lm_head.weight.data = given["model"].wte.weight.data
    return given


def without_a_block() -> Given:
    """The optimizer was given all blocks but the last."""

    def rest(model: nn.Module, rate: float) -> list[nn.Parameter]:
        last = {*model.blocks[-1].parameters()}
        return [parameter for parameter in model.parameters() if parameter not in last]

    return {**nano(), "rates": rest}


BROKEN = (
    Broken("GPT-2 with weights 30 times as wide", ("loss at start",), thirtyfold, gpt2),
    Broken("attention without a causal mask", ("future leak",), not_masked, nano),
    Broken("convolutions padded on both sides", ("future leak",), padded_twice,
           lambda: next_tokens(CausalConvolutions())),
    Broken("labels that are the inputs", ("label shift",), not_shifted, nano),
    Broken("labels shifted twice", ("label shift",), shifted_twice, gpt2),
    Broken("softmax over samples", ("sample leak",), lambda: labelled_pictures(OverSamples()),
           lambda: labelled_pictures(Mixer())),
    Broken("tensor-parallel halves that are copies", ("duplicated units",), copied_halves, nano),
    Broken("a rate of 1 without warm-up", ("output change", "loss rises"), gpt2, gpt2, rate=1.0),
    Broken("dropout in eval mode", ("dropout in eval mode",), lambda: next_tokens(AlwaysDrops()), nano),
    Broken("a layer that is detached", ("detached",), detached, nano),
    Broken("weights tied by .data", ("shared memory",), tied_by_data, nano),
    Broken("a block that the optimizer does not hold", ("no update", "not in the optimizer"), without_a_block, nano),
)  # fmt: skip
