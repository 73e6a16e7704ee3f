"""The share of unknown symbols (``<unk>``) in the texts of a run: recorded, warned of, and refused if it is large."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import numpy as np

from ..config import DataConfig
from ..errors import InputError
from .corpus import PAD, UNK

log = logging.getLogger(__name__)

WARNED = 0.01
REFUSED = 0.2  # of labels: a model that reads nothing and answers <unk> everywhere is right in as many

Shares = Mapping[str, float | None]  # "train", "held_out", "validation" -> share; None: the set is empty


def share(tokens: np.ndarray) -> float | None:
    """Return the share of unknown symbols among tokens of any shape, PAD not counted; None if there are no tokens."""
    real = np.count_nonzero(tokens != PAD)
    return float(np.count_nonzero(tokens == UNK) / real) if real else None


def check(labels: Shares, source: Shares | None, config: DataConfig) -> None:
    """Log a warning if a text has more than ``WARNED`` unknown symbols. Raises InputError if more than ``REFUSED`` of
    the labels that a run is judged on are unknown.

    ``source``: the shares of the source side, if the model reads it.
    """
    found = [*_over(labels, "labels", config), *([] if source is None else _over(source, "source tokens", config))]
    if not found:
        return
    worst = max([labels] if source is None else [labels, source], key=_judged)
    if config.valid is not None and _judged(worst) > 2 * (worst["train"] or 0):
        advice = f"check that {config.valid} has the language and the script of {config.source}"
    else:
        advice = f"raise data.vocab_size (now {config.vocab_size}), which then has room for more characters"
    said = f"{' and '.join(found)} are unknown symbols (<unk>), whose characters the vocabulary lacks"
    if _judged(labels) > REFUSED:
        raise InputError(f"{said}, so the loss says little of the text: {advice}.")
    log.warning("%s: %s.", said, advice)


def _judged(shares: Shares) -> float:
    """Return the larger share of the two sets on which a run is judged."""
    return max(shares["held_out"] or 0, shares["validation"] or 0)


def _over(shares: Shares, noun: str, config: DataConfig) -> Iterator[str]:
    judged = f"the validation text {config.valid}" if config.valid else f"the held-out part of {config.source}"
    for each, text in (((shares["train"] or 0), f"the training text {config.source}"), (_judged(shares), judged)):
        if each > WARNED:
            yield f"{each:.1%} of the {noun} of {text}"
