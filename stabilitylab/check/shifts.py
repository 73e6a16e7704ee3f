"""The shift of the labels: a label is the token after its place, as in language models, or another token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .bounds import not_checked, weigh
from .result import Check
from .seen import UNSEEN, CrossEntropy, Seen, tensors_of
from .start import KNOWS, NONE

NAME, COPIED = "label shift", "labels in the input"
SHIFTS = (-1, 0, 1)
OFFSETS = (-1, 0, 1, 2)  # places after a label's own, at which its token is looked for
PLACES = {-1: "the previous tokens", 0: "the input's own tokens", 2: "the tokens after the next ones"}
ALIKE = 0.95  # share of the labels from which on they are the tokens of an offset
FEW = 0.2  # up to this share of labels, a tied embedding, which predicts its own token, does not decide a loss
FEWEST = 8  # labels
LOWER = 0.5  # nats that a loss at another shift must be lower
ERRORS = 4.0  # standard errors of that difference


@dataclass(frozen=True)
class Lined:
    """Labels in their places. ``labels``, ``counted``: (B, L), ``at``: the number of the prediction there, -1 for none;
    ``turned``: the model's own tensors are (L, B)."""

    call: CrossEntropy
    labels: Tensor
    counted: Tensor
    at: Tensor
    turned: bool = False

    @property
    def other_way(self) -> Lined:
        return Lined(self.call, self.labels.T, self.counted.T, self.at.T, not self.turned)

    def losses(self) -> dict[int, tuple[float, float]]:
        """Return, by shift of the labels, over places where both count: the mean loss [nats], and the standard error of
        its difference to the loss at shift 0."""
        return {shift: self._loss(shift) for shift in SHIFTS}

    def _loss(self, shift: int) -> tuple[float, float]:
        length = self.labels.shape[1]
        here = slice(max(0, -shift), length - max(0, shift))
        there = slice(max(0, shift), length - max(0, -shift))
        both = self.counted[:, here] & self.counted[:, there]
        if not both.any():
            return math.nan, math.nan
        rows = self.at[:, here][both]
        moved, own = (self._nll(rows, labels[both]) for labels in (self.labels[:, there], self.labels[:, here]))
        difference = moved - own
        error = float(difference.std() / math.sqrt(len(difference))) if len(difference) > 1 else math.nan
        return float(moved.mean()), error

    def _nll(self, rows: Tensor, labels: Tensor) -> Tensor:
        picked = self.call.logits[rows, labels.clamp(0, self.call.classes - 1)].double()
        return self.call.log_sums[rows] - picked


def lined(seen: Seen, batch: Any) -> Lined | str:
    """Return the labels of the main cross-entropy in their places, or the reason why these are unknown."""
    call = seen.main
    if call is None:
        return NONE
    if call.target.is_floating_point():
        return "its targets are probabilities"
    place = _placed(call, seen, batch)
    if place is None:
        return "the labels have no places in a sequence"
    rows, columns, index = place
    labels, at = (torch.full((rows * columns,), -1, device=call.target.device) for _ in range(2))
    counted = torch.zeros(rows * columns, dtype=torch.bool, device=call.target.device)
    labels[index], counted[index] = call.target.long(), call.counted
    at[index] = torch.arange(len(call.target), device=call.target.device)
    shape = (rows, columns)
    own = Lined(call, labels.view(shape), counted.view(shape), at.view(shape))
    return max((own, own.other_way), key=lambda one: _best(seen, one) >= ALIKE)


def _best(seen: Seen, own: Lined) -> float:
    return max((share for index, _ in seen.tokens for share in offsets(own, index).values()), default=0.0)


def _placed(call: CrossEntropy, seen: Seen, batch: Any) -> tuple[int, int, Tensor] | None:
    """Return (samples, places, index of each target among them); None if unknown."""
    count = len(call.target)
    everything = torch.arange(count, device=call.target.device)
    if len(call.shape) == 2 and call.shape[1] > 1:
        return *call.shape, everything
    shapes = [tuple(index.shape) for index, _ in seen.tokens if index.dim() == 2]
    if seen.output is not None and seen.output.dim() == 3:
        shapes.append(tuple(seen.output.shape[:2]))
    for rows, columns in dict.fromkeys(shapes):
        if rows > 1 or columns > 1:
            if count == rows * columns:
                return rows, columns, everything
            if count == rows * (columns - 1) and columns > 2:
                return rows, columns - 1, everything
            if count == (rows - 1) * columns and rows > 2:
                return rows - 1, columns, everything
    return _selected(call.target, [own for own in tensors_of(batch) if own.dim() == 2])


def _selected(target: Tensor, given: Sequence[Tensor]) -> tuple[int, int, Tensor] | None:
    """Return the places of targets that a mask of the batch has selected from labels of the batch; None if there is no
    such mask."""
    masks = [own.to(target.device) > 0 for own in given if set(own.unique().tolist()) <= {0, 1}]
    for labels in given:
        if labels.is_floating_point() or labels.dtype is torch.bool:
            continue
        labels = labels.to(target.device)
        for mask in (own for own in masks if own.shape == labels.shape):
            for first in (0, 1):
                own, kept = labels[:, first:], mask[:, first:]
                if int(kept.sum()) == len(target) and torch.equal(own[kept].long(), target.long()):
                    rows, columns = own.shape
                    return rows, columns, kept.flatten().nonzero()[:, 0]
    return None


