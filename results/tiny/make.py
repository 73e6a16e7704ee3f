#!/usr/bin/env python
"""Makes the runs of Protocol 2 and keeps what its figures and claims are drawn from.

    python results/tiny/make.py rates --data PATH/multi30k [--layers 6] [--runs runs/tiny/protocol]

``rates``: the choice of a learning rate for each arm, into the ledger ``rates.csv``. What stands in a ledger is not
made again, so that a stopped call goes on where it was.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from stabilitylab.experiments import Experiment, protocol
from stabilitylab.sweep import Ledger, plan, run

HERE = Path(__file__).parent


def files(folder: Path) -> dict[str, str]:
    train, valid = (f"{folder / name}.de.gz,{folder / name}.en.gz" for name in ("train", "val"))
    return {"source": f"text:{train}", "valid": valid}


def make(experiments: Iterable[Experiment], folder: Path, ledger: Ledger) -> None:
    """Train what the ledger lacks; ends the process where it is asked to stop, or a run fails twice."""
    for experiment in experiments:
        outcome = run(plan([experiment], folder, ledger))
        print(f"{experiment.name}: {outcome.sentence()}", flush=True)
        if outcome.exit_code:
            raise SystemExit(outcome.exit_code)


def losses(ledger: Ledger, experiments: Iterable[Experiment]) -> dict[float, float]:
    """The mean validation loss by rate."""
    found: dict[float, list[float]] = defaultdict(list)
    for experiment in experiments:
        if (cell := ledger.find(experiment.config)) is not None:
            metrics = dict(word.split("=", 1) for word in cell["metrics"].split())
            found[experiment.config.train.lr].append(float(metrics.get("validation_nll", math.nan)))
    return {rate: sum(values) / len(values) for rate, values in found.items()}


def rates(data: dict[str, str], folder: Path, layers: int, ledger: Ledger) -> None:
    """The four rates of each arm, and others for as long as the best one stands at the edge."""
    make(protocol.choice(layers, data), folder, ledger)
    tried = {arm: list(protocol.RATES) for arm in protocol.arms(layers)}
    while True:
        more = {}
        for arm, known in tried.items():
            made = protocol.choice(layers, data, {arm: tuple(known)})
            if (further := protocol.best(losses(ledger, made))[1]) is not None:
                more[arm] = (further,)
                known.append(further)
        if not more:
            return
        make(protocol.choice(layers, data, more), folder, ledger)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("rates",))
    parser.add_argument("--data", type=Path, required=True, help="folder of Multi30k")
    parser.add_argument("--runs", type=Path, default=Path("runs/tiny/protocol"))
    parser.add_argument("--layers", type=int, choices=protocol.LAYERS, help="a side; both unless given")
    given = parser.parse_args()
    for layers in (given.layers,) if given.layers else protocol.LAYERS:
        rates(files(given.data), given.runs / given.part, layers, Ledger(HERE / "rates.csv"))


if __name__ == "__main__":
    main()
