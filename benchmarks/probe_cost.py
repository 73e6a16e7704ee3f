"""What watching costs: bare and probed updates of one model side by side, ABBA, with an A/A control.

    python benchmarks/probe_cost.py --depth 48 --rounds 30
    python benchmarks/probe_cost.py --depth 200 --rounds 12
    python benchmarks/probe_cost.py --depth 12 --rounds 12 --each             # every probe apart
    python benchmarks/probe_cost.py --depth 12 --probe attention --probe adam
    python benchmarks/probe_cost.py --device cuda --depth 200 --set train.precision=bf16

"bare": forward, backward, optimizer, and the loss recorded. "plain": an update that is not probed, whose total gradient
norm is recorded. "probed": all default probes of the training pass on that update. "default run": what these, and apart
from them the reference passes (held-out loss, similarity, sparsity, ||dF||), add to a whole run at the default
schedule. Apart: an update with one probe over one without; for probes of the reference pass both with a pass that only
takes the held-out loss, and that pass itself against bare. Time: CPU time, or on a GPU wall time from idle to idle.
Intervals: 95 %, bootstrap over rounds.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from subject import NEVER, UNWATCHED, prepared, trainer, update, warm
from timing import machine, middle, rounds

from stabilitylab.probes import PROBES, is_due
from stabilitylab.train import Trainer

FINENESS = 5  # of the reference pass's rows (see is_due)


def subject(arguments: argparse.Namespace, folder: Path, *sets: str, bare: bool = False) -> Trainer:
    common = (f"model.arch={arguments.arch}", f"train.device={arguments.device}", *arguments.set)
    return trainer(prepared(arguments.depth, *common, *sets), folder, bare=bare)


def taken(subjects: dict[str, Trainer], count: int) -> dict[str, np.ndarray]:
    """Seconds of each subject's updates, in alternating order, after a few that do not count."""
    works = {name: lambda each=each: update(each) for name, each in subjects.items()}
    rounds(works, warm(next(iter(subjects.values())).device))
    found = rounds(works, count)
    for each in subjects.values():
        each.watcher.close()
    return found


def apart(names: list[str], arguments: argparse.Namespace, folder: Path) -> None:
    """Prints what each of these probes adds to an update, or to one with a reference pass."""
    subjects = {}
    for name, kind in [("bare", ""), ("control", ""), ("pass", "reference"), *((n, PROBES[n].on) for n in names)]:
        listed = f"probes.names=['{name if name in names else 'none'}']"
        every, update_every = (NEVER, 1) if kind == "reference" else (1, NEVER)
        sets = (listed, f"probes.every={every}", f"probes.update_every={update_every}")
        subjects[name] = subject(arguments, folder / f"apart-{name}", *sets, bare=True)
    seconds = taken(subjects, arguments.rounds)
    print(head(arguments, seconds["bare"]))
    print(f"{'control':22s} / bare  {middle(seconds['control'] / seconds['bare'])}")
    print(f"{'pass':22s} / bare  {middle(seconds['pass'] / seconds['bare'])}")
    for name in names:
        over = "pass" if PROBES[name].on == "reference" else "bare"
        print(f"{name:22s} / {over}  {middle(seconds[name] / seconds[over])}")


def head(arguments: argparse.Namespace, bare: np.ndarray) -> str:
    took = f"bare update {1e3 * np.median(bare):.1f} ms{' of CPU' if arguments.device == 'cpu' else ''}"
    return f"{arguments.arch}, depth {arguments.depth}: {took}; {machine(torch.device(arguments.device))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--arch", default="branchnorm")
    parser.add_argument("--probe", action="append", default=[], help="only what this probe costs; may be repeated")
    parser.add_argument("--each", action="store_true", help="what each probe costs apart")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--set", action="append", default=[], help="any setting of the run, such as model.d_model=512")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch {torch.__version__} sees no CUDA device.")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        if arguments.each or arguments.probe:
            apart([*PROBES] if arguments.each else [*map(PROBES.resolve, arguments.probe)], arguments, folder)
            return
        watched = ("probes.every=1", f"probes.update_every={NEVER}")
        subjects = {
            "bare": subject(arguments, folder / "a", *UNWATCHED, bare=True),
            "control": subject(arguments, folder / "b", *UNWATCHED, bare=True),
            "plain": subject(arguments, folder / "p", *UNWATCHED),
            "probed": subject(arguments, folder / "c", *watched),
        }
        reference = subject(arguments, folder / "d", f"probes.every={NEVER}", "probes.update_every=1")
        seconds = taken(subjects, arguments.rounds)
        for _ in range(warm(reference.device)):
            update(reference)
        passes = np.array([update(reference) for _ in range(1 + arguments.rounds // 3)])
        reference.watcher.close()
        steps = subjects["bare"].config.train.steps
    base = np.median(seconds["bare"])
    due = np.mean([is_due(t, "log") for t in range(steps)])
    reference_rows = np.mean([is_due(t, "log", FINENESS) or is_due(t + 1, "log", FINENESS) for t in range(steps)])
    plain, probed = (seconds[name] / seconds["bare"] for name in ("plain", "probed"))
    probe_share = due * (np.median(probed) - 1) + (1 - due) * (np.median(plain) - 1)
    pass_share = reference_rows * (np.median(passes) / base - np.median(plain))
    print(head(arguments, seconds["bare"]))
    print(f"control / bare          {middle(seconds['control'] / seconds['bare'])}")
    print(f"plain update / bare     {middle(plain)}")
    print(f"probed update / bare    {middle(probed)}")
    print(f"update with reference passes / bare  {middle(passes / base)}")
    print(f"default run, {steps} updates: probes {100 * probe_share:.1f} % of a bare run ({100 * due:.0f} % of rows), ")
    print(f"    reference passes {100 * pass_share:.1f} % ({100 * reference_rows:.0f} % of rows)")


if __name__ == "__main__":
    main()
