"""The evaluations of a run so far, and its verdict by the rules of :mod:`stabilitylab.verdict`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..config import Config
from ..data import Dataset, Unigram
from ..verdict import Baseline, Evaluation, Verdict, divergence, judge


class Judging:
    """The record of each evaluation of the held-out batch, and of the first number that was not finite: (row,
    sentence)."""

    def __init__(self, config: Config, dataset: Dataset) -> None:
        self._train, self._dataset = config.train, dataset
        self.evaluations: list[Evaluation] = []
        self.non_finite: tuple[int, str] | None = None

    def see(self, row: int, metrics: Mapping[str, float | None]) -> None:
        for name in ("loss", "grad_norm_total"):
            value = metrics.get(name)
            if self.non_finite is None and value is not None and not math.isfinite(value):
                self.non_finite = (row, f"{name} is {value} at step {row}")
        nll, share = metrics.get("held_out_nll"), metrics.get("held_out_accuracy")
        if nll is not None and share is not None:
            self.evaluations.append(Evaluation(row, nll, share))

    @property
    def ends_the_run(self) -> bool:
        """True if the run has diverged and ``train.on_divergence`` ends it; False before the first evaluation."""
        if self._train.on_divergence == "continue" or not self.evaluations:
            return False
        return bool(self.non_finite or divergence(self.evaluations, self._train.steps, self._train.steps))

    def verdict(self, row: int, after: Mapping[str, float | None]) -> Verdict:
        """Return the verdict on the run. ``after``: the row after training, number ``row``."""
        data, last = self._dataset, None
        if data.validation_unigram is not None:
            values = (after.get(f"validation_{name}") for name in ("nll", "accuracy"))
            evaluation = Evaluation(row, *(math.nan if value is None else value for value in values))
            last = evaluation, _baseline(data.validation_unigram), data.validation_sentences
        return judge(
            self.evaluations,
            _baseline(data.unigram),
            steps=self._train.steps,
            non_finite=self.non_finite,
            validation=last,
            source_worth=after.get("source_worth"),
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "evaluations": [(e.step, e.nll, e.accuracy) for e in self.evaluations],
            "non_finite": self.non_finite,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evaluations = [Evaluation(*values) for values in state["evaluations"]]
        self.non_finite = state["non_finite"]


def _baseline(unigram: Unigram) -> Baseline:
    return Baseline(unigram.cross_entropy, unigram.accuracy)