def offsets(own: Lined, index: Tensor) -> dict[int, float]:
    """Return the share of the labels that equal the token so many places after their own, by offset, for indices (B,
    T)."""
    index = index.to(own.labels.device)
    index = index.T if own.turned and index.dim() == 2 else index
    if index.dim() != 2 or len(index) != len(own.labels) or abs(index.shape[1] - own.labels.shape[1]) > 1:
        return {}
    found, length = {}, own.labels.shape[1]
    inner = _without_ends(own.counted)
    for offset in OFFSETS:
        places = torch.arange(length, device=index.device)
        inside = (places + offset >= 0) & (places + offset < index.shape[1])
        counted = inner[:, inside]
        if int(counted.sum()) >= FEWEST:
            same = own.labels[:, inside] == index[:, places[inside] + offset]
            found[offset] = float(same[counted].double().mean())
    return found


def _without_ends(counted: Tensor) -> Tensor:
    """Return ``counted`` without the last label of each row that has three or more: an end of sentence is in no
    input."""
    places = torch.arange(counted.shape[1], device=counted.device)
    last = torch.where(counted, places, -1).max(dim=1, keepdim=True).values
    return counted & ((places != last) | (counted.sum(dim=1, keepdim=True) < 3))


def batch_first(seen: Seen, own: Lined | str) -> bool | None:
    """True if samples lie along the first dimension, as labels that are tokens of other places show; None if they do
    not."""
    if isinstance(own, str):
        return None
    moved = (share for index, _ in seen.tokens for offset, share in offsets(own, index).items() if offset)
    return not own.turned if max(moved, default=0.0) >= ALIKE else None


def next_of(seen: Seen, own: Lined | str) -> list[Tensor]:
    """Return the leaves whose next token is the label."""
    if isinstance(own, str):
        return []
    return [leaf for index, leaf in seen.tokens if offsets(own, index).get(1, 0.0) >= ALIKE]


def label_shift(seen: Seen, own: Lined | str, causal: bool | None) -> Check:
    """Check the offset at which labels are tokens of the input, and the losses at shifts -1, 0 and +1 of the labels.

    In a trained model the losses decide too: the lowest must be that at 0, except for labels that are in the input (a
    tied embedding predicts its own token before any training).
    """
    if isinstance(own, str):
        return not_checked(NAME, own)
    by_shift = own.losses()
    told = ", ".join(f"{loss:.4g} at {shift:+d}" for shift, (loss, _) in by_shift.items())
    shares = [offsets(own, index) for index, _ in seen.tokens]
    matched = [{offset for offset, share in each.items() if share >= ALIKE} for each in shares]
    known = {offset for each in matched for offset in each}
    losses = f"losses by shift of the labels: {told}"
    if known == {1}:
        return _by_loss(own, by_shift, shares, f"the labels are the next tokens of the input; {losses}", offset=1)
    if len(known) > 1 and 1 in known and any(each == {1} for each in matched):
        text = f"the labels are the next tokens of the decoder's input; {losses}"
        return _by_loss(own, by_shift, shares, text, offset=1)
    if len(known) > 1:
        return not_checked(NAME, f"the tokens repeat, so that the labels are those at several places; {losses}")
    if known == {0} and not causal:
        text = f"the labels are the tokens at their own places; {losses}"
        share = max(each.get(0, 0.0) for each in shares)
        return weigh(COPIED, share, text)
    if known:
        (offset,) = known
        off = offset - 1
        text = f"the labels are {PLACES[offset]}, not the next ones; {losses}"
        return weigh(NAME, abs(off), text, remedy=_remedy(offset))
    text = f"{'the labels are no tokens of the input' if seen.tokens else UNSEEN}; {losses}"
    return _by_loss(own, by_shift, shares, text, offset=None)


def _by_loss(
    own: Lined,
    losses: Mapping[int, tuple[float, float]],
    shares: Sequence[Mapping[int, float]],
    text: str,
    offset: int | None,
) -> Check:
    """Judge by the ``losses`` of shifts. ``shares``: those of the labels at each offset, by input; ``offset``: the one
    at which the labels are tokens of an input, None for labels that are none."""
    uniform = math.log(own.call.classes)
    here = losses[0][0]
    # shifts that name the input's tokens
    copied = {-at for each in shares for at, share in each.items() if share > FEW}
    others = {s: loss for s, loss in losses.items() if s and s not in copied and (offset is None or s + offset)}
    for shift, (loss, error) in others.items():
        lower = here - loss
        if loss < KNOWS * uniform and lower > LOWER and lower > ERRORS * error:
            remedy = f"move the labels by {-shift:+d}: the model predicts the labels {abs(shift)} place away"
            measured = f"the loss is lower by {lower:.3g} at a shift of {shift:+d}; {text}"
            return weigh(NAME, float(abs(shift)), measured, remedy=remedy)
    if offset is None and not min(loss for loss, _ in losses.values()) < KNOWS * uniform:
        return not_checked(NAME, f"{text}; the model is untrained, so its losses do not show the right shift")
    return weigh(NAME, 0.0, text)


def _remedy(offset: int) -> str:
    if offset == 0:
        return "shift the labels by one: labels[t] = tokens[t + 1] (Hugging Face's models do it themselves)"
    if offset == 2:
        return "shift the labels once: the model, or its loss, shifts them too"
    return "give as labels[t] the token t + 1"
