#!/usr/bin/env python
"""Trains the comparison: the search of each arm's rate, then six seeds of each arm at its own rate. Resumable.

    python results/deepnorm-baseline/make.py search judged --text FILE --valid FILE --test FILE [--runs runs]
        [--layers 12|32] [--arm ARM ...] [--workers N]

``search`` writes ``rates.csv``, ``searches/`` and the ledger ``search.csv``; ``judged`` the ledger ``ledger.csv``. A
stopped call goes on where it was. A text is a plain file or ``.gz``; README.md names the three.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))

from own_rates import make
from protocol import STUDY

HERE = Path(__file__).resolve().parent


def main() -> None:
    make(__doc__, STUDY, HERE)


if __name__ == "__main__":
    main()
