#!/usr/bin/env python
"""The questions of the comparison of KEEL, and how the ledgers answer them: fixed before any run.

    python results/keel/judge.py --text FILE --test FILE [--out results/keel]

Loss on the judged text after training [nats/token], paired by seed, 95 % t-interval over six seeds, margin .05; the
words are those of results/deepnorm-baseline. P1, P2: KEEL less DeepNorm at 12 and 36 layers. P3, P4: KEEL less
BranchNorm. P5, P6: KEEL without its inner norm less KEEL. Holm's correction over the six is printed for the test of a
difference from 0; a question without all its pairs has p = 1.

At 200 layers: the verdicts of the three seeds of each arm at each rate, and the largest rate at which all three train
(none, or open while runs are missing). A run trains if its verdict is "trained" or "learning": its loss is below that
of a model that knows only the frequencies of words.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import own_rates
from own_rates import End, Ends
from protocol import DEEP_ARMS, DEEP_RATES, DEEP_SEEDS, LAYERS, STUDY, deep

from stabilitylab.sweep import Ledger

HERE = Path(__file__).resolve().parent
PAIRS = (("keel", "deepnorm"), ("keel", "branchnorm"), ("keel-no-inner", "keel"))
PRIMARY = [(first, second, layers) for first, second in PAIRS for layers in LAYERS]
TRAINS = ("trained", "learning")
Deep = Mapping[tuple[str, float], Mapping[int, End]]  # (arm, rate) -> seed -> end, at 200 layers


def answers(ends: Ends) -> list[str]:
    """Return the answers of P1 to P6, a line each."""
    return own_rates.answers(STUDY, ends, PRIMARY)


def largest_rate(own: Mapping[float, Mapping[int, End]]) -> str:
    """Return the largest rate at which all seeds of an arm train, "none", or "open"."""
    for rate in sorted(DEEP_RATES, reverse=True):
        ends = own.get(rate, {})
        if not all(end.verdict in TRAINS for end in ends.values()):
            continue
        return f"{rate:g}" if all(seed in ends for seed in DEEP_SEEDS) else "open"
    return "none"


def deep_rows(ends: Deep) -> Iterator[tuple[str, list[str], str]]:
    """Yield each arm at 200 layers with the verdicts of the seeds at each rate, and the largest rate of all seeds."""
    for arm in DEEP_ARMS:
        own = {rate: ends.get((arm, rate), {}) for rate in DEEP_RATES}
        verdicts = [", ".join(end.verdict for _, end in sorted(found.items())) or "open" for found in own.values()]
        yield arm, verdicts, largest_rate(own)


def deep_table(ends: Deep) -> list[str]:
    """Return :func:`deep_rows`, a line an arm."""
    lines = []
    for arm, verdicts, largest in deep_rows(ends):
        cells = "; ".join(f"{rate:g}: {told}" for rate, told in zip(DEEP_RATES, verdicts, strict=True))
        lines.append(f"{arm} at 200 layers: {cells}; largest rate at which all train: {largest}")
    return lines


def main() -> None:
    given = own_rates.arguments(__doc__, HERE).parse_args()
    data = own_rates.data_of(given)
    deepest, found = Ledger(given.out / "deep.csv"), {}
    for arm, rate, seed, experiment in deep(data):
        if (end := own_rates.end_of(deepest, experiment)) is not None:
            found.setdefault((arm, rate), {})[seed] = end
    print("\n".join((*answers(own_rates.ends_of(STUDY, data, given.out)), *deep_table(found))))


if __name__ == "__main__":
    main()
