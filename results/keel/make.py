#!/usr/bin/env python
"""Trains the comparison of KEEL: the search of each arm's rate at 12 and 36 layers, six seeds of each arm at its own
rate, and 200 layers at two rates. Resumable.

    python results/keel/make.py search judged deep --text FILE --valid FILE --test FILE [--runs runs/keel]
        [--layers 12|36] [--arm ARM ...] [--workers N]

``search`` writes ``rates.csv``, ``searches/`` and the ledger ``search.csv``; ``judged`` the ledger ``ledger.csv``;
``deep`` the ledger ``deep.csv``. A stopped call goes on where it was. README.md names the three texts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))

from own_rates import make
from protocol import STUDY, deep

HERE = Path(__file__).resolve().parent


def main() -> None:
    make(__doc__, STUDY, HERE, {"deep": lambda data: [experiment for *_, experiment in deep(data)]})


if __name__ == "__main__":
    main()
