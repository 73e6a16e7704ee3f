"""The rate at which one update changes the output, by optimizer and group of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..models.base import Factors
from ..models.groups import groups_of
from ..probes.parameters.pieces import GROUPS, Piece
from ..schema import Row
from .initial_model import Filled, Subject, filled, moved, part_of

Direction = Callable[[int], Tensor]  # computed on demand: the updates of all parameters take the model's memory
LR = 1e-6  # small enough for a linear response, large enough for nine digits of it in float64

# The pieces of the parameters in each group. An untied output matrix comes after F: only "all" contains it.
MEMBERS: dict[str, Callable[[Piece], bool]] = {
    "all": lambda piece: True,
    **{group: lambda piece, group=group: piece.group == group for group in GROUPS},
    "embedding": lambda piece: piece.row.sublayer == "embedding",
    "encoder": lambda piece: piece.row.stack == "encoder",
    "decoder": lambda piece: piece.row.stack == "decoder",
    "cross_attn": lambda piece: piece.row.sublayer == "cross_attn",
}
DEFINITION = """Mean over real target tokens of ||F(theta - lr u) - F(theta)||_2 / lr at lr = 1e-6, F the last stack's
output after its last norm; u is the gradient (sgd) or g / (|g| + eps), Adam's first update without weight decay, in one
group of parameters and 0 elsewhere. vo_ffn: v, out, fc1, gate, fc2; encoder, decoder: that stack with its embedding
(a shared one is the decoder's). DeepNet, Fig. 5 and Sec. 4.2; lr and groups Inferred."""


def directions(subject: Subject) -> dict[str, Direction]:
    """Return optimizer -> the function from a parameter's number to its first update per unit of learning rate (the
    subtracted tensor)."""
    eps, parameters = subject.config.train.eps, subject.parameters.tensors
    groups = groups_of(subject.model)
    factors: dict[Tensor, Factors] = {own: group.factors for group in groups for own in group.parameters}

    def sgd(index: int) -> Tensor:
        own = parameters[index]
        return torch.zeros_like(own) if own.grad is None else own.grad

    def adam(index: int) -> Tensor:
        gradient, own = sgd(index), factors.get(parameters[index], Factors())
        update = gradient / (gradient.abs() + eps * own.eps)
        return update if own.lr == 1.0 else own.lr * update

    return {"sgd": sgd, "adam": adam}


def rate(subject: Subject, members: Callable[[Piece], bool], direction: Direction, start: Tensor) -> float:
    """Return ||dF|| / LR per token for an update of the chosen pieces at LR; ``start`` is F before the update."""
    cuts = [(piece.index, piece.part) for piece in subject.parameters.pieces if members(piece)]
    tensors = [part_of(subject.parameters.tensors[index].data, rows) for index, rows in cuts]
    with moved(tensors, (part_of(direction(index), rows) for index, rows in cuts), -LR):
        change = subject.output() - start
    return (torch.linalg.vector_norm(change, dim=-1).mean() / LR).item()


def update_rate(subject: Subject, directions: Mapping[str, Direction], start: Tensor) -> Filled:
    groups = {n: m for n, m in MEMBERS.items() if any(map(m, subject.parameters.pieces))}
    rates = {
        Row(f"{optimizer}.{name}"): rate(subject, members, direction, start)
        for optimizer, direction in directions.items()
        for name, members in groups.items()
    }
    return filled(
        "update_rate",
        list(rates),
        {"value": list(rates.values())},
        unit="L2 norm per token and learning rate",
        definition=DEFINITION,
        phase="update",
        log=True,
    )
