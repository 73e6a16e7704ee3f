"""The parts that make numbers; each goes on where it stopped, and stops by itself when its time is up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import protocol3
import studies
from checks import checks
from place import ROOT, Clock, Place, Progress
from rich.console import Console

from stabilitylab import sweep
from stabilitylab.config import Config, validated
from stabilitylab.experiments import Experiment, Recipe, experiments, on_device, one_gpu, protocol
from stabilitylab.store import Run

RUNS, CHOICE = Path("runs"), Path("choice")
FOLDERS = {"deepnet:5": "h200/deepnet-5", "branchnorm:3": "h200/branchnorm-3", "branchnorm:8": "h200/branchnorm-8"}
GRACE = 30.0  # seconds that a run may take for its checkpoint
PILOT_SEED = 102  # of the runs that only tell how long an update takes
PILOT_STEPS = (20, 80)
WORKERS = 4  # runs of figures89 at a time: one starts while others compute
SHARE = 0.85  # of the seconds left, into which all runs of figures89 have to fit
BENCHMARK = 150.0  # seconds that one of them may take
FEWEST, MOST, ROUND = 200, 6000, 100  # updates of figures89
TOGETHER = 3  # times as many runs as go at a time, after which there is a fresh archive

# In the order of their worth. A flag is handed over where the script knows it. Where updates run directly, models are
# not deep: on an H200 a direct update took .05 s at 24 layers and more than a second at 200.
BENCHMARKS: dict[str, dict[str, str]] = {
    "cuda_graphs": {"--depth": "24", "--rounds": "3"},
    "one_card": {},
    "budget": {"--minutes": "1.5"},
    "probe_cost": {"--depth": "48", "--rounds": "8"},
    "compiled_layers": {"--depth": "48", "--rounds": "8"},
    "depth": {"--depths": "12,48,200,500,1000", "--steps": "10", "--minutes": "1.5"},
    "peers": {"--rounds": "12"},
    "shared_gpu": {"--depth": "48", "--counts": "1,8", "--seconds": "6"},
}
TRIALS: dict[str, dict[str, str]] = {"shared_gpu": {"--counts": "1", "--seconds": "0.2", "--depth": "2"}, "absent": {}}


def benchmarks(place: Place, clock: Clock) -> Progress:
    """Each script of benchmarks/ that measures on a GPU, and which of them are not there."""
    wanted = TRIALS if place.smoke else BENCHMARKS
    done = place.state.decided.setdefault("benchmarks", {})
    for name, flags in wanted.items():
        if done.get(name) == "done" or clock.left() < 5:
            continue
        script = ROOT / "benchmarks" / f"{name}.py"
        source = script.read_text(encoding="utf-8") if script.exists() else ""
        if '"--device"' not in source:
            done[name] = "has no --device yet" if source else "is not there yet"
            continue
        known = {"--device": place.device, **flags, "--out": f"benchmarks/{name}"}
        options = [word for flag, value in known.items() if f'"{flag}"' in source for word in (flag, value)]
        limit = clock.within(BENCHMARK)
        code = place.call([place.python, str(script), *options], limit, Path("benchmarks") / f"{name}.txt")
        done[name] = {0: "done", None: "did not end in time"}.get(code, f"failed with exit code {code}")
        place.keep()
    said = "; ".join(f"{name}: {done.get(name, 'not begun')}" for name in wanted)
    if any("failed" in done.get(name, "") for name in wanted):
        return Progress("failed", said)
    over = all(done.get(name, "").endswith(("done", "yet")) for name in wanted)
    return Progress("complete" if over else "partial", said)


def figure5(place: Place, clock: Clock) -> Progress:
    """DeepNet, Figure 5: eight runs at a time, whose kernels leave the GPU idle most of the time."""
    return _made(place, clock, RUNS / FOLDERS["deepnet:5"], wanted(place, "deepnet:5"), 8)


def figure3(place: Place, clock: Clock) -> Progress:
    """BranchNorm, Figure 3, 50L-50L: two at a time, each refused if it needs more than half of the memory."""
    return _made(place, clock, RUNS / FOLDERS["branchnorm:3"], wanted(place, "branchnorm:3"), 2)


def figures89(place: Place, clock: Clock) -> Progress:
    """BranchNorm, Figures 8 and 9 and the final loss: the rate of each arm, then the comparison, seed by seed, so that
    whatever is finished is balanced."""
    if (steps := decided_steps(place, clock)) is None:
        return Progress("partial", "the time of an update is not measured yet")
    if (rates := decided_rates(place, clock, steps)) is None:
        done = sum(map(len, place.state.decided.get("choice", {}).values()))
        return Progress("partial", f"{steps} updates a run; {done} rates have their losses")
    made = _made(place, clock, RUNS / FOLDERS["branchnorm:8"], wanted(place, "branchnorm:8", steps, rates), WORKERS)
    chosen = ", ".join(f"{arm} {rate:g}" for arm, rate in rates.items())
    return replace(made, sentence=f"{steps} updates a run; rates: {chosen}; {made.sentence}")


def decided_steps(place: Place, clock: Clock) -> int | None:
    """Updates of a run of figures89, the same for every architecture, decided once; None where time was too short.

    Runs of 20 updates and of 80, as many side by side as later, tell the time of an update; :func:`steps_that_fit` does
    the rest.
    """
    if "steps" in place.state.decided:
        return int(place.state.decided["steps"])
    took = []
    first, last = (1, 2) if place.smoke else PILOT_STEPS
    for steps in (first, last):
        pilot = ready(place, one_gpu.choice(_asked(place, [PILOT_SEED]), 4 * steps))[: 1 if place.smoke else WORKERS]
        began = time.monotonic()
        jobs = sweep.plan(pilot, Path("pace") / f"{steps}-{len(place.state.calls)}")
        outcome = sweep.run(jobs, workers=WORKERS, retries=0, until=clock.end)
        _heed(outcome, clock.end)
        took.append(time.monotonic() - began)
        if outcome.exit_code:
            place.log.line(f"pace: {outcome.sentence()}; {'; '.join(job.reason for job in outcome.jobs if job.reason)}")
            return None
    pace = max((took[1] - took[0]) / (last - first), 1e-3)
    start = max(took[0] - first * pace, 0.0)
    left = place.total - place.state.seconds("figures89") - clock.passed()  # the part's own clock
    steps = 8 if place.smoke else steps_that_fit(left, start, pace)
    place.log.line(
        f"an update takes {pace:.3f} s and a start {start:.0f} s, {left:.0f} s are left: {steps} updates a run"
    )
    place.state.decided |= {"steps": steps, "seconds_an_update": pace, "seconds_a_start": start, "seconds_left": left}
    place.keep()
    return steps


def steps_that_fit(left: float, start: float, pace: float) -> int:
    """Updates a run so that the choice of rates and the comparison take ``SHARE`` of the seconds ``left``.

    Of arms x rates x 2 runs of a quarter of the length, then arms x 6 whole ones, WORKERS go at a time: SHARE left =
    A (start + pace steps / 4) + B (start + pace steps), rounded down to hundreds, from 200 to 6000. That leaves
    A / 4 / (A / 4 + B) of the time of updates to the choice, a quarter.
    """
    arms = len(one_gpu.ARMS)
    choice = math.ceil(arms * len(one_gpu.RATES) * len(protocol.CHOICE_SEEDS) / WORKERS)
    main = math.ceil(arms * len(protocol.SEEDS) / WORKERS)
    each = (SHARE * left - (choice + main) * start) / (choice / 4 + main)
    return min(MOST, max(FEWEST, math.floor(each / pace / ROUND) * ROUND))


def decided_rates(place: Place, clock: Clock, steps: int) -> dict[str, float] | None:
    """Each arm's rate, decided once: the smallest mean loss of both seeds at the end of a quarter of the run.

    A best one at the edge of its grid is followed by the next, half or twice of it. None: call again.
    """
    decided = place.state.decided
    if "rates" in decided:
        return decided["rates"]
    arms, seeds, grid = arms_of(place), protocol.CHOICE_SEEDS, one_gpu.RATES
    if place.smoke:
        seeds, grid = seeds[:1], grid[:1]
    losses: dict[str, dict[str, dict[str, float]]] = decided.setdefault("choice", {arm: {} for arm in arms})
    wanted: dict[str, list[float]] = {arm: [*grid] for arm in arms}
    while True:
        runs = {
            (arm, rate, run.config.train.seed): run
            for arm, rates in wanted.items()
            for rate in rates
            for run in ready(place, one_gpu.choice(_asked(place, seeds), steps, [arm], [rate]))
        }
        open_ = {key: run for key, run in runs.items() if str(key[2]) not in losses[key[0]].get(f"{key[1]:g}", {})}
        made = _made(place, clock, CHOICE, [*open_.values()], WORKERS)
        for (arm, rate, seed), run in open_.items():
            if (found := last_loss(CHOICE / run.name)) is not None:
                losses[arm].setdefault(f"{rate:g}", {})[str(seed)] = found
        place.keep()
        if made.state != "complete":
            place.log.line(f"choice of rates: {made.sentence}")
            return None
        best = {arm: protocol.best({rate: _mean(losses[arm][f"{rate:g}"]) for rate in wanted[arm]}) for arm in wanted}
        further = {} if place.smoke else {arm: after for arm, (_, after) in best.items() if after is not None}
        if not further:
            break
        place.log.line(f"at the edge of the rates: {further}")
        for arm, after in further.items():
            wanted[arm].append(after)
    decided["rates"] = {arm: rate for arm, (rate, _) in best.items()}
    place.keep()
    return decided["rates"]


def last_loss(path: Path) -> float | None:
    """The loss of a finished run on all validation text, or held-out where there is none; that of a diverged one is the
    worst."""
    run = Run.open(path) if (path / "run.json").exists() else None
    if run is None or run.status.state not in ("finished", "diverged"):
        return None
    names = [name for name in ("validation_nll", "held_out_nll") if name in run.metrics]
    found = run.metrics[names[0]].dropna() if names else []
    value = float(found.iloc[-1]) if len(found) and run.status.state == "finished" else math.inf
    return value if math.isfinite(value) else 1e9  # JSON knows no infinity


def arms_of(place: Place) -> tuple[str, ...]:
    return one_gpu.ARMS[:2] if place.smoke else one_gpu.ARMS


def _mean(by_seed: dict[str, float]) -> float:
    return sum(by_seed.values()) / len(by_seed)


def _asked(place: Place, seeds: Sequence[int] | None = None) -> Recipe:
    return Recipe("h200", {"data": place.text}, seeds)


def wanted(place: Place, figure: str, steps: int = 8, rates: dict[str, float] | None = None) -> list[Experiment]:
    """The runs of a figure on this GPU; in a smoke test a few of them, as small as a model can be."""
    if figure == "deepnet:5":
        runs = experiments(figure, "h200", data=place.text)
    elif figure == "branchnorm:3":
        runs = [*one_gpu.beginning(_asked(place))]
    else:
        asked = _asked(place, [3] if place.smoke else None)
        runs = [*one_gpu.main(asked, steps, rates or {}, arms_of(place))]
    return ready(place, runs[:2] if place.smoke else runs)


def ready(place: Place, runs: Iterable[Experiment]) -> list[Experiment]:
    """On the device, recorded where the checks allow it; tiny in a smoke test."""
    made = [_changed(run, cuda_graphs=place.graphs) for run in on_device([*runs], place.device)]
    return [_tiny(run) for run in made] if place.smoke else made


def _tiny(run: Experiment) -> Experiment:
    small: dict[str, Any] = {
        "model": {"d_model": 16, "d_ffn": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1},
        "data": {"sentences": 4, "max_length": 8, "held_out": 6, "vocab_size": 64},
        "train": {"steps": min(run.config.train.steps, 5)},
    }
    settings = run.config.model_dump()
    return replace(run, config=validated(settings | {key: settings[key] | small[key] for key in small}))


def _changed(run: Experiment, **train: Any) -> Experiment:
    config: Config = run.config.model_copy(update={"train": run.config.train.model_copy(update=train)})
    return replace(run, config=config)


def _made(place: Place, clock: Clock, out: Path, runs: Sequence[Experiment], workers: int) -> Progress:
    """Makes the runs that are not finished, with a fresh archive now and then; asks them to stop in time.

    Where an update could not be recorded, the rest is made without recording.
    """
    jobs: list[sweep.Job] = []
    size = TOGETHER * workers
    for first in range(0, len(runs), size):
        some = _jobs(place, out, runs[first : first + size])
        if any(job.state != "finished" for job in some):
            if clock.left() > 1:
                some = _carried_out(place, clock, some, workers)
            if place.graphs == "on" and any("CUDA graph" in job.reason for job in some if job.state == "failed"):
                place.state.decided["graphs"] = "off"
                place.log.line("updates could not be recorded: all further runs go without CUDA graphs")
                some = _carried_out(place, clock, _jobs(place, out, runs[first : first + size]), workers)
            place.keep()
        jobs += some
    ended = sum(job.state == "finished" for job in jobs)
    said = f"{ended} of {len(jobs)} runs finished"
    if ended == len(jobs):
        return Progress("complete", said)
    open_ = [job for job in jobs if job.state not in ("finished", "failed")]
    why = "".join(f"; {job.name}: {job.reason}" for job in jobs if job.state == "failed")
    return Progress("partial" if open_ else "failed", said + why)


def _carried_out(place: Place, clock: Clock, jobs: Sequence[sweep.Job], workers: int) -> list[sweep.Job]:
    until = clock.end - min(GRACE, 0.2 * clock.left())
    with sweep.Display(Console(file=place.log, width=160)) as display:  # type: ignore[arg-type]
        outcome = sweep.run(jobs, workers=workers, audience=display, until=until)
    _heed(outcome, until)
    place.log.line(f"{jobs[0].out}: {outcome.sentence()}")
    return outcome.jobs


def _jobs(place: Place, out: Path, runs: Sequence[Experiment]) -> list[sweep.Job]:
    """Jobs of runs, each recorded or not as it was begun, which is part of a run; one that failed begins anew."""
    found = []
    for run in runs:
        now = _changed(run, cuda_graphs=place.graphs)
        path = out / run.name
        if (path / "run.json").exists():
            begun = _changed(run, cuda_graphs=Run.open(path).config["train"]["cuda_graphs"])
            job = sweep.examine(begun, out)
            if job.state != "failed" or begun.config == now.config:
                now = begun
            else:
                sweep.make_way(replace(job, resumable=False))
        found.append(now)
    return sweep.plan(found, out)


def _heed(outcome: sweep.Outcome, until: float) -> None:
    """Where not the clock but somebody wants this to stop, it does."""
    if outcome.signal is not None and time.monotonic() < until:
        raise SystemExit(128 + outcome.signal)


Part = Callable[[Place, Clock], Progress]
MAKING: dict[str, Part] = {
    "checks": checks,
    "benchmarks": benchmarks,
    "figure5": figure5,
    "figures89": figures89,
    "figure3": figure3,
    "rungs": protocol3.rungs,
    "judged": protocol3.judged,
    "rest": protocol3.rest,
    "studies": studies.studies,
}
LIMITS = {"checks": 540.0, "benchmarks": 540.0}  # seconds, of all calls, before other parts come first


def due(place: Place, names: Sequence[str]) -> Iterator[tuple[str, float]]:
    """The parts that are open, with the seconds that each may take now: first those that nobody tried or that go on;
    then, once, what failed or has had its time."""
    state = place.state
    waiting = []
    for name in names:
        left = LIMITS.get(name, math.inf) - state.seconds(name)
        if state.stands(name) == "failed" or (state.stands(name) == "partial" and left <= 0):
            waiting.append(name)
        elif state.stands(name) != "complete":
            yield name, left
    for name in waiting:
        yield name, math.inf
