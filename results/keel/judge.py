#!/usr/bin/env python
"""The questions of the comparison of KEEL, and how the ledgers answer them: fixed before any run.

    python results/keel/judge.py --text FILE --valid FILE [--out results/keel]

Validation loss after training [nats/token], paired by seed, 95 % t-interval over six seeds, margin .05; the words are
those of results/deepnorm-baseline. P1, P2: KEEL less DeepNorm at 12 and 36 layers. P3, P4: KEEL less BranchNorm. P5,
P6: KEEL without its inner norm less KEEL. Holm's correction over the six is printed for the test of a difference from
0.

At 200 layers: the states of the three seeds of each arm at each rate, and the largest rate at which all three train
(none, or open while runs are missing). A run trains if it neither diverged nor got stuck.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from own_rates import Difference, End, end_of, planned
from protocol import DEEP_ARMS, DEEP_RATES, DEEP_SEEDS, LAYERS, MARGIN, SEEDS, STUDY, deep

from stabilitylab.reports.statistics import holm
from stabilitylab.sweep import Ledger

HERE = Path(__file__).resolve().parent
PAIRS = (("keel", "deepnorm"), ("keel", "branchnorm"), ("keel-no-inner", "keel"))
PRIMARY = [(first, second, layers) for first, second in PAIRS for layers in LAYERS]
Ends = Mapping[tuple[str, int], Mapping[int, End]]  # (arm, layers) -> seed -> end
Deep = Mapping[tuple[str, float], Mapping[int, End]]  # (arm, rate) -> seed -> end, at 200 layers


def answers(ends: Ends) -> list[str]:
    """Return the answers of P1 to P6, a line each."""
    found = [
        Difference(ends.get((first, layers), {}), ends.get((second, layers), {}), SEEDS, MARGIN)
        for first, second, layers in PRIMARY
    ]
    corrected = holm([own.p for own in found])
    lines = []
    for number, ((first, second, layers), own, p) in enumerate(zip(PRIMARY, found, corrected, strict=True), 1):
        span = own.interval
        numbers = f"{span.mean:+.3f} [{span.low:+.3f}, {span.high:+.3f}], {span.n} seeds, Holm p = {p:.2g}"
        lines.append(f"P{number}: {first} less {second} at {layers} layers: {own.word()} ({numbers})")
    return lines


def largest_rate(own: Mapping[float, Mapping[int, End]]) -> str:
    """Return the largest rate at which all seeds of an arm train, "none", or "open"."""
    for rate in sorted(DEEP_RATES, reverse=True):
        ends = own.get(rate, {})
        if any(end.failed for end in ends.values()):
            continue
        return f"{rate:g}" if all(seed in ends for seed in DEEP_SEEDS) else "open"
    return "none"


def deep_table(ends: Deep) -> list[str]:
    """Return the states at 200 layers, a line an arm: how many of three seeds train at each rate, and the largest
    rate."""
    lines = []
    for arm in DEEP_ARMS:
        own = {rate: ends.get((arm, rate), {}) for rate in DEEP_RATES}
        cells = [
            f"{rate:g}: {sum(not end.failed for end in found.values())} of {len(found)} train"
            for rate, found in own.items()
        ]
        lines.append(f"{arm} at 200 layers: {'; '.join(cells)}; largest rate of all seeds: {largest_rate(own)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--valid", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=HERE)
    given = parser.parse_args()
    data = {"data": {"source": f"text:{given.text}", "valid": str(given.valid)}}
    ledger, ends = Ledger(given.out / "ledger.csv"), {}
    for layers in LAYERS:
        for arm, seed, experiment in planned(STUDY, layers, data, given.out):
            if (end := end_of(ledger, experiment)) is not None:
                ends.setdefault((arm, layers), {})[seed] = end
    deepest, found = Ledger(given.out / "deep.csv"), {}
    for arm, rate, seed, experiment in deep(data):
        if (end := end_of(deepest, experiment)) is not None:
            found.setdefault((arm, rate), {})[seed] = end
    print("\n".join((*answers(ends), *deep_table(found))))


if __name__ == "__main__":
    main()
