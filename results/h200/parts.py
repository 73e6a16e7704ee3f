"""The parts that make numbers; each goes on where it stopped, and stops by itself when its time is up."""

from __future__ import annotations

import math
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from place import ROOT, Clock, Place, pair
from rich.console import Console

from stabilitylab import sweep
from stabilitylab.config import Config, validated
from stabilitylab.experiments import Experiment, experiments, folder, on_device

RUNS = Path("runs")
GRACE = 30.0  # seconds that a run may take for its checkpoint
PILOT_SEED = 100  # of the runs that only tell how long an update takes
PILOT_STEPS = (20, 80)
PAIRS, SHARE = 2, 0.85  # pairs of runs that have to fit, and into which part of the time left
SCORING = 30.0  # seconds to translate with one run, as assumed beforehand
BENCHMARK = 150.0  # seconds that one of them may take
FEWEST, MOST, ROUND = 200, 6000, 100  # updates of figures89

# In the order of their worth. A flag is handed over where the script knows it.
BENCHMARKS: dict[str, dict[str, str]] = {
    "cuda_graphs": {},
    "probe_cost": {"--depth": "200", "--rounds": "12"},
    "depth": {"--depths": "12,48,200,500,1000", "--steps": "10", "--minutes": "1.5"},
    "one_card": {},
    "shared_gpu": {"--counts": "1,8", "--seconds": "6"},
    "peers": {"--rounds": "12"},
    "contenders": {"--depth": "48", "--rounds": "8"},
}
TRIALS: dict[str, dict[str, str]] = {"shared_gpu": {"--counts": "1", "--seconds": "0.2", "--depth": "2"}, "absent": {}}


@dataclass(frozen=True)
class Progress:
    """complete; partial: call again; failed: something was wrong, and calling again alone will not help."""

    state: str
    sentence: str


def tests(place: Place, clock: Clock) -> Progress:
    """``pytest -m gpu`` with a plain log and a JUnit file."""
    which = [str(ROOT / "tests" / "probes" / "test_probes_gpu.py")] if place.smoke else []
    junit = (place.out / "tests" / "junit.xml").resolve()
    command = [
        place.python,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-rs",
        "-p",
        "no:cacheprovider",
        f"--junitxml={junit}",
        *which,
    ]
    log = (place.out / "tests" / "log.txt").resolve()
    code = place.call(command, clock, log, cwd=ROOT)
    if code is None:
        return Progress("partial", "the tests did not end in time")
    last = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()][-1:]
    return Progress("complete" if code == 0 else "failed", (last or ["pytest said nothing"])[0].strip("= "))


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
        place.state.save()
    said = "; ".join(f"{name}: {done.get(name, 'not begun')}" for name in wanted)
    if any("failed" in done.get(name, "") for name in wanted):
        return Progress("failed", said)
    over = all(done.get(name, "").endswith(("done", "yet")) for name in wanted)
    return Progress("complete" if over else "partial", said)


def figure5(place: Place, clock: Clock) -> Progress:
    """DeepNet, Figure 5: eight runs at a time, whose kernels leave the GPU idle most of the time."""
    return _made(place, clock, "deepnet:5", wanted(place, "deepnet:5"), 8)


def figure3(place: Place, clock: Clock) -> Progress:
    """BranchNorm, Figure 3: two at a time, each of which is refused if it needs more than half of the memory."""
    return _made(place, clock, "branchnorm:3", wanted(place, "branchnorm:3"), 2)


def figures89(place: Place, clock: Clock) -> Progress:
    """BranchNorm, Figures 8 and 9, final loss and BLEU: one seed of both architectures at a time, so that whatever is
    finished is balanced."""
    if (steps := decided_steps(place, clock)) is None:
        return Progress("partial", "the time of an update is not measured yet")
    runs = wanted(place, "branchnorm:8", steps)
    for first in range(0, len(runs), 2):
        two = runs[first : first + 2]
        made = _made(place, clock, "branchnorm:8", two, 2, steps)
        if made.state != "complete":
            return replace(made, sentence=f"{steps} updates a run; {_count(place, runs)}; {made.sentence}")
        for job in _jobs(place, "branchnorm:8", two):
            if not _scored(place, clock, job.path):
                said = f"{steps} updates a run; {_count(place, runs)}; BLEU of {job.name} is missing"
                return Progress("partial", said)
    return Progress("complete", f"{steps} updates a run; {_count(place, runs)}")


