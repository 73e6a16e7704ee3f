"""Faults and healthy changes, each planted in the loop of :mod:`loops`; FIRST is the update at which they begin."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from loops import Batch, Loop, batch
from torch import Tensor

FIRST = 22


class DoubledRate(Loop):
    def between(self, t: int) -> None:
        if t == FIRST:
            self.optimizer.param_groups[0]["lr"] *= 2


class ChangedBeta(Loop):
    def between(self, t: int) -> None:
        if t == FIRST:
            self.optimizer.param_groups[0]["betas"] = (0.9, 0.5)


class ResetMoments(Loop):
    def between(self, t: int) -> None:
        if t == FIRST:
            self.optimizer.state.clear()


class FlippedGradient(Loop):
    """Negates one matrix's gradient after backward, from FIRST on."""

    def gradients(self, t: int) -> None:
        if t >= FIRST:
            self.model.blocks[1].up.weight.grad.neg_()


class FlippedOnce(Loop):
    """Negates all gradients of one update of which no sketch is kept."""

    def handed(self, t: int) -> None:
        if t == FIRST + 3:
            for parameter in self.model.parameters():
                parameter.grad.neg_()


class NoZeroGrad(Loop):
    def between(self, t: int) -> None:
        self.zeroes = t < FIRST


class HiddenClipping(Loop):
    def handed(self, t: int) -> None:
        if t >= FIRST:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


class RolledLabels(Loop):
    def batch(self, t: int) -> Batch:
        one = batch(t)
        return {**one, "labels": one["labels"].roll(1, 1)} if FIRST <= t < FIRST + 6 else one


class BadBatch(Loop):
    def batch(self, t: int) -> Batch:
        one = batch(t)
        if t != FIRST:
            return one
        noise = torch.Generator().manual_seed(1)
        return {key: torch.randint(13, value.shape, generator=noise) for key, value in one.items()}


class FrozenLayer(Loop):
    def between(self, t: int) -> None:
        if t == FIRST:
            self.model.blocks[0].requires_grad_(False)


class WrittenWeight(Loop):
    def between(self, t: int) -> None:
        if t == FIRST:
            weight = self.model.blocks[0].out.weight
            weight.data = weight.data.flip(0).contiguous()


class DropoutInEval(Loop):
    def between(self, t: int) -> None:
        if t == FIRST:
            for block in self.model.blocks:
                block.dropout.eval()


class OtherForward(Loop):
    """Adds a hook to one module that rounds what it returns."""

    def between(self, t: int) -> None:
        if t == FIRST:
            self.model.blocks[1].down.register_forward_hook(lambda module, given, output: output.bfloat16().float())


class DoubledUpdate(Loop):
    """Moves parameters twice as far, in a hook that belongs to the optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.optimizer.register_step_post_hook(self.move)

    def move(self, *given: Any) -> None:
        with torch.no_grad():
            for parameter, before in zip(self.model.parameters(), self.kept, strict=False):
                parameter.add_(parameter - before)

    def handed(self, t: int) -> None:
        self.kept = [parameter.detach().clone() for parameter in self.model.parameters()] if t >= FIRST else []


class _Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class WrongBackward(Loop):
    """Negates the gradient inside a layer, from the first update on: a replay does the same."""

    def __init__(self) -> None:
        super().__init__()
        down = self.model.blocks[0].down
        down.forward = lambda x: _Negated.apply(F.linear(x, down.weight, down.bias))  # type: ignore[method-assign]


class Healthy(Loop):
    pass


class Warmed(Loop):
    """A schedule by hand: linear warm-up, then a cosine."""

    def between(self, t: int) -> None:
        up = (t + 1) / 10 if t < 10 else 0.5 * (1 + torch.cos(torch.tensor(3.14159 * (t - 10) / 40)).item())
        self.optimizer.param_groups[0]["lr"] = 3e-3 * up


class Evaluates(Loop):
    """Swaps averaged weights in for an evaluation, in eval mode, and puts everything back."""

    def between(self, t: int) -> None:
        if t and t % 6 == 0:
            kept = {name: value.clone() for name, value in self.model.state_dict().items()}
            self.model.eval()
            self.model.load_state_dict({name: 0.5 * value for name, value in kept.items()})
            with torch.no_grad():
                self.model(batch(1000)["tokens"])
            torch.rand(3)  # as a loader that draws a seed does
            self.model.load_state_dict(kept)
            self.model.train()


class LargeRate(Loop):
    """A rate 40 times as large from FIRST on, from which the run does not come back."""

    def between(self, t: int) -> None:
        if t == FIRST:
            self.optimizer.param_groups[0]["lr"] *= 40


class FlippedForGood(Loop):
    """All gradients are negated from FIRST on, outside of what is declared."""

    def gradients(self, t: int) -> None:
        if t >= FIRST:
            for parameter in self.model.parameters():
                parameter.grad.neg_()


class LostWeight(Loop):
    """A NaN is written before the update of a snapshot, so that every update replays equal."""

    def between(self, t: int) -> None:
        if t == FIRST + 2:
            with torch.no_grad():
                self.model.blocks[1].up.weight[0, 0] = float("nan")


class ShiftedForGood(Loop):
    """Labels are shifted from FIRST on."""

    def batch(self, t: int) -> Batch:
        one = batch(t)
        return {**one, "labels": one["labels"].roll(1, 1)} if t >= FIRST else one


class ShiftedWithDecoy(ShiftedForGood):
    """The rate changes by 1.6 in the same update, which does no harm."""

    def between(self, t: int) -> None:
        if t == FIRST:
            self.optimizer.param_groups[0]["lr"] *= 1.6
