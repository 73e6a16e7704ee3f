"""Measures the baseline that a model must beat to have learnt anything from its input."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .corpus import PAD


@dataclass(frozen=True)
class Unigram:
    """Ignores the input: predicts the training set's label frequencies, and is scored on the held-out labels.

    p(v) = (count(v) + 1) / (labels + vocabulary), Laplace's rule, so that an unseen label costs a finite amount;
    accuracy is that of always answering the most frequent label.
    """

    cross_entropy: float  # nats per label
    accuracy: float

    @classmethod
    def of(cls, training: np.ndarray, held_out: np.ndarray, vocab: int) -> Unigram:
        """Counts label ids of any shape; PAD in ``training`` is no label."""
        counts = counted(training, vocab)
        log_p = np.log((counts + 1) / (counts.sum() + vocab))
        return cls(float(-log_p[held_out].mean()), float((held_out == counts.argmax()).mean()))


def counted(training: np.ndarray, vocab: int) -> np.ndarray:
    """How often each label occurs; PAD is none."""
    counts = np.bincount(training.ravel(), minlength=vocab)
    counts[PAD] = 0
    return counts


def entropy(training: np.ndarray, vocab: int) -> float:
    """Of the label frequencies [nats]: what tells one training text from another, whatever is held out beside it."""
    counts = counted(training, vocab)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
