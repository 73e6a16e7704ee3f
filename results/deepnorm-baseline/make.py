#!/usr/bin/env python
"""Trains the comparison: the search of each arm's rate, then six seeds of each arm at its own rate. Resumable.

    python results/deepnorm-baseline/make.py search judged --text FILE --valid FILE [--runs runs] [--layers 12|32]

``search`` writes ``rates.csv``, ``searches/`` and the ledger ``search.csv``; ``judged`` the ledger ``ledger.csv``. A
stopped call goes on where it was. The text is a plain file or ``.gz``; README.md names the one that is judged.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))

from own_rates import planned, search, train
from protocol import LAYERS, STUDY

from stabilitylab.sweep import Ledger

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("search", "judged"))
    parser.add_argument("--text", type=Path, required=True, help="the text that is learned")
    parser.add_argument("--valid", type=Path, required=True, help="the text of the judged loss")
    parser.add_argument("--runs", type=Path, default=Path("runs/deepnorm-baseline"))
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the ledgers and tables")
    parser.add_argument("--layers", type=int, choices=LAYERS, help="both depths unless given")
    given = parser.parse_args()
    data = {"data": {"source": f"text:{given.text}", "valid": str(given.valid)}}
    for part in given.parts:
        for layers in (given.layers,) if given.layers else LAYERS:
            if part == "search":
                for arm in STUDY.arms(layers):
                    search(STUDY, arm, layers, data, given.runs, given.out)
            else:
                wanted = [experiment for _, _, experiment in planned(STUDY, layers, data, given.out)]
                train(wanted, given.runs / "judged", Ledger(given.out / "ledger.csv"))


if __name__ == "__main__":
    main()
