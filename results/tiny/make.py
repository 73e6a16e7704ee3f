#!/usr/bin/env python
"""Makes the runs of Protocols 2 and 3, and keeps what its figures and claims can be checked by.

    python results/tiny/make.py PART ... --data PATH/multi30k [--runs runs] [--backwards]

``rungs``: the search of Protocol 3 for the rate of each arm on the schedule that is run, into the ledger ``rungs.csv``;
``rungs-choice.csv`` has every trial of the search and which rate was chosen, ``rungs-notes.md`` what is unsure.

``judged``: the runs of Protocol 3 at the rates that the search chose, with losses on ``test_2016_flickr``, into the
ledger and the tables of ``third/``. ``half``: the first four seeds of these at half the rates. ``map``: the map of
collapse. ``searched-ramps``: BranchNorm with several T, 18 layers a side, at three rates. These three have folders of
their names.

The other parts are Protocol 2, in ``second/``. ``rates``: its choice of a learning rate for each arm, into the ledger
``rates.csv``; ``choice.csv`` has the means. Its other runs go into one ``ledger.csv``, and small tables beside it
(keep.py). What stands in a ledger is not made again, so that a stopped call goes on where it was; two calls may share a
part, one of them backwards.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import keep
from own_rates import at_once
from shared import metrics_of, multi30k

from stabilitylab.experiments import SWEEPS, Experiment, Recipe, folder, protocol
from stabilitylab.lr_find import Rungs
from stabilitylab.store import Run
from stabilitylab.sweep import Ledger, SweptTrainer, choose_rate, plan, run

HERE = Path(__file__).parent
SECOND = "second"  # the folder of what Protocol 2 made
Keep = Callable[[Run, Path], None]
Runs = Iterable[Experiment]


@dataclass(frozen=True)
class Part:
    """Runs with a ledger. ``where``: their folder; ``out``: that of the ledger and of the tables which ``keeping``
    makes; ``judged_on``: the text of their losses."""

    where: str
    experiments: Callable[[Recipe, Sequence[int], Sequence[str]], Runs]  # of these layers a side and arms
    keeping: Sequence[Keep] = ()
    out: str = SECOND
    judged_on: str = "val"


def judged(ask: Recipe, depths: Sequence[int], arms: Sequence[str]) -> Runs:
    """The comparison of Protocol 3."""
    end_without_rates(depths, protocol.SEARCHED_ARMS)
    return chain.from_iterable(protocol.judged(ask, layers, arms) for layers in depths)


def half(ask: Recipe, depths: Sequence[int], arms: Sequence[str]) -> Runs:
    """Four of its seeds at half the rates."""
    end_without_rates(depths, arms)
    return chain.from_iterable(protocol.halved(ask, layers, arms) for layers in depths)


def searched_ramps(ask: Recipe, *_: object) -> Runs:
    """BranchNorm with several T, 18 layers a side, at three rates."""
    end_without_rates(protocol.LAYERS[-1:], (protocol.BRANCH,))
    return protocol.searched_ramps(ask)


def end_without_rates(depths: Iterable[int], arms: Iterable[str]) -> None:
    """End the process if the search of an arm has not ended."""
    for layers in depths:
        if open_arms := [arm for arm in arms if layers not in protocol.SEARCH[arm]]:
            raise SystemExit(f"{', '.join(open_arms)} have no rate at {layers} layers a side yet: run `rungs` first.")


def map_of_collapse(ask: Recipe, depths: Sequence[int], _: object) -> Runs:
    """Rates, ramps and warm-ups."""
    return (one for one in SWEEPS["collapse:map"](ask) if one.config.model.encoder_layers in depths)


def second(where: str, experiments: Callable[[Recipe], Runs], *keeping: Keep) -> Part:
    """Runs of Protocol 2, which has one ledger."""
    return Part(where, lambda ask, *_: experiments(ask), keeping)


COMPARED: Sequence[Keep] = (keep.course, keep.layers, keep.sentences, keep.source, keep.collapse)
THIRD: Sequence[Keep] = (keep.reading, keep.layers, keep.sentences, keep.activity, keep.shares)
FLICKR = "test_2016_flickr"
PARTS = {
    "judged": Part("tiny/judged", judged, THIRD, "third", FLICKR),
    "half": Part("tiny/half", half, (keep.reading,), "half", FLICKR),
    "map": Part("tiny/map", map_of_collapse, (keep.reading_course,), "map"),
    "searched-ramps": Part("tiny/searched-ramps", searched_ramps, (keep.reading,), "searched-ramps"),
    "main": second(folder("branchnorm:8"), protocol.main, *COMPARED),
    "beginning": second(folder("branchnorm:3"), protocol.beginning, keep.beginning),
    "ramps": second(folder("branchnorm:T"), protocol.ramps, *COMPARED),
    "growths": second(folder("branchnorm:7"), protocol.growths, *COMPARED),
    "lower": second("tiny/lower", protocol.lower, *COMPARED),
    "deepest": second("tiny/deepest", protocol.deepest, keep.course),
    "fifty": second("tiny/fifty", protocol.fifty, keep.course),
    "depth": second(folder("branchnorm:5"), SWEEPS["branchnorm:5"]),
    "grid": second(folder("branchnorm:6"), SWEEPS["branchnorm:6"]),
}


def recipe(data: Path, judged_on: str = "val") -> Recipe:
    return Recipe("tiny", {"data": multi30k(data, judged_on)})


def make(
    experiments: Iterable[Experiment], where: Path, ledger: Ledger, keeping: Sequence[Keep] = (), workers: int = 1
) -> None:
    """Train what the ledger lacks, ``workers`` runs at a time, and write the tables beside it; ends the process where
    it is asked to stop, or a run fails twice."""
    wanted = list(experiments)
    ledger.path.parent.mkdir(parents=True, exist_ok=True)
    for first in range(0, len(wanted), workers):
        jobs = plan(wanted[first : first + workers], where, ledger)
        outcome = run(jobs, workers=workers)
        if begun := [job.name for job in jobs if job.state not in ("finished", "running")]:
            print(f"{', '.join(begun)}: {outcome.sentence()}", flush=True)
        for job in outcome.jobs:
            if (where / job.name / "run.json").exists() and job.state == "finished":
                keep_tables(Run.open(where / job.name), ledger.path.parent, keeping)
        if outcome.exit_code:
            raise SystemExit(outcome.exit_code)


def keep_tables(made: Run, out: Path, keeping: Sequence[Keep]) -> None:
    """Write the tables of a run that do not have it yet."""
    for each in keeping:
        if not keep.has(out / f"{each.__name__}.csv", made):
            each(made, out)


def losses(ledger: Ledger, experiments: Iterable[Experiment]) -> dict[float, list[float]]:
    """The validation losses of both seeds by rate."""
    found: dict[float, list[float]] = defaultdict(list)
    for experiment in experiments:
        if (cell := ledger.find(experiment.config)) is not None:
            found[experiment.config.train.lr].append(float(metrics_of(cell).get("validation_nll", math.nan)))
    return found


def rates(ask: Recipe, where: Path, layers: int, ledger: Ledger, backwards: bool) -> None:
    """The four rates of each arm, and others for as long as the best one stands at the edge; then ``choice.csv``."""
    first = list(protocol.choice(layers, ask.settings))
    make(reversed(first) if backwards else first, where, ledger)
    tried = {arm: list(protocol.RATES) for arm in protocol.arms(layers)}
    while True:
        more = {}
        for arm, known in tried.items():
            found = losses(ledger, protocol.choice(layers, ask.settings, {arm: tuple(known)}))
            if any(len(own) < len(protocol.CHOICE_SEEDS) for own in found.values()) or len(found) < len(known):
                raise SystemExit(f"{arm}, {layers} layers a side: another call is still at its runs; call again.")
            if (further := protocol.best({rate: sum(own) / len(own) for rate, own in found.items()})[1]) is not None:
                more[arm] = (further,)
                known.append(further)
        if not more:
            return
        make(protocol.choice(layers, ask.settings, more), where, ledger)


def rungs(ask: Recipe, where: Path, layers: int, ledger: Ledger, out: Path, arms: Sequence[str], workers: int) -> None:
    """Search the rate of every one of ``arms`` by Protocol 3, ``workers`` runs at a time; the tables hold those whose
    search has ended."""
    rules = Rungs(
        protocol.SEARCHED_RATES,
        protocol.CHOICE_SEEDS,
        first=protocol.RUNG_UPDATES,
        last=protocol.UPDATES,
        confirming=protocol.CONFIRMING_SEEDS,
    )
    for arm in arms:
        experiment = protocol.searched(arm, layers, ask.settings)
        trainer = SweptTrainer(experiment, protocol.UPDATES, where, ledger, at_once(workers))
        choice = choose_rate(trainer, rules)
        trainer.discard()
        keep.choice(out, arm, layers, choice)


def write_choice(ask: Recipe, ledger: Ledger, path: Path) -> None:
    """``choice.csv``: the mean validation loss of every arm at every rate, and which is the least."""
    span = [protocol.RATES[0] * 2.0**power for power in range(-4, 8)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("arm", "layers", "lr", "nll_100", "nll_101", "nll", "chosen"))
        for layers in protocol.LAYERS:
            for arm in protocol.arms(layers):
                found = losses(ledger, protocol.choice(layers, ask.settings, {arm: tuple(span)}))
                means = {rate: sum(own) / len(own) for rate, own in sorted(found.items()) if len(own) == 2}
                for rate, mean in means.items():
                    chosen = int(rate == protocol.best(means)[0])
                    own = (f"{loss:.6f}" for loss in found[rate])
                    writer.writerow((arm, layers, f"{rate:g}", *own, f"{mean:.6f}", chosen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("rungs", "rates", *PARTS))
    parser.add_argument("--data", type=Path, required=True, help="folder of Multi30k")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the ledgers and tables")
    parser.add_argument("--layers", type=int, choices=protocol.LAYERS, help="a side; both unless given")
    parser.add_argument(
        "--arm", action="append", choices=protocol.SEARCHED_ARMS, help="of rungs, judged and half; all unless given"
    )
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, but for rates (default 1)")
    parser.add_argument("--backwards", action="store_true", help="the last run first, for a second call at once")
    given = parser.parse_args()
    ask, arms = recipe(given.data), given.arm or protocol.SEARCHED_ARMS
    depths = (given.layers,) if given.layers else protocol.LAYERS
    for part in given.parts:
        if part == "rungs":
            for layers in depths:
                ledger = Ledger(given.out / "rungs.csv")
                rungs(ask, given.runs / "tiny/rungs", layers, ledger, given.out, arms, given.workers)
        elif part == "rates":
            ledger = Ledger(given.out / SECOND / "rates.csv")
            for layers in depths:
                rates(ask, given.runs / "tiny/rates", layers, ledger, given.backwards)
            write_choice(ask, ledger, given.out / SECOND / "choice.csv")
        else:
            own = PARTS[part]
            wanted = [*own.experiments(recipe(given.data, own.judged_on), depths, arms)]
            ordered = wanted[::-1] if given.backwards else wanted
            make(
                ordered, given.runs / own.where, Ledger(given.out / own.out / "ledger.csv"), own.keeping, given.workers
            )


if __name__ == "__main__":
    main()
