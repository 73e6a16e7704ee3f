"""Healthy changes, none of which may be accused; and decoys: a fault and a harmless change in the same update."""

from __future__ import annotations

import math
from typing import Any

import torch
from faults import AllNegated, BadShard, RateTimes30, RolledLabels, WrittenMatrix
from subjects import FIRST, STEPS, Batch, Loop, loss_fn


class Plain(Loop):
    """Nothing changes."""


class HiddenClipping(Loop):
    def handed(self, t: int) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)


class CosineByHand(Loop):
    def between(self, t: int) -> None:
        up = (t + 1) / 12 if t < 12 else 0.5 * (1 + math.cos(math.pi * (t - 12) / (STEPS - 12)))
        self.optimizer.param_groups[0]["lr"] = self.rate * up


class DeclaredRestarts(Loop):
    """Warm restarts by a scheduler that the recorder knows."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(kind, seed)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, 30)

    def after(self, t: int) -> None:
        self.scheduler.step()


class RestartOnPurpose(Loop):
    """The rate goes down by hand, and up again at once."""

    def between(self, t: int) -> None:
        self.optimizer.param_groups[0]["lr"] = self.rate * (1 - 0.8 * (t % 40) / 40)


class AverageForEvaluation(Loop):
    def between(self, t: int) -> None:
        if t and t % 15 == 0:
            kept = {name: one.clone() for name, one in self.model.state_dict().items()}
            self.model.load_state_dict({name: 0.9 * one for name, one in kept.items()})
            self.model.eval()
            with torch.no_grad():
                loss_fn(self.model, super().batch(10_000))
            self.model.load_state_dict(kept)
            self.model.train()


class HalfCasts(Loop):
    """The matrices are read through bfloat16 for a check, and are not written."""

    def between(self, t: int) -> None:
        assert all(bool(one.detach().bfloat16().isfinite().all()) for one in self.model.parameters())


class MoreAccumulation(Loop):
    """From FIRST on an update has two micro-batches, each with half the loss."""

    def between(self, t: int) -> None:
        self.micro = 2 if t >= FIRST else 1


class MoreDropout(Loop):
    def between(self, t: int) -> None:
        if t == FIRST:
            for layer in self.model.decoder:
                layer.dropout.p = 0.15


class RandomLoader(Loop):
    """The loader draws from torch's generator between updates."""

    def batch(self, t: int, part: int = 0) -> Batch:
        torch.rand(7)
        return super().batch(t, part)


class FrozenFromTheStart(Loop):
    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(kind, seed)
        self.model.embed.requires_grad_(False)


class TwoGroups(Loop):
    def make_optimizer(self) -> torch.optim.Optimizer:
        flat = [one for one in self.model.parameters() if one.dim() < 2]
        rest = [one for one in self.model.parameters() if one.dim() >= 2]
        return torch.optim.AdamW([{"params": rest}, {"params": flat, "weight_decay": 0.0}], lr=self.rate)


HEALTHY = {
    one.__name__: one
    for one in (
        *(Plain, HiddenClipping, CosineByHand, DeclaredRestarts, RestartOnPurpose, AverageForEvaluation, HalfCasts),
        *(MoreAccumulation, MoreDropout, RandomLoader, FrozenFromTheStart, TwoGroups),
    )
}


def decoy(fault: type[Loop], name: str, change: Any) -> type[Loop]:
    """Return the fault with a harmless change in the same update."""

    def between(self: Loop, t: int) -> None:
        if t == FIRST:
            change(self)
        fault.between(self, t)

    return type(f"{fault.__name__}With{name}", (fault,), {"between": between})


def _setting(key: str, value: Any) -> Any:
    def change(loop: Loop) -> None:
        loop.optimizer.param_groups[0][key] = value(loop.optimizer.param_groups[0][key])

    return change


def _dropout(loop: Loop) -> None:
    for layer in loop.model.decoder:
        layer.dropout.p = 0.12


CHANGES = {
    "LowerRate": _setting("lr", lambda rate: rate / 1.6),
    "OtherBeta": _setting("betas", lambda betas: (betas[0], 0.998)),
    "MoreDecay": _setting("weight_decay", lambda decay: 1.5 * decay),
    "MoreEps": _setting("eps", lambda eps: 3 * eps),
    "OtherDropout": _dropout,
}
PAIRS = (
    *((RolledLabels, "LowerRate"), (RolledLabels, "OtherBeta"), (BadShard, "LowerRate"), (BadShard, "OtherDropout")),
    *((WrittenMatrix, "LowerRate"), (WrittenMatrix, "MoreEps"), (AllNegated, "LowerRate"), (AllNegated, "OtherBeta")),
    *((RateTimes30, "OtherDropout"), (RateTimes30, "MoreDecay")),
)
DECOYS = {made.__name__: made for fault, name in PAIRS for made in (decoy(fault, name, CHANGES[name]),)}
