"""The loss before training against that of a uniform guess, and how far one update changes the predictions."""

from __future__ import annotations

import math

import torch

from .bounds import not_checked, weigh
from .result import Check
from .seen import CrossEntropy, Seen

LOSS, CHANGE = "loss at start", "output change"
NONE = "the loss calls no torch.nn.functional.cross_entropy"
KNOWS = 0.9  # share of ln(classes) below which a model has been trained, or its labels leak


def loss_at_start(seen: Seen, classes: int | None = None) -> Check:
    """Check the cross-entropy of the model before the update against that of a uniform guess, ln(classes).

    Of several cross-entropies, the one that is furthest above counts. ``classes``: the number of classes of a loss that
    is computed without torch's cross-entropy.
    """
    own = [(float(call.losses().mean()), call.classes, call) for call in seen.entropies if call.classes > 1]
    if not own and classes is not None and seen.loss is not None:
        loss = float(seen.loss.detach())
        return weigh(LOSS, loss - math.log(classes), _said(loss, classes), remedy=_remedy(math.nan))
    if not own:
        return not_checked(LOSS, f"{NONE}: if it is a cross-entropy, give classes=, its number of classes")
    loss, count, call = max(own, key=lambda one: one[0] - math.log(one[1]))
    spread = float(call.logits[call.counted].double().std(dim=1).mean())
    return weigh(LOSS, loss - math.log(count), _said(loss, count), remedy=_remedy(spread))


def _said(loss: float, classes: int) -> str:
    uniform = math.log(classes)
    known = "; it has been trained, or its labels leak" if loss < KNOWS * uniform else ""
    return f"{loss:.4g} nats, where a uniform guess among {classes} classes costs {uniform:.4g}{known}"


def _remedy(spread: float) -> str:
    told = "" if math.isnan(spread) else f": logits of one prediction have a standard deviation of {spread:.3g}"
    return f"initialise the output layer (or the embedding that is tied to it) smaller{told}; 1 or less is usual"


def output_change(before: CrossEntropy | None, after: CrossEntropy | None, lower: str = "") -> Check:
    """Check KL(before || after) of the predicted distributions, mean over predictions that count; ``lower``: the advice
    with the rate at which it would be within its bound."""
    if before is None:
        return not_checked(CHANGE, f"{NONE}, so the predictions of classes are not known")
    found = divergence(before, after)
    if math.isnan(found):
        return not_checked(CHANGE, "the predictions after the update have another shape, or are not finite")
    return weigh(CHANGE, found, f"one update changes the predictions by {found:.3g} nats", remedy=lower)


def divergence(before: CrossEntropy, after: CrossEntropy | None) -> float:
    """Return KL(before || after) [nats], the mean over predictions that count; NaN if the shapes of the predictions
    differ."""
    if after is None or before.logits.shape != after.logits.shape:
        return math.nan
    each = []
    for rows in before.rows():
        p, q = (torch.log_softmax(one.logits[rows].double(), dim=1) for one in (before, after))
        each.append((p.exp() * (p - q)).sum(dim=1))
    return float(torch.cat(each)[before.counted].mean())
