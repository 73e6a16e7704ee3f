"""What watching costs: bare and probed updates of one model side by side, ABBA, in CPU time, with an A/A control.

    python benchmarks/probe_cost.py --depth 48 --rounds 30
    python benchmarks/probe_cost.py --depth 200 --rounds 12
    python benchmarks/probe_cost.py --depth 12 --rounds 12 --each             # every probe apart
    python benchmarks/probe_cost.py --depth 12 --probe attention --probe adam

"bare": forward, backward, optimizer, and the loss recorded. "plain": an update that is not probed, whose total gradient
norm is recorded. "probed": all default probes of the training pass on that update. "default run": what these, and apart
from them the reference passes (held-out loss, similarity, sparsity, ||dF||), add to a whole run at the default
schedule. Apart: an update with one probe over one without; for probes of the reference pass both with a pass that only
takes the held-out loss, and that pass itself against bare. Intervals: 95 %, bootstrap over rounds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from stabilitylab.config import parse_set, resolve
from stabilitylab.probes import PROBES
from stabilitylab.probes.schedule import REFERENCE_FINENESS, is_due
from stabilitylab.store import RunWriter
from stabilitylab.train import plan
from stabilitylab.train.loop import Trainer

NEVER = 10**9


def trainer(depth: int, folder: Path, name: str, *sets: str) -> Trainer:
    prepared = plan(resolve(parse_set(sets), depth=depth))
    return Trainer(prepared.config, prepared.dataset, RunWriter.create(folder / name, {"config": {}}), prepared.device)


def timed(subject: Trainer) -> float:
    began = time.process_time()
    subject.update()
    subject.row += 1
    return time.process_time() - began


def interval(values: np.ndarray, random: np.random.Generator) -> str:
    means = np.median(random.choice(values, (4000, len(values))), axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{np.median(values):.3f} [{low:.3f}, {high:.3f}]"


def rounds(subjects: dict[str, Trainer], count: int) -> dict[str, np.ndarray]:
    """CPU seconds of each subject's updates, in alternating order, after a few that do not count."""
    for subject in subjects.values():
        for _ in range(3):
            timed(subject)
    rows = []
    for turn in range(count):
        order = list(subjects) if turn % 2 else list(reversed(subjects))
        rows.append({name: timed(subjects[name]) for name in order})
    for subject in subjects.values():
        subject.watcher.close()
    return {name: np.array([row[name] for row in rows]) for name in subjects}


def apart(names: list[str], arguments: argparse.Namespace, folder: Path, random: np.random.Generator) -> None:
    """Prints what each of these probes adds to an update, or to one with a reference pass."""
    arch, never = f"model.arch={arguments.arch}", f"{NEVER}"
    subjects = {}
    for name, kind in [("bare", ""), ("control", ""), ("pass", "reference"), *((n, PROBES[n].on) for n in names)]:
        listed = f"probes.names=['{name if name in names else 'none'}']"
        every, update_every = (never, "1") if kind == "reference" else ("1", never)
        sets = (arch, listed, f"probes.every={every}", f"probes.update_every={update_every}")
        subjects[name] = trainer(arguments.depth, folder, f"apart-{name}", *sets)
        subjects[name].watcher._total_every_step = False
    seconds = rounds(subjects, arguments.rounds)
    print(f"{arguments.arch}, depth {arguments.depth}: bare update {1e3 * np.median(seconds['bare']):.0f} ms of CPU")
    print(f"{'control':22s} / bare  {interval(seconds['control'] / seconds['bare'], random)}")
    print(f"{'pass':22s} / bare  {interval(seconds['pass'] / seconds['bare'], random)}")
    for name in names:
        over = "pass" if PROBES[name].on == "reference" else "bare"
        print(f"{name:22s} / {over}  {interval(seconds[name] / seconds[over], random)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--arch", default="branchnorm")
    parser.add_argument("--probe", action="append", default=[], help="only what this probe costs; may be repeated")
    parser.add_argument("--each", action="store_true", help="what each probe costs apart")
    arguments = parser.parse_args()
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as text:
        folder, arch = Path(text), f"model.arch={arguments.arch}"
        if arguments.each or arguments.probe:
            apart([*PROBES] if arguments.each else [*map(PROBES.resolve, arguments.probe)], arguments, folder, random)
            return
        bare = ("probes.names=['none']", "probes.every=1", f"probes.update_every={NEVER}")
        subjects = {
            "bare": trainer(arguments.depth, folder, "a", arch, *bare),
            "control": trainer(arguments.depth, folder, "b", arch, *bare),
            "plain": trainer(arguments.depth, folder, "p", arch, *bare),
            "probed": trainer(arguments.depth, folder, "c", arch, "probes.every=1", f"probes.update_every={NEVER}"),
        }
        reference = trainer(arguments.depth, folder, "d", arch, f"probes.every={NEVER}", "probes.update_every=1")
        for name in ("bare", "control"):
            subjects[name].watcher._total_every_step = False
        seconds = rounds(subjects, arguments.rounds)
        passes = np.array([timed(reference) for _ in range(4 + arguments.rounds // 3)])[3:]
        reference.watcher.close()
        steps = subjects["bare"].config.train.steps
    base = np.median(seconds["bare"])
    due = np.mean([is_due(t, "log") for t in range(steps)])
    reference_rows = np.mean(
        [is_due(t, "log", REFERENCE_FINENESS) or is_due(t + 1, "log", REFERENCE_FINENESS) for t in range(steps)]
    )
    plain, probed = (seconds[name] / seconds["bare"] for name in ("plain", "probed"))
    probe_share = due * (np.median(probed) - 1) + (1 - due) * (np.median(plain) - 1)
    pass_share = reference_rows * (np.median(passes) / base - np.median(plain))
    print(f"{arguments.arch}, depth {arguments.depth}: bare update {1e3 * base:.0f} ms of CPU")
    print(f"control / bare          {interval(seconds['control'] / seconds['bare'], random)}")
    print(f"plain update / bare     {interval(plain, random)}")
    print(f"probed update / bare    {interval(probed, random)}")
    print(f"update with reference passes / bare  {interval(passes / base, random)}")
    print(f"default run, {steps} updates: probes {100 * probe_share:.1f} % of a bare run ({100 * due:.0f} % of rows), ")
    print(f"    reference passes {100 * pass_share:.1f} % ({100 * reference_rows:.0f} % of rows)")


if __name__ == "__main__":
    main()