def decided_steps(place: Place, clock: Clock) -> int | None:
    """Updates of a run of figures89, the same for every architecture, decided once; None where time was too short.

    Two runs of 20 updates and two of 80, side by side as later, tell the time of an update; :func:`steps_that_fit` does
    the rest.
    """
    if "steps" in place.state.decided:
        return int(place.state.decided["steps"])
    took = []
    for steps in (1, 2) if place.smoke else PILOT_STEPS:
        pilot = wanted(place, "branchnorm:8", steps, [PILOT_SEED])[:2]
        light = [_changed(run, final_checkpoint=False) for run in pilot]
        began = time.monotonic()
        jobs = sweep.plan(light, Path("pace") / f"{steps}-{len(place.state.calls)}")
        outcome = sweep.run(jobs, workers=2, retries=0, until=clock.end)
        _heed(outcome, clock.end)
        took.append(time.monotonic() - began)
        if outcome.exit_code:
            place.log.line(f"pace: {outcome.sentence()}; {'; '.join(job.reason for job in outcome.jobs if job.reason)}")
            return None
    first, last = (1, 2) if place.smoke else PILOT_STEPS
    pace = max((took[1] - took[0]) / (last - first), 1e-3)
    start = max(took[0] - first * pace, 0.0)
    left = place.total - place.state.spent() - clock.passed()
    steps = 5 if place.smoke else steps_that_fit(left, start, pace)
    place.log.line(
        f"an update takes {pace:.3f} s and a start {start:.0f} s, {left:.0f} s are left: {steps} updates a run"
    )
    place.state.decided |= {"steps": steps, "seconds_an_update": pace, "seconds_a_start": start, "seconds_left": left}
    place.state.save()
    return steps


def steps_that_fit(left: float, start: float, pace: float) -> int:
    """Updates a run so that two pairs of runs and their translations take ``SHARE`` of the seconds ``left``.

    SHARE left = PAIRS (start + pace steps + 2 SCORING), rounded down to hundreds, from 200 to 6000.
    """
    each = SHARE * left / PAIRS - start - 2 * SCORING
    return min(MOST, max(FEWEST, math.floor(each / pace / ROUND) * ROUND))


def wanted(place: Place, figure: str, steps: int | None = None, seeds: Sequence[int] | None = None) -> list[Experiment]:
    """The runs of a figure at scale h200; in a smoke test the first two of them, as small as a model can be."""
    runs = on_device(experiments(figure, "h200", data=place.text, seeds=seeds, steps=steps), place.device)
    return [_tiny(run) for run in runs[:2]] if place.smoke else runs


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


def _jobs(place: Place, figure: str, runs: Sequence[Experiment]) -> list[sweep.Job]:
    return sweep.plan(runs, RUNS / folder(figure, "h200"))


def _made(
    place: Place, clock: Clock, figure: str, runs: Sequence[Experiment], workers: int, steps: int | None = None
) -> Progress:
    """Makes the runs that are not finished; asks them to stop in time for a checkpoint."""
    jobs = _jobs(place, figure, runs)
    if any(job.state != "finished" for job in jobs):
        length = [] if steps is None else ["--steps", str(steps)]
        text = [] if place.smoke else ["--data", f"text:{pair('train')}", "--valid", pair("val")]
        where = ["--device", place.device, "--jobs", str(workers), "--out", str(RUNS)]
        place.log.line(f"$ {shlex.join(['stabilitylab', 'sweep', figure, '--scale', 'h200', *length, *text, *where])}")
        until = clock.end - min(GRACE, 0.2 * clock.left())
        with sweep.Display(Console(file=place.log, width=160)) as display:  # type: ignore[arg-type]
            outcome = sweep.run(jobs, workers=workers, audience=display, until=until)
        _heed(outcome, until)
        jobs = outcome.jobs
        place.log.line(f"{figure}: {outcome.sentence()}")
    ended = sum(job.state == "finished" for job in jobs)
    said = f"{ended} of {len(jobs)} runs finished"
    if ended == len(jobs):
        return Progress("complete", said)
    open_ = [job for job in jobs if job.state not in ("finished", "failed")]
    why = "".join(f"; {job.name}: {job.reason}" for job in jobs if job.state == "failed")
    return Progress("partial" if open_ else "failed", said + why)


def _heed(outcome: sweep.Outcome, until: float) -> None:
    """Where not the clock but somebody wants this to stop, it does."""
    if outcome.signal is not None and time.monotonic() < until:
        raise SystemExit(128 + outcome.signal)


def _count(place: Place, runs: Sequence[Experiment]) -> str:
    return f"{sum(job.state == 'finished' for job in _jobs(place, 'branchnorm:8', runs))} of {len(runs)} runs finished"


def _scored(place: Place, clock: Clock, run: Path) -> bool:
    """BLEU of a finished run; its weights are needed for that alone, and go. False: there was no time for it.

    A run that diverged cannot translate; that is said in the log, and the next seed begins all the same.
    """
    if not (run / "evaluation.json").exists():
        text = ["--sentences", "2", "--beam", "1"] if place.smoke else ["--data", f"text:{pair('test_2016_flickr')}"]
        command = [place.python, "-m", "stabilitylab", "evaluate", str(run), "--device", place.device, "-q", *text]
        if (code := place.call(command, clock, Path("evaluations") / f"{run.name}.txt")) != 0:
            return code is not None
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    return True


Part = Callable[[Place, Clock], Progress]
MAKING: dict[str, tuple[Part, float | None]] = {
    # seconds that all calls together give to it under --part all; None: what is left
    "tests": (tests, 240.0),
    "benchmarks": (benchmarks, 330.0),
    "figure5": (figure5, 300.0),
    "figure3": (figure3, 240.0),
    "figures89": (figures89, None),
}


def due(place: Place) -> Iterator[tuple[str, float]]:
    """The parts that are open, with the seconds that each may still take."""
    for name, (_, limit) in MAKING.items():
        if place.state.stands(name) in ("new", "partial"):
            left = math.inf if limit is None else limit - place.state.seconds(name)
            if left > 0:
                yield name, left
