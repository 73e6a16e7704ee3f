"""The unigram baseline, which a model must beat to have learnt anything from its input."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .corpus import PAD


@dataclass(frozen=True)
class Unigram:
    """The score of a model that ignores its input and predicts the training label frequencies, on held-out labels.

    p(v) = (count(v) + 1) / (labels + vocabulary). This is Laplace's rule: an unseen label costs a finite amount.
    ``cross_entropy`` is at most ln(vocabulary), that of a uniform guess, however many labels are unseen.
    ``accuracy`` is the accuracy of always answering the most frequent label.
    """

    cross_entropy: float  # nats per label
    accuracy: float

    @classmethod
    def of(cls, training: np.ndarray, held_out: np.ndarray, vocab: int) -> Unigram:
        """Count label ids of any shape and score them; PAD in ``training`` is not a label."""
        counts = np.bincount(training.ravel(), minlength=vocab)
        counts[PAD] = 0
        log_p = np.log((counts + 1) / (counts.sum() + vocab))
        cross_entropy = min(float(-log_p[held_out].mean()), math.log(vocab))
        return cls(cross_entropy, float((held_out == counts.argmax()).mean()))
