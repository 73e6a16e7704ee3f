#!/usr/bin/env python
"""The questions of the comparison, and how the ledger answers them: fixed before any run.

    python results/deepnorm-baseline/judge.py --text FILE --valid FILE [--out results/deepnorm-baseline]

Validation loss after training [nats/token], paired by seed, 95 % t-interval over six seeds, margin .05.

- A difference is "worse" or "better" if its interval lies wholly beyond the margin on that side, "alike" if it lies
  within the margin, else "cannot tell". An arm of which more than three of six runs diverged or got stuck "fails";
  fewer failed runs: "cannot tell". Runs that are missing: "open".
- P1, P2: the inverted gain against DeepNet's, at 12 and 32 layers. P3: the fixed alpha against DeepNet's, at 12 layers.
  Holm's correction over the three is printed for the test of a difference from 0.
- P4: the order changes at a depth if one of the three schemes stands on one side of DeepNorm with DeepNet's constants
  and on the other side of DeepNorm with the inverted gain. Sides: below for "worse" and "fails", above for "better" and
  where DeepNorm alone fails, level for "alike". It does not change if each of the three stands on the same side of
  both. Else "cannot tell".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from own_rates import Difference, End, end_of, planned
from protocol import LAYERS, MARGIN, SCHEMES, SEEDS, STUDY

from stabilitylab.reports.statistics import holm
from stabilitylab.sweep import Ledger

HERE = Path(__file__).resolve().parent
PRIMARY = (("P1", "inverted", 12), ("P2", "inverted", 32), ("P3", "fixed-alpha", 12))
Ends = Mapping[tuple[str, int], Mapping[int, End]]  # (arm, layers) -> seed -> end
SIDES = {"worse": -1, "fails": -1, "alike": 0, "better": 1, "only the second fails": 1}  # of a scheme beside DeepNorm


def difference(ends: Ends, first: str, second: str, layers: int) -> Difference:
    return Difference(ends.get((first, layers), {}), ends.get((second, layers), {}), SEEDS, MARGIN)


def order(ends: Ends, layers: int) -> str:
    """Return whether the inverted gain changes the place of DeepNorm among the schemes."""
    words = [
        tuple(difference(ends, scheme, baseline, layers).word() for baseline in ("deepnorm", "inverted"))
        for scheme in SCHEMES
    ]
    if any("open" in pair for pair in words):
        return "open"
    sides = [(SIDES.get(first), SIDES.get(second)) for first, second in words]
    if any({*pair} == {-1, 1} for pair in sides):
        return "changes"
    same = all(first == second and first is not None for first, second in sides)
    return "does not change" if same else "cannot tell"


def answers(ends: Ends) -> list[str]:
    """Return the answers, a line each."""
    found = [(name, arm, layers, difference(ends, arm, "deepnorm", layers)) for name, arm, layers in PRIMARY]
    corrected = holm([own.p for *_, own in found])
    lines = []
    for (name, arm, layers, own), p in zip(found, corrected, strict=True):
        span = own.interval
        numbers = f"{span.mean:+.3f} [{span.low:+.3f}, {span.high:+.3f}], {span.n} seeds, Holm p = {p:.2g}"
        lines.append(f"{name}: {arm} less deepnorm at {layers} layers: {own.word()} ({numbers})")
    lines += [f"P4: the order at {layers} layers: {order(ends, layers)}" for layers in LAYERS]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--valid", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=HERE)
    given = parser.parse_args()
    data = {"data": {"source": f"text:{given.text}", "valid": str(given.valid)}}
    ledger = Ledger(given.out / "ledger.csv")
    ends: dict[tuple[str, int], dict[int, End]] = {}
    for layers in LAYERS:
        for arm, seed, experiment in planned(STUDY, layers, data, given.out):
            if (end := end_of(ledger, experiment)) is not None:
                ends.setdefault((arm, layers), {})[seed] = end
    print("\n".join(answers(ends)))


if __name__ == "__main__":
    main()
