"""The first part: does what needs a GPU do what it should? Each check is a process with a limit of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bare import is_there
from place import ROOT, Clock, Place, Progress

from stabilitylab.store import Run

FOLDER = Path("checks")
PAIRS = Path("pairs")  # the runs that are compared: too large to come back, and made again elsewhere
HERE = Path(__file__).resolve().parent
OWN_FILTER = ("-W", "default", "-o", "filterwarnings=default")  # a warning of another torch is no failure here
TIMES = 10.0  # so much further apart than two direct runs may a recorded and a direct one be,
LEAST = 1e-3  # or so many nats


@dataclass(frozen=True)
class Check:
    """A command and its limit in seconds, or what is concluded from what earlier ones left."""

    name: str
    seconds: float
    command: Callable[[Place], list[str]] | None = None
    conclude: Callable[[Place], str] | None = None


def checks(place: Place, clock: Clock) -> Progress:
    """Carries out what is not done yet, in the order of its worth; a fresh archive after each."""
    done = place.state.decided.setdefault("checks", {})
    for check in CHECKS:
        if done.get(check.name) == "done" or clock.left() < 2:
            continue
        if check.command is not None:
            code = place.call(check.command(place), clock.within(check.seconds), FOLDER / f"{check.name}.txt")
            said = {0: "done", None: "did not end in time"}.get(code, f"failed with exit code {code}")
            done[check.name] = said
        elif check.conclude is not None:
            done[check.name] = check.conclude(place)
            place.log.line(f"{check.name}: {done[check.name]}")
        place.state.save()
        place.keep()
    said = "; ".join(f"{check.name}: {done.get(check.name, 'not begun')}" for check in CHECKS)
    if any("failed" in state for state in done.values()):
        return Progress("failed", said)
    over = all(done.get(check.name) == "done" for check in CHECKS)
    return Progress("complete" if over else "partial", f"{said}; CUDA graphs {place.graphs}")


def one_check(name: str, *more: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        own = ["--smoke"] if place.smoke else []
        out = str((FOLDER / f"{'-'.join([name, *more])}.json").resolve())
        return [place.python, str(HERE / "one_check.py"), name, *more, "--out", out, "--device", place.device, *own]

    return command


def gpu_tests(place: Place) -> list[str]:
    """``pytest -m gpu`` over the files that hold such tests, by name: collecting all others would take the minute."""
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8"))
    files = [path for path in files if path.name == "test_probes_gpu.py"] if place.smoke else files
    workers = ["-n", "12"] if is_there("xdist") and not place.smoke else []
    own = [
        "-m",
        "gpu",
        "-rs",
        "-vv",  # names, so that a call that is cut says which failed
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(ROOT),
        "-c",
        str(ROOT / "pyproject.toml"),
    ]
    return [place.python, "-m", "pytest", *own, *OWN_FILTER, *workers, *map(str, files)]


def probed(place: Place, name: str, depth: int, steps: int, *more: str) -> list[str]:
    """The module and its arguments that make a short run of the default recipe, at the depth of a trial in a smoke
    test."""
    size = (2, 4) if place.smoke else (depth, steps)
    return [
        *("-m", "stabilitylab", "probe", "-q", "--depth", str(size[0]), "--steps", str(size[1])),
        *("--out", str(PAIRS), "--name", fresh(name), "--device", place.device),
        *("--set", "train.final_checkpoint=false", *more),
    ]


def short_run(name: str, graphs: str) -> Callable[[Place], list[str]]:
    """The first 60 updates of the default recipe at 24 layers, direct or recorded: at 200 layers a direct update takes
    more than a second, since a GPU waits for the host that launches its kernels."""

    def command(place: Place) -> list[str]:
        asked = "off" if place.smoke else graphs
        return [place.python, *probed(place, name, 24, 60, "--cuda-graphs", asked)]

    return command


def on_ranks(kind: str) -> Callable[[Place], list[str]]:
    """A short run of one process under torchrun, so that NCCL carries what ranks tell each other."""

    def command(place: Place) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        return [place.python, *torchrun, *probed(place, kind, 12, 20, "--parallel", kind)]

    return command


def fresh(name: str) -> str:
    """``name``, or the first of name-2, name-3, ... that nobody began."""
    return next(tried for i in range(1, 100) if not (PAIRS / (tried := f"{name}-{i}")).exists())


def latest(name: str) -> Path:
    found = sorted((PAIRS).glob(f"{name}-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return found[-1] if found else PAIRS / f"{name}-1"


def side_by_side(first: str, second: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        two = [str(latest(first)), str(latest(second))]
        return [place.python, "-m", "stabilitylab", "compare", *two]

    return command


def verdict_on_graphs(place: Place) -> str:
    """Decides whether runs are recorded from now on; writes checks/graphs.json.

    The rule, fixed beforehand: over all rows the loss of the recorded run and that of a direct one are at most TIMES as
    far apart as two direct ones, or LEAST nats; every loss is finite; and it was recorded to its end.
    """
    found = {name: ended(latest(name)) for name in ("recorded", "direct", "again")}
    place.state.decided["graphs"] = "off"
    if lacking := [name for name, run in found.items() if run is None]:
        done = place.state.decided["checks"]
        for name in (*lacking, "compared", "compared-again"):
            if done.get(name) == "done":  # on another machine: to be made again
                del done[name]
        return f"failed: no finished run {', '.join(lacking)}; all further runs go without CUDA graphs"
    losses = {name: run.metrics["loss"].to_numpy() for name, run in found.items() if run is not None}
    apart = {other: farthest(losses["direct"], losses[other]) for other in ("recorded", "again")}
    recorded = bool(found["recorded"] and found["recorded"].manifest.get("cuda_graphs"))
    equal = apart["recorded"] <= max(TIMES * apart["again"], LEAST)
    speed = {
        name: float(run.metrics["tokens_per_second"].iloc[-20:].median())
        for name, run in found.items()
        if run is not None
    }
    facts = {"nats_apart": apart, "recorded": recorded, "equal": equal, "tokens_per_second": speed}
    (FOLDER / "graphs.json").write_text(json.dumps(facts, indent=1) + "\n")
    if not equal:
        return "failed: a recorded run is not the direct one; all further runs go without CUDA graphs"
    if not recorded and not place.smoke:
        return "failed: the run that was to be recorded was not; all further runs go without CUDA graphs"
    place.state.decided["graphs"] = "on"
    return "done"


def ended(path: Path) -> Run | None:
    run = Run.open(path) if (path / "run.json").exists() else None
    return run if run is not None and run.status.state in ("finished", "diverged") else None


def farthest(first, second) -> float:
    """The largest distance of two losses of a row; infinite where one is not finite."""
    if len(first) != len(second) or not len(first):
        return math.inf
    own = abs(first - second)[:-1]  # the row after training has none
    return float(own.max()) if len(own) and math.isfinite(own.max()) else math.inf


CHECKS = (
    Check("tests", 110, gpu_tests),
    Check("ddp", 30, on_ranks("ddp")),
    Check("fsdp", 30, on_ranks("fsdp")),
    Check("capture", 30, one_check("capture")),
    Check("recorded", 40, short_run("recorded", "on")),
    Check("direct", 40, short_run("direct", "off")),
    Check("compared", 20, side_by_side("direct", "recorded")),
    Check("again", 40, short_run("again", "off")),
    Check("compared-again", 20, side_by_side("direct", "again")),
    Check("graphs", 1, conclude=verdict_on_graphs),
    Check("memory-direct", 45, one_check("memory", "off")),
    Check("memory-recorded", 45, one_check("memory", "on")),
    Check("kernels", 40, one_check("kernels")),
)
