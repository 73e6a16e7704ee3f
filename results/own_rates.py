"""Trains arms at their own learning rates: a search of each arm's rate on the schedule that is run, then the judged
seeds at that rate. Resumable: what stands in a ledger is not made again."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from stabilitylab.config import resolve
from stabilitylab.experiments import Experiment
from stabilitylab.reports.statistics import Interval, t_interval
from stabilitylab.sweep import Job, Ledger, Outcome, Rungs, SweptTrainer, choose_rate, plan, run, write_table

Settings = Mapping[str, Any]
COLUMNS = ("arm", "layers", "lr", "eligible", "notes")
FAILED = ("diverged", "stuck")


@dataclass(frozen=True)
class Study:
    """The settings that all runs share, and the arms: name -> model settings, by the number of layers."""

    shared: Settings
    arms: Callable[[int], Mapping[str, Settings]]
    layers: Sequence[int]
    updates: int
    seeds: Sequence[int]  # that are judged
    rates: Sequence[float]  # the first grid of a search
    search_seeds: Sequence[int] = (100, 101)
    confirming: Sequence[int] = (102, 103)
    first: float = 0.4  # share of the updates after which a search ranks its rates

    def experiment(
        self, arm: str, layers: int, rate: float, seed: int, data: Settings, updates: int | None = None
    ) -> Experiment:
        """Return one run. The names of runs say arm, layers, rate and seed."""
        steps = self.updates if updates is None else updates
        own = {
            "model": {**self.arms(layers)[arm]},
            "data": {"seed": seed},
            "train": {"seed": seed, "lr": rate, "steps": steps, "warmup": max(1, round(0.1 * steps))},
        }
        config = resolve(self.shared, data, own, depth=layers)
        return Experiment(f"{arm}-{layers}-lr{rate:g}-s{seed}", config)

    @property
    def rungs(self) -> Rungs:
        return Rungs(
            self.rates, self.search_seeds, max(1, round(self.first * self.updates)), self.updates, self.confirming
        )


def one_by_one(jobs: Sequence[Job]) -> Outcome:
    """Run ``jobs`` one at a time, so that each finished one stands in the ledger; end the process if asked to stop."""
    done: list[Job] = []
    for job in jobs:
        outcome = run([job])
        print(f"{job.name}: {outcome.sentence()}", flush=True)
        done += outcome.jobs
        if outcome.exit_code:
            raise SystemExit(outcome.exit_code)
    return Outcome(done)


def search(study: Study, arm: str, layers: int, data: Settings, runs: Path, out: Path) -> None:
    """Search the rate of an arm, unless ``rates.csv`` has it; ``searches/`` gets every trial."""
    if (arm, layers) in chosen(out):
        return
    light = {**data, "train": {**data.get("train", {}), "evaluations": 0}}
    start = study.experiment(arm, layers, study.rates[0], study.search_seeds[0], light)
    name = f"{arm}-{layers}"
    trainer = SweptTrainer(
        Experiment(name, start.config), study.updates, runs / "search", Ledger(out / "search.csv"), one_by_one
    )
    choice = choose_rate(trainer, study.rungs)
    trainer.discard()
    write_table(out / "searches" / f"{name}.csv", {name: choice})
    rate = choice.lowest if choice.rate is None else choice.rate
    _append(out / "rates.csv", (arm, layers, f"{rate:g}", int(choice.rate is not None), " ".join(choice.notes)))


def chosen(out: Path) -> dict[tuple[str, int], float]:
    """Return the rates that searches chose: (arm, layers) -> rate."""
    path = out / "rates.csv"
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {(row["arm"], int(row["layers"])): float(row["lr"]) for row in csv.DictReader(file)}


def planned(study: Study, layers: int, data: Settings, out: Path) -> Iterator[tuple[str, int, Experiment]]:
    """Yield (arm, seed, run) of the comparison, seed by seed, so that whatever is finished is paired."""
    rates = chosen(out)
    for seed in study.seeds:
        for arm in study.arms(layers):
            if (arm, layers) not in rates:
                raise SystemExit(f"{arm} has no rate at {layers} layers yet: run the part `search` first.")
            yield arm, seed, study.experiment(arm, layers, rates[arm, layers], seed, data)


def train(experiments: Sequence[Experiment], runs: Path, ledger: Ledger) -> None:
    """Train what the ledger lacks."""
    one_by_one([job for job in plan(experiments, runs, ledger) if ledger.find(job.experiment.config) is None])


@dataclass(frozen=True)
class End:
    """The end of a run: its validation loss [nats/token], and whether it diverged or got stuck."""

    loss: float
    failed: bool


def end_of(ledger: Ledger, experiment: Experiment) -> End | None:
    """Return the end of a run from its line in the ledger; None if it is not made."""
    cell = ledger.find(experiment.config)
    if cell is None:
        return None
    metrics = dict(word.split("=", 1) for word in cell["metrics"].split())
    loss = float(metrics.get("validation_nll", metrics.get("held_out_nll", "nan")))
    return End(loss, cell["verdict"] in FAILED or not math.isfinite(loss))


@dataclass(frozen=True)
class Difference:
    """The loss of one arm less that of another, paired by seed."""

    first: Mapping[int, End]
    second: Mapping[int, End]
    seeds: Sequence[int]
    margin: float

    @property
    def interval(self) -> Interval:
        both = [s for s in self.seeds if s in self.first and s in self.second]
        fine = [s for s in both if not (self.first[s].failed or self.second[s].failed)]
        return t_interval([self.first[s].loss - self.second[s].loss for s in fine])

    @property
    def p(self) -> float:
        """The p-value of a difference from 0."""
        values = self.interval
        if values.n < 2 or not math.isfinite(values.low):
            return math.nan
        half = (values.high - values.low) / 2
        if half == 0:
            return 0.0 if values.mean else 1.0
        t = values.mean / (half / stats.t.ppf(0.975, values.n - 1))
        return float(2 * stats.t.sf(abs(t), values.n - 1))

    def word(self) -> str:
        """Return the answer: worse, better, alike, cannot tell, fails, or open."""
        own = [*self.first.values()], [*self.second.values()]
        if any(seed not in side for seed in self.seeds for side in (self.first, self.second)):
            return "open"
        lost = [sum(end.failed for end in side) for side in own]
        if any(lost):
            most = len(self.seeds) / 2
            words = {(True, False): "fails", (False, True): "only the second fails", (True, True): "both fail"}
            return words.get((lost[0] > most, lost[1] > most), "cannot tell")
        return word_of(self.interval, self.margin)


def word_of(found: Interval, margin: float) -> str:
    """Return the word for a difference of losses: "worse" or "better" beyond the margin, "alike" within it."""
    if found.low > margin:
        return "worse"
    if found.high < -margin:
        return "better"
    return "alike" if -margin < found.low and found.high < margin else "cannot tell"


def _append(path: Path, row: Sequence[Any]) -> None:
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        writer.writerow(row)
