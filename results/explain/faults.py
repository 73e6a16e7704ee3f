"""The faults, each of another mechanism. LISTED were named when the rules were written; NEW were not."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from subjects import FIRST, VOCAB, Batch, Loop
from torch import Tensor

SHARD = range(FIRST, FIRST + 12)


def noise(shape: Any, seed: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class RateTimes30(Loop):
    kinds, places = ("rate", "learning rate"), ("group 0",)

    def between(self, t: int) -> None:
        if t == FIRST:
            self.optimizer.param_groups[0]["lr"] *= 30


class RateTimes3(Loop):
    kinds, places = ("rate", "learning rate"), ("group 0",)

    def between(self, t: int) -> None:
        if t == FIRST:
            self.optimizer.param_groups[0]["lr"] *= 3


class LowBeta(Loop):
    kinds, places = ("setting", "betas"), ("betas",)

    def between(self, t: int) -> None:
        if t == FIRST:
            self.optimizer.param_groups[0]["betas"] = (0.9, 0.3)


class ResetState(Loop):
    kinds = ("optimizer reset",)

    def between(self, t: int) -> None:
        if t == FIRST:
            self.optimizer.state.clear()


class AllNegated(Loop):
    kinds = ("gradient sign",)

    def gradients(self, t: int) -> None:
        if t >= FIRST:
            for one in self.model.parameters():
                one.grad.neg_()


class NoZeroGrad(Loop):
    kinds = ("gradients added",)

    def between(self, t: int) -> None:
        self.zeroes = t < FIRST


class RolledLabels(Loop):
    kinds = ("labels", "shifted labels")

    def batch(self, t: int, part: int = 0) -> Batch:
        one = super().batch(t, part)
        return {**one, "labels": one["labels"].roll(1, 1)} if t >= FIRST else one


class BadBatch(Loop):
    kinds = ("bad batch", "the data of update")

    def batch(self, t: int, part: int = 0) -> Batch:
        one = super().batch(t, part)
        return {**one, "labels": noise(one["labels"].shape, t)} if t == FIRST else one


class BadShard(Loop):
    kinds = ("bad batch", "the data of updates")

    def batch(self, t: int, part: int = 0) -> Batch:
        one = super().batch(t, part)
        return {**one, "labels": noise(one["labels"].shape, t)} if t in SHARD else one


class FrozenLayer(Loop):
    kinds, places = ("frozen",), ("decoder.0",)

    def between(self, t: int) -> None:
        if t == FIRST:
            self.model.decoder[0].requires_grad_(False)


class WrittenMatrix(Loop):
    kinds, places = ("state written",), ("decoder.1.down.weight",)

    def between(self, t: int) -> None:
        if t == FIRST:
            with torch.no_grad():
                self.model.decoder[1].down.weight.mul_(-4)


class SilentDropout(Loop):
    kinds = ("mode",)

    def between(self, t: int) -> None:
        if t == FIRST:
            self.model.eval()


class WholeMask(Loop):
    kinds, places = ("mask",), ("mask",)

    def batch(self, t: int, part: int = 0) -> Batch:
        one = super().batch(t, part)
        return {**one, "mask": torch.ones_like(one["mask"])} if t >= FIRST else one


class DetachedLayer(Loop):
    kinds, places, own = ("derivative",), ("decoder.0", "decoder.1"), True

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(kind, seed)
        up = self.model.decoder[1].up
        up.forward = lambda x: F.linear(x.detach(), up.weight, up.bias)  # type: ignore[method-assign]


class NegatedLayer(Loop):
    kinds, places, own = ("derivative",), ("decoder.0",), True

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(kind, seed)
        down = self.model.decoder[0].down
        down.forward = lambda x: Negated.apply(F.linear(x, down.weight, down.bias))  # type: ignore[method-assign]


class HeavyDecay(Loop):
    kinds, places = ("setting", "weight_decay"), ("weight_decay",)

    def between(self, t: int) -> None:
        if t == FIRST:
            self.optimizer.param_groups[0]["weight_decay"] = 30.0


class LargeEps(Loop):
    kinds, places = ("setting", "eps"), ("eps",)

    def between(self, t: int) -> None:
        if t == FIRST:
            self.optimizer.param_groups[0]["eps"] = 1e-1


class Maximizes(Loop):
    kinds, places = ("setting", "maximize"), ("maximize",)

    def between(self, t: int) -> None:
        if t == FIRST:
            self.optimizer.param_groups[0]["maximize"] = True


class SwappedRates(Loop):
    """Two groups exchange their rates."""

    kinds = ("rate", "learning rate")

    def make_optimizer(self) -> torch.optim.Optimizer:
        head = {id(one) for one in self.model.head.parameters()}
        rest = [one for one in self.model.parameters() if id(one) not in head]
        groups = [{"params": rest}, {"params": [*self.model.head.parameters()], "lr": 0.06}]
        return torch.optim.AdamW(groups, lr=self.rate)

    def between(self, t: int) -> None:
        if t == FIRST:
            one, other = self.optimizer.param_groups
            one["lr"], other["lr"] = other["lr"], one["lr"]


class SummedLoss(Loop):
    """The loss is a sum instead of a mean: gradients are 8 times as large, before a clipping that hides it."""

    kinds = ("gradient scale", "loss")

    def loss(self, t: int, given: Batch) -> Tensor:
        return super().loss(t, given) * (8 if t >= FIRST else 1)


class NoisyGradients(Loop):
    kinds = ("gradient",)

    def gradients(self, t: int) -> None:
        if t >= FIRST:
            draw = torch.Generator().manual_seed(t)
            for one in self.model.parameters():
                one.grad.add_(torch.randn(one.shape, generator=draw))


class ZeroedHead(Loop):
    kinds, places = ("gradient zero",), ("head",)

    def gradients(self, t: int) -> None:
        if t >= FIRST:
            self.model.head.weight.grad.zero_()


class TwiceBackward(Loop):
    """Each loss is called backward on twice."""

    kinds = ("gradient scale", "gradients added")

    def loss(self, t: int, given: Batch) -> Tensor:
        found = super().loss(t, given)
        if t >= FIRST:
            found.backward(retain_graph=True)
        return found


class RollsBack(Loop):
    """An old copy of the weights comes back every ten updates."""

    kinds = ("state written",)

    def between(self, t: int) -> None:
        if t == 20:
            self.kept = {name: one.clone() for name, one in self.model.state_dict().items()}
        if t >= FIRST and t % 10 == 0:
            self.model.load_state_dict(self.kept)


class AveragedForGood(Loop):
    """An average of the weights is swapped in for an evaluation, and never out."""

    kinds = ("state written",)

    def between(self, t: int) -> None:
        own = self.model.state_dict()
        if t == 0:
            self.average = {name: one.clone() for name, one in own.items()}
        for name, one in own.items():
            self.average[name].lerp_(one, 0.05)
        if t == FIRST:
            self.model.load_state_dict(self.average)


class StepsTwice(Loop):
    kinds = ("update scale", "update", "state written")

    def between(self, t: int) -> None:
        self.steps = 2 if t >= FIRST else 1


class PermutedRows(Loop):
    kinds, places = ("state written",), ("embed.weight",)

    def between(self, t: int) -> None:
        if t == FIRST:
            weight = self.model.embed.weight
            weight.data.copy_(weight.data.roll(1, 0))


class RoundedMoments(Loop):
    """Moments pass through bfloat16 after every update, as an offloading would do."""

    kinds = ("state written",)

    def after(self, t: int) -> None:
        if t >= FIRST:
            for state in self.optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key].copy_(state[key].bfloat16().float())


class LargeNormEps(Loop):
    kinds, places = ("attribute", "another decoder"), ("eps",)

    def between(self, t: int) -> None:
        if t == FIRST:
            for layer in self.model.decoder:
                for norm in layer.norms:
                    norm.eps = 10.0


class MuchDropout(Loop):
    kinds, places = ("attribute", "another decoder"), ("dropout",)

    def between(self, t: int) -> None:
        if t == FIRST:
            for layer in self.model.decoder:
                layer.dropout.p = 0.9


class SharpAttention(Loop):
    kinds, places = ("attribute", "another decoder"), ("scale",)

    def between(self, t: int) -> None:
        if t == FIRST:
            for layer in self.model.decoder:
                layer.scale = 40.0


class CoarseActivations(Loop):
    """A hook rounds what a module returns to quarters."""

    kinds, places = ("forward",), ("decoder.1.up",)

    def between(self, t: int) -> None:
        if t == FIRST:
            self.model.decoder[1].up.register_forward_hook(lambda m, given, output: (output * 4).round() / 4)


class ClampedGradients(Loop):
    """Hooks clamp each entry of some gradients inside backward."""

    kinds, places = ("gradient",), ("decoder.0",)

    def between(self, t: int) -> None:
        if t == FIRST:
            for one in self.model.decoder[0].parameters():
                one.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class IgnoredMask(Loop):
    """The loss counts padding, which w.batch() has no part in."""

    kinds = ("loss", "gradient")

    def loss(self, t: int, given: Batch) -> Tensor:
        if t < FIRST:
            return super().loss(t, given)
        logits = self.model(given["tokens"], given["mask"], given.get("source"))
        return F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten())


class PermutedVocabulary(Loop):
    """A shard whose inputs were tokenised with another vocabulary."""

    kinds = ("bad batch", "the data of updates")

    def batch(self, t: int, part: int = 0) -> Batch:
        one = super().batch(t, part)
        order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))
        return {**one, "tokens": order[one["tokens"]]} if t in SHARD else one


class StuckLoader(Loop):
    """The loader returns one batch for ever: nothing that was declared is broken."""

    scope = False

    def number(self, t: int, part: int = 0) -> int:
        return super().number(min(t, FIRST), part)


class EarlyEnd(Loop):
    """A schedule by hand goes to zero in the middle of the run: nothing gets worse."""

    scope = False

    def between(self, t: int) -> None:
        self.optimizer.param_groups[0]["lr"] = self.rate * max(0.0, 1 - max(0, t - 40) / 30)


LISTED = (
    *(RateTimes30, RateTimes3, LowBeta, ResetState, AllNegated, NoZeroGrad, RolledLabels, BadBatch, BadShard),
    *(FrozenLayer, WrittenMatrix, SilentDropout, WholeMask, DetachedLayer, NegatedLayer),
)
NEW = (
    *(HeavyDecay, LargeEps, Maximizes, SwappedRates, SummedLoss, NoisyGradients, ZeroedHead, TwiceBackward, RollsBack),
    *(AveragedForGood, StepsTwice, PermutedRows, RoundedMoments, LargeNormEps, MuchDropout, SharpAttention),
    *(CoarseActivations, ClampedGradients, IgnoredMask, PermutedVocabulary, StuckLoader, EarlyEnd),
)
FAULTS = {one.__name__: one for one in (*LISTED, *NEW)}
