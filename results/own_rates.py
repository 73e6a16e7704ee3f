"""Compares arms at their own learning rates: a search of each arm's rate on the schedule that is run, the judged seeds
at that rate, and the answers, paired by seed. Resumable: what stands in a ledger is not made again."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from shared import Lines, metrics_of, rows_of

from stabilitylab.config import merge, resolve
from stabilitylab.experiments import Experiment
from stabilitylab.reports.statistics import Interval, holm, t_interval
from stabilitylab.sweep import Job, Ledger, Outcome, Rungs, SweptTrainer, choose_rate, plan, run, write_table

Settings = Mapping[str, Any]
COLUMNS = ("arm", "layers", "lr", "eligible", "notes")
FAILED = ("diverged", "stuck")
# LLaMA's design; Xavier's weights of gain 1 in each matrix, unless an arm says otherwise; an embedding of mean square 1
DECODERS: Settings = {
    "model": {"design": "llama", "init": "arch-1", "embedding_scale": "sqrt(d)", "d_model": 64, "heads": 4},
    "data": {"sentences": 8, "max_length": 64},
    "train": {"schedule": "linear", "beta1": 0.9, "clip_norm": 1.0, "label_smoothing": 0.0},
    "probes": {"names": ("none",)},
}


@dataclass(frozen=True)
class Study:
    """The settings that all runs share, and the arms: name -> model settings, by the number of layers."""

    shared: Settings
    arms: Callable[[int], Mapping[str, Settings]]
    layers: Sequence[int]
    updates: int
    seeds: Sequence[int] = (3, 4, 5, 6, 7, 8)  # that are judged
    rates: Sequence[float] = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3)  # the first grid of a search
    search_seeds: Sequence[int] = (100,)
    confirming: Sequence[int] = (101, 102)
    first: float = 0.4  # share of the updates after which a search ranks its rates
    margin: float = 0.05  # nats/token, within which two arms are alike

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


def at_once(workers: int) -> Callable[[Sequence[Job]], Outcome]:
    """Return a runner of jobs, ``workers`` at a time, so that each finished one stands in the ledger; it ends the
    process after those among which one fails, or if asked to stop."""

    def run_all(jobs: Sequence[Job]) -> Outcome:
        done: list[Job] = []
        for first in range(0, len(jobs), workers):
            some = jobs[first : first + workers]
            outcome = run(some, workers=workers)
            print(f"{', '.join(job.name for job in some)}: {outcome.sentence()}", flush=True)
            done += outcome.jobs
            if outcome.exit_code:
                raise SystemExit(outcome.exit_code)
        return Outcome(done)

    return run_all


def search(study: Study, arm: str, layers: int, data: Settings, runs: Path, out: Path, workers: int = 1) -> None:
    """Search the rate of an arm, unless ``rates.csv`` has it; ``searches/`` gets every trial."""
    if (arm, layers) in chosen(out):
        return
    light = {**data, "train": {**data.get("train", {}), "evaluations": 0}}
    start = study.experiment(arm, layers, study.rates[0], study.search_seeds[0], light)
    name = f"{arm}-{layers}"
    trainer = SweptTrainer(
        Experiment(name, start.config), study.updates, runs / "search", Ledger(out / "search.csv"), at_once(workers)
    )
    choice = choose_rate(trainer, study.rungs)
    trainer.discard()
    write_table(out / "searches" / f"{name}.csv", {name: choice})
    rate = choice.lowest if choice.rate is None else choice.rate
    found = (arm, layers, f"{rate:g}", int(choice.rate is not None), " ".join(choice.notes))
    Lines(out / "rates.csv", COLUMNS).add(found)


def chosen(out: Path) -> dict[tuple[str, int], float]:
    """Return the rates that searches chose: (arm, layers) -> rate."""
    return {(row["arm"], int(row["layers"])): float(row["lr"]) for row in rows_of(out / "rates.csv")}


def planned(
    study: Study, layers: int, data: Settings, out: Path, arms: Sequence[str] = ()
) -> Iterator[tuple[str, int, Experiment]]:
    """Yield (arm, seed, run) of the comparison, seed by seed, so that whatever is finished is paired; of ``arms``
    alone, if some are named."""
    rates = chosen(out)
    for seed in study.seeds:
        for arm in arms or study.arms(layers):
            if (arm, layers) not in rates:
                raise SystemExit(f"{arm} has no rate at {layers} layers yet: run the part `search` first.")
            yield arm, seed, study.experiment(arm, layers, rates[arm, layers], seed, data)


def train(experiments: Sequence[Experiment], runs: Path, ledger: Ledger, workers: int = 1) -> None:
    """Train what the ledger lacks, ``workers`` runs at a time."""
    at_once(workers)([job for job in plan(experiments, runs, ledger) if ledger.find(job.experiment.config) is None])


@dataclass(frozen=True)
class End:
    """The end of a run: its loss on the judged text [nats/token], whether it diverged or got stuck, and its verdict."""

    loss: float
    failed: bool
    verdict: str = ""


def end_of(ledger: Ledger, experiment: Experiment) -> End | None:
    """Return the end of a run from its line in the ledger; None if it is not made."""
    line = ledger.find(experiment.config)
    return None if line is None else end_of_line(line)


def end_of_line(line: Mapping[str, str]) -> End:
    """Return the end that a line of a ledger tells."""
    metrics = metrics_of(line)
    loss = float(metrics.get("validation_nll", metrics.get("held_out_nll", "nan")))
    return End(loss, line["verdict"] in FAILED or not math.isfinite(loss), line["verdict"])


Ends = Mapping[tuple[str, int], Mapping[int, End]]  # (arm, layers) -> seed -> end


@dataclass(frozen=True)
class Difference:
    """The loss of one arm less that of another, paired by seed."""

    first: Mapping[int, End]
    second: Mapping[int, End]
    seeds: Sequence[int]
    margin: float

    @property
    def losses(self) -> tuple[list[float], list[float]]:
        """The losses of both arms with the seeds of which neither run failed."""
        both = [s for s in self.seeds if s in self.first and s in self.second]
        fine = [s for s in both if not (self.first[s].failed or self.second[s].failed)]
        return [self.first[s].loss for s in fine], [self.second[s].loss for s in fine]

    @property
    def interval(self) -> Interval:
        return t_interval(np.subtract(*self.losses))

    @property
    def p(self) -> float:
        """The p-value of a difference from 0; 1 unless every seed has a pair of which neither run failed."""
        first, second = self.losses
        if len(first) < len(self.seeds):
            return 1.0
        if np.ptp(own := np.subtract(first, second)) == 0:
            return 0.0 if own.any() else 1.0
        return float(stats.ttest_rel(first, second).pvalue)

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


def ends_of(study: Study, data: Settings, out: Path) -> dict[tuple[str, int], dict[int, End]]:
    """Return the ends of the judged runs that the ledger has: (arm, layers) -> seed -> end. An arm without a rate has
    none yet."""
    ledger, found = Ledger(out / "ledger.csv"), {}
    for (arm, layers), rate in chosen(out).items():
        for seed in study.seeds:
            if (end := end_of(ledger, study.experiment(arm, layers, rate, seed, data))) is not None:
                found.setdefault((arm, layers), {})[seed] = end
    return found


def difference(study: Study, ends: Ends, first: str, second: str, layers: int) -> Difference:
    """Return the difference of two arms at one depth."""
    return Difference(ends.get((first, layers), {}), ends.get((second, layers), {}), study.seeds, study.margin)


@dataclass(frozen=True)
class Answer:
    """The answer to a question: the loss of ``first`` less that of ``second`` at one depth.

    ``interval``: over the seeds of which neither run failed. ``p``: with Holm's correction over all questions.
    """

    first: str
    second: str
    layers: int
    word: str
    interval: Interval
    p: float


def answered(study: Study, ends: Ends, questions: Sequence[tuple[str, str, int]]) -> list[Answer]:
    """Return the answers to ``questions`` (first arm, second arm, layers). Holm's correction is over all of them: one
    without all its pairs counts with p = 1, and its numbers are of the pairs that ended well."""
    found = [difference(study, ends, *question) for question in questions]
    corrected = holm([own.p for own in found])
    return [
        Answer(*question, own.word(), own.interval, p)
        for question, own, p in zip(questions, found, corrected, strict=True)
    ]


def answers(study: Study, ends: Ends, questions: Sequence[tuple[str, str, int]]) -> list[str]:
    """Return the answers to ``questions``, a line each, P1 first."""
    lines = []
    for number, one in enumerate(answered(study, ends, questions), 1):
        span = one.interval
        numbers = f"{span.mean:+.3f} [{span.low:+.3f}, {span.high:+.3f}], {span.n} of {len(study.seeds)} seeds, "
        numbers += f"Holm p = {one.p:.2g}"
        lines.append(f"P{number}: {one.first} less {one.second} at {one.layers} layers: {one.word} ({numbers})")
    return lines


def arguments(doc: str | None, out: Path) -> argparse.ArgumentParser:
    """Return the parser of a script of a study: its text, and the folder ``out`` of its tables."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="the text that is learned")
    parser.add_argument("--test", type=Path, required=True, help="the text of the judged loss")
    parser.add_argument("--out", type=Path, default=out, help="folder of the ledgers and tables")
    return parser


