#!/usr/bin/env python
"""Makes the searches, the rivals' choices and the truths of the validation, a line of a ledger after each.

    python results/lr-find/make.py [MODEL ...] [--out results/lr-find] [--runs runs/lr-find-validation] [--stage ...]

A stopped call goes on where it was: what stands in a ledger is not made again, and a search resumes in its folder. A
model's stages follow each other, since the rates of its truth depend on its search and its rivals. Hyperband needs
optuna (``pip install optuna``); without it that rival is left out, and said. About 8 core-hours.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))

import models
import numpy as np
import torch
from shared import Lines

from stabilitylab.lr_find import RateAnswer, RatePlan, RateSubject, search_rates
from stabilitylab.probes import evaluation

HERE = Path(__file__).resolve().parent
STAGES = ("search", "rivals", "truth")
SEEDS, TRUE_SEEDS = (0, 1, 2), (11, 12, 13)
DELTA, DELTA_SHARE = 0.05, 0.1  # nats, and of the fall of the loss: those of README and of the search
COARSE = 150  # updates of the cheapest rival
COUNT, LEAST, MOST = 9, math.sqrt(2), 2.0  # rates of a truth, and the factor between neighbours
WARMUPS_OF = ("gpt2", "postln")  # of which the least warm-up is checked
WARMUPS = (0, 10, 40, 60)
RANGE = (1e-6, 1.0)  # of range tests and of Hyperband
SEARCHES = (
    *("model", "outcome", "best", "best_low", "best_high", "safe", "safe_low", "safe_high", "warmup", "warmup_below"),
    *("delta", "updates", "horizon", "cost", "cost_failed", "cost_seeds", "start", "first_rung", "notes", "machine"),
)
RIVALS = ("model", "rival", "rate", "cost", "why", "machine")
TRUTHS = ("model", "kind", "rate", "seed", "warmup", "loss", "start", "failed", "machine")


def machine() -> str:
    """What may change a digit: torch, instruction set, Python (whose library is the text)."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {capability}, python {platform.python_version()}, text {models.text()[2]}"


def add(ledger: Lines, **row: Any) -> None:
    """Add a line with the machine that made it."""
    ledger.add({"machine": machine(), **row})


def searched(case: Any, horizon: int, runs: Path, ledger: Lines) -> None:
    """Search the rates of a model as a user does."""
    subject = case.subject(SEEDS, horizon)
    plan = RatePlan(subject.rate, horizon, SEEDS, subject.warmup)
    out = runs / case.name
    found = search_rates(subject, plan, out, resume=out.exists())
    if found.signal is not None:
        raise KeyboardInterrupt
    add(ledger, **line_of(case.name, found, out))


def line_of(name: str, found: RateAnswer, out: Path) -> dict[str, Any]:
    """A line of searches.csv."""
    import json

    lines = [json.loads(line) for line in (out / "trials.jsonl").read_text(encoding="utf-8").splitlines()]
    first = found.losses[min(found.losses)] if found.losses else {}
    best, safe, warmup = found.best, found.safe, found.warmup
    return {
        "model": name,
        "outcome": found.outcome,
        "best": best and best.value,
        "best_low": best and best.low,
        "best_high": best and best.high,
        "safe": safe and safe.value,
        "safe_low": safe and safe.low,
        "safe_high": safe and safe.high,
        "warmup": warmup and warmup.value,
        "warmup_below": warmup and warmup.low,
        "delta": found.delta,
        "updates": found.updates,
        "horizon": found.horizon,
        "cost": found.cost,
        "cost_failed": sum(one["ran"] for one in lines if one["failed"]),
        "cost_seeds": sum(one["ran"] for one in lines if one["seed"] != SEEDS[0]),
        "start": found.start,
        "first_rung": " ".join(f"{rate:g}:{loss:.6g}" for rate, loss in first.items()),
        "notes": " ".join(found.notes),
    }


