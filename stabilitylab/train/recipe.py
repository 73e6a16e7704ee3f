"""The training recipe: loss, learning rate and optimizer, as the papers state them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from ..config import TrainConfig
from ..models.base import Factors
from ..models.groups import Group
from ..probes.parameters.layouts import local
from .adamw import LeanAdamW
from .fast import OnePassAdamW

__all__ = ["adamw", "learning_rate", "optimizer_of", "token_losses"]

NO_WARMUP_PERIOD = 4000  # updates before an inverse-sqrt rate decays without warm-up (T-Fixup's reference recipe)


def learning_rate(train: TrainConfig, update: int) -> float:
    """Return the learning rate of the ``update``-th update, counted from 0 as in fairseq.

    - inverse_sqrt: linear from ``warmup_init_lr`` to ``lr`` over w = ``warmup`` updates, then lr * sqrt(w / update).
      With warmup = 0: lr, and from update 4000 on lr * sqrt(4000 / update).
    - constant: the same ramp, then lr.
    - linear: the same ramp, then lr * (n - update) / (n - w), down to 0 after the last of n updates. n is ``horizon``,
      or ``steps`` if no horizon is given.
    """
    if update < train.warmup:
        return train.warmup_init_lr + (train.lr - train.warmup_init_lr) * update / train.warmup
    if train.schedule == "constant":
        return train.lr
    if train.schedule == "linear":
        return train.lr * max(0.0, (train.span - update) / max(1, train.span - train.warmup))
    period = train.warmup or NO_WARMUP_PERIOD
    return train.lr * (period / max(update, period)) ** 0.5


def adamw(
    train: TrainConfig, parameters: Iterable[Any], *, device: torch.device | None = None, lean: bool = True
) -> torch.optim.AdamW:
    """Return a fused AdamW over all parameters, with decoupled decay. Adam's L2 term would move weights with a zero
    gradient at the full rate (BranchNorm's encoder while alpha is small).

    ``device``: keep the rate there as a tensor, so that a recorded update can be replayed with another rate. ``lean``:
    make the same updates with less work on the host, if every parameter is whole. FSDP2's shards take PyTorch's own
    optimizer.
    """
    parameters = list(parameters)
    rate = learning_rate(train, 0)
    settings: dict[str, Any] = {
        "lr": rate if device is None else torch.tensor(rate, device=device),
        "betas": (train.beta1, train.beta2),
        "eps": train.eps,
        "weight_decay": train.weight_decay,
        "capturable": device is not None,
    }
    whole = [p for each in parameters for p in (each["params"] if isinstance(each, dict) else [each])]
    if lean and all(local(parameter) is parameter for parameter in whole):
        return (OnePassAdamW if train.one_pass else LeanAdamW)(parameters, **settings)
    return torch.optim.AdamW(parameters, **settings, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all groups, times each group's factor; a rate that is a tensor is overwritten in
    place."""
    for group in optimizer.param_groups:
        own = rate * group.get("rate_factor", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


def group_settings(groups: Iterable[Mapping[str, Any]]) -> list[tuple[float, ...]]:
    """Return the number of parameters, the factor on the rate, eps and decay of each of an optimizer's groups."""
    return [(len(own["params"]), own.get("rate_factor", 1.0), own["eps"], own["weight_decay"]) for own in groups]


@contextmanager
def own_rates(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep this run's own form of learning rates while a checkpoint is loaded, which another device may have written.

    The values of the rates are loaded. The device of a rate, and ``capturable`` (a recorded update reads the rate on
    the device), stay those of this run.
    """
    own = [(group["lr"], group["capturable"]) for group in optimizer.param_groups]
    yield
    for group, (rate, capturable) in zip(optimizer.param_groups, own, strict=True):
        loaded = float(group["lr"])
        group["lr"] = rate.fill_(loaded) if isinstance(rate, Tensor) else loaded
        group["capturable"] = capturable


def param_groups(
    train: TrainConfig, groups: Sequence[Group], device: torch.device | None = None
) -> list[Parameter] | list[dict[str, Any]]:
    """Return the optimizer's groups with the rate, eps and decay of each; the parameters alone if there are no
    factors."""
    if len(groups) == 1 and groups[0].factors == Factors():
        return [*groups[0].parameters]
    rate = learning_rate(train, 0)

    def lr(factor: float) -> float | Tensor:
        return rate * factor if device is None else torch.tensor(rate * factor, device=device)

    return [
        {
            "params": [*group.parameters],
            "lr": lr(group.factors.lr),
            "rate_factor": group.factors.lr,
            "eps": train.eps * group.factors.eps,
            "weight_decay": train.weight_decay * group.factors.decay,
        }
        for group in groups
    ]


def optimizer_of(
    train: TrainConfig, parameters: Iterable[Any], *, device: torch.device | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of ``train.optimizer``: AdamW (:func:`adamw`), or RAdam (Liu et al. 2020, Admin's recipe)
    with decoupled decay."""
    if train.optimizer == "adamw":
        return adamw(train, parameters, device=device)
    on_gpu = device is not None and device.type == "cuda"
    rate = learning_rate(train, 0)
    return torch.optim.RAdam(
        parameters,
        lr=torch.tensor(rate, device=device) if on_gpu else rate,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        weight_decay=train.weight_decay,
        decoupled_weight_decay=True,
        capturable=on_gpu,
    )


def token_losses(logits: Tensor, labels: Tensor, weight: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return (smoothed cross-entropy, unsmoothed nll) in nats, each summed over tokens with ``weight`` (0 on padding).

    The smoothed target is 1 - s + s/V on the label and s/V elsewhere, with s = ``smoothing``, as in
    ``torch.nn.functional.cross_entropy``. ``logits``: (B, T, V). ``labels``: (B, T) int64. ``weight``: (B, T). The
    result can be differentiated once, in the logits.
    """
    return _TokenLosses.apply(logits, labels, weight, smoothing)  # pyright: ignore[reportReturnType]


class _TokenLosses(torch.autograd.Function):
    """The two losses with a gradient of their own, since autograd would make five more tensors of the logits' size.

    With a, b the factors of a token's nll and of its mean over the vocabulary, the gradient is (a + b) p - b / V, less
    a at the label.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weight: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)  # (B, T, V)
        nll = -(log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1) * weight).sum()
        ctx.save_for_backward(log_p, labels, weight)
        ctx.smoothing, ctx.dtype = smoothing, logits.dtype
        if smoothing == 0:
            return nll.clone(), nll
        uniform = -(log_p.mean(dim=-1) * weight).sum()
        return (1 - smoothing) * nll + smoothing * uniform, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        log_p, labels, weight = ctx.saved_tensors
        of_loss, of_nll = gradients
        weight = weight.to(log_p.dtype)
        on_label = (((1 - ctx.smoothing) * of_loss + of_nll) * weight).unsqueeze(-1)  # (B, T, 1)
        on_all = (ctx.smoothing * of_loss * weight).unsqueeze(-1)
        gradient = log_p.exp().mul_(on_label + on_all).sub_(on_all / log_p.shape[-1])
        gradient.scatter_add_(-1, labels.unsqueeze(-1), -on_label)
        return gradient.to(ctx.dtype), None, None, None


def accuracy(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Return the share of the tokens with ``weight`` 1 whose label is the most probable token; logits (B, T, V)."""
    return ((logits.argmax(dim=-1) == labels) * weight).sum() / weight.sum()