def data_of(given: argparse.Namespace) -> Settings:
    """Return the settings of the text that the arguments name, with that of the judged loss."""
    return {"data": {"source": f"text:{given.text}", "valid": str(given.test)}}


def make(
    doc: str | None,
    study: Study,
    out: Path,
    others: Mapping[str, Callable[[Settings], Sequence[Experiment]]] | None = None,
) -> None:
    """Train the parts that the command line names: ``search``, ``judged``, and ``others``, whose runs have no search
    and a ledger of the part's name."""
    others = others or {}
    parser = arguments(doc, out)
    parser.add_argument("parts", nargs="+", choices=("search", "judged", *others))
    parser.add_argument("--valid", type=Path, help="the text by which a search chooses, which is not judged")
    parser.add_argument("--runs", type=Path, default=Path("runs") / out.name)
    parser.add_argument("--layers", type=int, choices=study.layers, help="of search and judged; all unless given")
    parser.add_argument("--arm", action="append", default=[], help="of search and judged; all unless given")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time (default 1)")
    given = parser.parse_args()
    depths = (given.layers,) if given.layers else study.layers
    if unknown := [arm for arm in given.arm if any(arm not in study.arms(layers) for layers in depths)]:
        parser.error(f"no arm {unknown[0]} at these layers: {', '.join(study.arms(depths[-1]))}")
    if "search" in given.parts and given.valid in (None, given.test):
        parser.error("search chooses by another text than the one that is judged: name it with --valid")
    data = data_of(given)
    choosing = merge(data, {"data": {"valid": str(given.valid)}})
    for part in given.parts:
        if part in others:
            train(others[part](data), given.runs / part, Ledger(given.out / f"{part}.csv"), given.workers)
            continue
        for layers in depths:
            if part == "search":
                for arm in given.arm or study.arms(layers):
                    search(study, arm, layers, choosing, given.runs, given.out, given.workers)
            else:
                wanted = [experiment for _, _, experiment in planned(study, layers, data, given.out, given.arm)]
                train(wanted, given.runs / "judged", Ledger(given.out / "ledger.csv"), given.workers)