def run(
    subject: RateSubject,
    rate: float,
    seed: int,
    updates: int,
    *,
    warmup: int | None = None,
    rate_at: Callable[[int], float] | None = None,
    seen: Callable[[int, float], bool] | None = None,
    rungs: Sequence[int] = (),
    ends: Callable[[int, float], bool] = lambda updates, loss: False,
) -> tuple[float, float, str]:
    """Train, apart from the package's trials; return the held-out loss at the end and at the start, and how it failed.

    ``rate_at``: other rates than those of the schedule. ``seen(t, loss)``: gets each training loss; True ends the run.
    ``ends(updates, loss)``: gets the held-out loss after each of ``rungs``; True ends the run.
    """
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    made = subject.make(seed)
    torch.manual_seed(seed)
    model = made.model.train()
    w = (subject.warmup or 0) if warmup is None else warmup
    start = held_out(subject, model, 0)
    course = [(0, start)]
    every = max(1, updates // 100)
    for t in range(updates):
        subject.enter(model, t)
        made.set_rate(subject.rate_at(rate, t, w) if rate_at is None else rate_at(t))
        made.zero_grad()
        total = 0.0
        for loss in subject.losses(model, t, seed):
            loss.backward()
            total += float(loss.detach())
        if not math.isfinite(total):
            return math.inf, start, f"the training loss is {total} at update {t}"
        if subject.clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), subject.clipping)
        for optimizer in made.optimizers:
            optimizer.step()
        if seen is not None and seen(t, total):
            break
        if (t + 1) % every == 0 or t + 1 == updates or t + 1 in rungs:
            course.append((t + 1, held_out(subject, model, t + 1)))
            if not math.isfinite(course[-1][1]):
                return math.inf, start, f"the held-out loss is {course[-1][1]} after {t + 1} updates"
        if t + 1 in rungs and ends(*course[-1]):
            break
    return course[-1][1], start, fault(course)


def held_out(subject: RateSubject, model: torch.nn.Module, t: int) -> float:
    assert subject.held_out is not None
    subject.enter(model, t)
    with evaluation(model):
        return float(np.mean(list(subject.held_out(model))))


def fault(course: Sequence[tuple[int, float]]) -> str:
    """The rule of README for a run that has ended: above its start, or risen and staying up; "" if neither."""
    start, (updates, end) = course[0][1], course[-1]
    if end > start:
        return f"the loss ends at {end:.4g}, above its start"
    lowest = min(loss for _, loss in course)
    margin = max(0.5 * (start - lowest), min(DELTA, DELTA_SHARE * (start - lowest)))
    tail = [loss for t, loss in course if t >= 0.9 * updates]
    tail = tail if len(tail) >= 3 else [loss for _, loss in course[-3:]]
    return "the loss rose and stays up" if all(loss > lowest + margin for loss in tail) else ""


