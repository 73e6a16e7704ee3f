#!/usr/bin/env python
"""Trains the comparison of KEEL: the search of each arm's rate at 12 and 36 layers, six seeds of each arm at its own
rate, and 200 layers at two rates. Resumable.

    python results/keel/make.py search judged deep --text FILE --valid FILE [--runs runs/keel] [--layers 12|36]

``search`` writes ``rates.csv``, ``searches/`` and the ledger ``search.csv``; ``judged`` the ledger ``ledger.csv``;
``deep`` the ledger ``deep.csv``. A stopped call goes on where it was. README.md names the text that is judged.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))

from own_rates import planned, search, train
from protocol import LAYERS, STUDY, deep

from stabilitylab.sweep import Ledger

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("search", "judged", "deep"))
    parser.add_argument("--text", type=Path, required=True, help="the text that is learned")
    parser.add_argument("--valid", type=Path, required=True, help="the text of the judged loss")
    parser.add_argument("--runs", type=Path, default=Path("runs/keel"))
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the ledgers and tables")
    parser.add_argument("--layers", type=int, choices=LAYERS, help="of search and judged; both unless given")
    given = parser.parse_args()
    data = {"data": {"source": f"text:{given.text}", "valid": str(given.valid)}}
    for part in given.parts:
        if part == "deep":
            wanted = [experiment for *_, experiment in deep(data)]
            train(wanted, given.runs / "deep", Ledger(given.out / "deep.csv"))
            continue
        for layers in (given.layers,) if given.layers else LAYERS:
            if part == "search":
                for arm in STUDY.arms(layers):
                    search(STUDY, arm, layers, data, given.runs, given.out)
            else:
                wanted = [experiment for _, _, experiment in planned(STUDY, layers, data, given.out)]
                train(wanted, given.runs / "judged", Ledger(given.out / "ledger.csv"))


if __name__ == "__main__":
    main()
