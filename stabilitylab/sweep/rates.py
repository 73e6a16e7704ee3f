"""The choice of the learning rate of a configuration by runs of a sweep: ``sweep --choose-rate``."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import InputError
from ..experiments import Experiment
from ..lr_find import Choice, RateResult, RateTrial, Rungs, choose
from ..store.layout import checkpoints
from ..verdict import READS_NATS
from .cells import Cell, spread
from .jobs import Job, plan
from .ledger import Ledger
from .runner import Outcome

TRIAL = ("lr", "updates", "seed", "loss", "source_worth", "eligible", "chosen")
FAILED = ("diverged", "stuck")  # verdicts on a model without a source that make its rate ineligible
Runner = Callable[[Sequence[Job]], Outcome]


class Unfinished(Exception):
    """A search that was stopped, or whose runs failed, with the ``outcome`` of the runs; the same call goes on."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.sentence())
        self.outcome = outcome


@dataclass(frozen=True)
class SweptTrainer:
    """Runs trials as runs of a sweep, each a directory below ``out`` and a line of ``ledger``.

    ``experiment``: the run without its rate, seed and updates; ``horizon``: the updates of its schedule. A longer trial
    continues from the checkpoint of the shorter one if that lies below ``out``, and begins anew elsewhere.
    """

    experiment: Experiment
    horizon: int
    out: Path
    ledger: Ledger
    runner: Runner

    def trial(self, trial: RateTrial) -> Experiment:
        """Return the run of ``trial``. Its name does not say its updates, since a longer trial continues it."""
        own = {"lr": trial.rate, "seed": trial.seed, "steps": trial.updates, "horizon": self.horizon}
        config = self.experiment.config.changed(train={**own, "final_checkpoint": True}, data={"seed": trial.seed})
        return Experiment(f"{self.experiment.name}-lr{trial.rate:g}-s{trial.seed}", config)

    def run(self, trials: Sequence[RateTrial]) -> Mapping[RateTrial, RateResult]:
        """Run the trials that the ledger lacks. Raises Unfinished if the runs were stopped, or if one of them
        failed."""
        wanted = {trial: self.trial(trial) for trial in trials}
        missing = [experiment for experiment in wanted.values() if self.ledger.find(experiment.config) is None]
        if missing:
            outcome = self.runner(plan(missing, self.out, self.ledger))
            if outcome.exit_code:
                raise Unfinished(outcome)
        return {trial: self._result(experiment) for trial, experiment in wanted.items()}

    def _result(self, experiment: Experiment) -> RateResult:
        """Return the result of a run that has ended. Raises InputError if its line has the key of other data."""
        if (cell := self.ledger.find(experiment.config)) is None:
            raise InputError(
                f"the data of {self.out / experiment.name} have changed since it started, so that {self.ledger.path} "
                "has no line of the run: restore them, or choose another --out."
            )
        return result_of(cell)

    def discard(self) -> None:
        """Remove the checkpoints of the trials, once the rate is chosen: the search alone needed them."""
        for path in self.out.glob(f"{self.experiment.name}-lr*"):
            for checkpoint in checkpoints(path).values():
                checkpoint.unlink(missing_ok=True)


def result_of(cell: Cell) -> RateResult:
    """Read the result of a trial from its line in a ledger.

    The loss is that of the whole validation set, or of the held-out batch if there is no such set; inf if the run
    diverged. An encoder-decoder is eligible if its source is worth at least .1 nats a token, another model if its state
    is neither diverged nor stuck.
    """
    line = spread(cell)
    losses = (line.get(f"metrics.{name}") for name in ("validation_nll", "held_out_nll"))
    loss = next((float(value) for value in losses if value is not None), math.nan)
    worth = line.get("metrics.source_worth")
    diverged = line["verdict"] == "diverged" or not math.isfinite(loss)
    if worth is None:
        return RateResult(math.inf if diverged else loss, not diverged and line["verdict"] not in FAILED)
    reads = not diverged and float(worth) >= READS_NATS
    return RateResult(math.inf if diverged else loss, reads, float(worth))


def choose_rate(trainer: SweptTrainer, rungs: Rungs) -> Choice:
    """Choose the rate of one configuration (:func:`stabilitylab.lr_find.choose`); finished trials are not run again."""
    return choose(replace(rungs, last=trainer.horizon), trainer)


def trials(choice: Choice) -> Iterator[tuple[str, ...]]:
    """Yield the table of a choice: a line for every trial and its result; ``chosen`` marks those of the rate."""
    for trial, result in sorted(choice.results.items(), key=lambda item: (item[0].updates, item[0])):
        worth = "" if result.source_worth is None else f"{result.source_worth:.6g}"
        ends = f"{trial.rate:g}", str(trial.updates), str(trial.seed), f"{result.loss:.6f}", worth
        yield *ends, str(int(result.eligible)), str(int(trial.rate == choice.rate))


def write_table(path: Path, choices: Mapping[str, Choice]) -> None:
    """Write the table of all choices as CSV: it is part of the result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("name", *TRIAL))
        for name, choice in choices.items():
            writer.writerows((name, *line) for line in trials(choice))