def rivals(case: Any, horizon: int, found: dict[str, str], ledger: Lines) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the rivals that the ledger lacks, each with the call that makes its line."""
    have = {row["rival"] for row in ledger.rows() if row["model"] == case.name}
    subject = case.subject(SEEDS, horizon)

    def best_of_coarse() -> dict[str, Any]:
        grid = [one.split(":") for one in found["first_rung"].split()]
        losses = {float(rate): float(loss) for rate, loss in grid}
        finite = {rate: loss for rate, loss in losses.items() if math.isfinite(loss)}
        return {"rate": min(finite, key=lambda rate: finite[rate]), "cost": len(losses) * min(COARSE, horizon)}

    def constant() -> dict[str, Any]:
        return {"rate": 3e-4 * models.OF_ADAMW.get(case.name, 1.0), "cost": 0}

    def ranged() -> dict[str, Any]:
        losses = range_test(subject, min(COARSE, horizon))
        return {"rate": steepest(losses), "cost": len(losses), "why": " ".join(f"{one:.6g}" for one in losses)}

    def valley() -> dict[str, Any]:
        kept = [row for row in ledger.rows() if (row["model"], row["rival"]) == (case.name, "range test, steepest")]
        return {"rate": fall_of(list(map(float, kept[0]["why"].split()))), "cost": kept[0]["cost"]}

    calls: dict[str, Callable[[], dict[str, Any]]] = {
        "best of 150": best_of_coarse,
        "3e-4": constant,
        "range test, steepest": ranged,
        "range test, valley": valley,
        "Hyperband": lambda: hyperband(subject, horizon, int(found["cost"])),
    }
    for name, call in calls.items():
        if name not in have:
            yield name, call


def range_test(subject: RateSubject, updates: int) -> list[float]:
    """Training losses of a run at rates that grow exponentially over RANGE; it ends at a loss four times the least."""
    losses: list[float] = []

    def seen(t: int, loss: float) -> bool:
        losses.append(loss)
        return loss > 4 * min(losses)

    run(subject, RANGE[0], SEEDS[0], updates, rate_at=lambda t: range_rate(t, updates), seen=seen)
    return losses


def range_rate(t: int, updates: int) -> float:
    low, high = RANGE
    return low * (high / low) ** (t / max(1, updates - 1))


def smooth(losses: Sequence[float], beta: float = 0.98) -> np.ndarray:
    """The exponential mean, corrected for its start, of Lightning's and fastai's range tests."""
    mean, found = 0.0, []
    for number, loss in enumerate(losses, start=1):
        mean = beta * mean + (1 - beta) * loss
        found.append(mean / (1 - beta**number))
    return np.array(found)


def steepest(losses: Sequence[float], updates: int = COARSE) -> float:
    """The rate of the steepest fall of the smoothed loss, without the first ten updates and the last one."""
    own = smooth(losses)[10:-1]
    at = 10 + int(np.gradient(own).argmin()) if len(own) > 1 else 0
    return range_rate(at, updates)


def fall_of(losses: Sequence[float], updates: int = COARSE) -> float:
    """The rate two thirds along the longest falling subsequence of the smoothed loss (fastai's ``valley``)."""
    own = smooth(losses)
    length, end = np.ones(len(own), int), 0
    for i in range(len(own)):
        for j in range(i):
            if own[j] > own[i]:
                length[i] = max(length[i], length[j] + 1)
    end = int(length.argmax())
    begin = end - int(length[end]) + 1
    third = (end - begin) / 3
    return range_rate(begin + int(third) + int(third / 2), updates)


def hyperband(subject: RateSubject, horizon: int, budget: int) -> dict[str, Any]:
    """The best rate of optuna's Hyperband within the updates of the search. Raises ImportError without optuna."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rungs = sorted({min(horizon, COARSE * 3**power) for power in range(8)})
    reached: dict[float, tuple[int, float]] = {}  # rate -> updates, the loss after them
    spent = 0

    def objective(trial: Any) -> float:
        nonlocal spent
        rate = trial.suggest_float("rate", *RANGE, log=True)
        before = spent

        def ends(updates: int, loss: float) -> bool:
            nonlocal spent
            spent = before + updates
            reached[rate] = updates, loss
            trial.report(loss, updates)
            return spent >= budget or (updates < horizon and trial.should_prune())

        loss, start, failed = run(subject, rate, SEEDS[0], horizon, rungs=rungs, ends=ends)
        if failed:
            reached[rate] = horizon, start + 1.0
            spent = max(spent, before + rungs[0])
            return start + 1.0
        if spent >= budget:
            trial.study.stop()
        if reached[rate][0] < horizon:
            raise optuna.TrialPruned
        return loss

    pruner = optuna.pruners.HyperbandPruner(min_resource=rungs[0], max_resource=horizon, reduction_factor=3)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), pruner=pruner)
    study.optimize(objective, n_trials=10_000)
    return {"rate": best_reached(reached), "cost": spent}


def best_reached(reached: dict[float, tuple[int, float]]) -> float:
    """The rate of the lowest loss among those that were trained longest."""
    longest = max(updates for updates, _ in reached.values())
    return min((loss, rate) for rate, (updates, loss) in reached.items() if updates == longest)[1]


def true_rates(named: Sequence[float], own: Sequence[float]) -> list[float]:
    """The rates of a truth: nine, evenly spaced in their logarithm (README, "The truth"), and what lies outside.

    ``own``: the rates that the search names; ``named``: those of the rivals.
    """
    low, high = min([*named, *own]) / 2, max([*named, *own]) * 2
    factor = (high / low) ** (1 / (COUNT - 1))
    if factor <= MOST:
        factor = max(factor, LEAST)
        centre = math.sqrt(low * high)
    else:
        factor, centre = MOST, math.sqrt(min(own) * max(own))
    rates = [centre * factor ** (place - COUNT // 2) for place in range(COUNT)]
    reach = (rates[0] * 0.999, rates[-1] * 1.001)
    outside = sorted({rate for rate in [*named, *own] if not reach[0] <= rate <= reach[1]})
    return [float(f"{rate:.4g}") for rate in [*rates, *outside]]


def truths(case: Any, horizon: int, found: dict[str, str], named: Sequence[float], ledger: Lines) -> None:
    """Run the truth of a model: its rates, the largest safe rate itself, and warm-ups where they are checked."""
    have = {
        (row["kind"], float(row["rate"]), int(row["seed"]), int(row["warmup"]))
        for row in ledger.rows()
        if row["model"] == case.name
    }
    subject = case.subject(TRUE_SEEDS, horizon)
    planned = subject.warmup or 0
    own = [float(found["best"]), float(found["safe"])]
    cells = [("grid", rate, planned) for rate in true_rates(named, own)]
    cells += [("safe", own[1], planned)]
    if case.name in WARMUPS_OF:
        cells += [("warmup", own[1], warmup) for warmup in WARMUPS if warmup <= planned]
    for kind, rate, warmup in cells:
        for seed in TRUE_SEEDS:
            if (kind, rate, seed, warmup) not in have:
                loss, start, failed = run(subject, rate, seed, horizon, warmup=warmup)
                add(
                    ledger, model=case.name, kind=kind, rate=rate, seed=seed, warmup=warmup, loss=loss, start=start,
                    failed=failed,
                )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names; none: all twelve")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the ledgers")
    parser.add_argument("--runs", type=Path, default=Path("runs/lr-find-validation"), help="folder of the searches")
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--horizon", type=int, default=models.HORIZON, help="less only to try the script")
    given = parser.parse_args(arguments)
    if unknown := set(given.models) - {*models.CASES}:
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(models.CASES)}")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    searches = Lines(given.out / "searches.csv", SEARCHES)
    chosen, true = Lines(given.out / "rivals.csv", RIVALS), Lines(given.out / "truths.csv", TRUTHS)
    for name in given.models or models.CASES:
        case = models.CASES[name]
        if "search" in given.stage and name not in {row["model"] for row in searches.rows()}:
            print(f"{name}: searching", file=sys.stderr)
            searched(case, given.horizon, given.runs, searches)
        found = next((row for row in searches.rows() if row["model"] == name), None)
        if found is None or not found["best"]:
            print(f"{name}: no search with a best rate, so that nothing else is made", file=sys.stderr)
            continue
        if "rivals" in given.stage:
            for rival, call in rivals(case, given.horizon, found, chosen):
                print(f"{name}: {rival}", file=sys.stderr)
                try:
                    add(chosen, model=name, rival=rival, **call())
                except ImportError as error:
                    print(f"{name}: {rival} is left out ({error}): pip install optuna", file=sys.stderr)
        if "truth" in given.stage:
            print(f"{name}: truth", file=sys.stderr)
            named = [float(row["rate"]) for row in chosen.rows() if row["model"] == name]
            truths(case, given.horizon, found, named, true)
    return 0


if __name__ == "__main__":
    sys.exit(main())
