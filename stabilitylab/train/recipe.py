"""The training recipe: loss, learning rate and optimizer, as the papers state them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from ..config import TrainConfig

NO_WARMUP_PERIOD = 4000  # updates before an inverse-sqrt rate decays without warm-up (T-Fixup's reference recipe)


def learning_rate(train: TrainConfig, update: int) -> float:
    """Rate of the ``update``-th update, counted from 0 as fairseq does.

    inverse_sqrt: linear from ``warmup_init_lr`` to ``lr`` over w = ``warmup`` updates, then lr * sqrt(w / update);
    with warmup = 0: lr, and lr * sqrt(4000 / update) from update 4000 on. constant: the same ramp, then lr.
    """
    if update < train.warmup:
        return train.warmup_init_lr + (train.lr - train.warmup_init_lr) * update / train.warmup
    if train.schedule == "constant":
        return train.lr
    period = train.warmup or NO_WARMUP_PERIOD
    return train.lr * (period / max(update, period)) ** 0.5


def adamw(train: TrainConfig, parameters: Iterable[Parameter]) -> torch.optim.AdamW:
    """Fused AdamW over all parameters: decoupled decay, since Adam's L2 term would move weights with zero gradient at
    the full rate (BranchNorm's encoder while alpha is small)."""
    return torch.optim.AdamW(
        parameters,
        lr=learning_rate(train, 0),
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        weight_decay=train.weight_decay,
        fused=True,
    )


def optimizer_of(train: TrainConfig, parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
    """What ``train.optimizer`` asks for: AdamW, or RAdam (Liu et al. 2020, Admin's recipe) with decoupled decay."""
    if train.optimizer == "adamw":
        return adamw(train, parameters)
    return torch.optim.RAdam(
        parameters,
        lr=learning_rate(train, 0),
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        weight_decay=train.weight_decay,
        decoupled_weight_decay=True,
    )


def token_losses(logits: Tensor, labels: Tensor, weight: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """(smoothed cross-entropy, unsmoothed nll), in nats, each summed over tokens with ``weight`` (0 on padding).

    Smoothed target: 1 - s + s/V on the label, s/V elsewhere, as in ``torch.nn.functional.cross_entropy``.
    logits (B, T, V); labels (B, T) int64; weight (B, T).
    """
    log_p = torch.log_softmax(logits.float(), dim=-1)  # (B, T, V)
    nll = -(log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1) * weight).sum()
    if smoothing == 0:
        return nll, nll
    uniform = -(log_p.mean(dim=-1) * weight).sum()
    return (1 - smoothing) * nll + smoothing * uniform, nll


def accuracy(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Share of the tokens with ``weight`` 1 whose label is the most probable token; logits (B, T, V)."""
    return ((logits.argmax(dim=-1) == labels) * weight).sum() / weight.sum()
