#!/usr/bin/env python
"""The questions of the comparison, and how the ledger answers them: fixed before any run.

    python results/deepnorm-baseline/judge.py --text FILE --test FILE [--out results/deepnorm-baseline]

Loss on the judged text after training [nats/token], paired by seed, 95 % t-interval over six seeds, margin .05.

- A difference is "worse" or "better" if its interval lies wholly beyond the margin on that side, "alike" if it lies
  within the margin, else "cannot tell". An arm of which more than three of six runs diverged or got stuck "fails";
  fewer failed runs: "cannot tell". Runs that are missing: "open".
- P1, P2: the inverted gain against DeepNet's, at 12 and 32 layers. P3: the fixed alpha against DeepNet's, at 12 layers.
  Holm's correction over the three is printed for the test of a difference from 0; a question without all its pairs
  has p = 1.
- P4: the order changes at a depth if one of the three schemes stands on one side of DeepNorm with DeepNet's constants
  and on the other side of DeepNorm with the inverted gain. Sides: below for "worse" and "fails", above for "better" and
  where DeepNorm alone fails, level for "alike". It does not change if each of the three stands on the same side of
  both. Else "cannot tell".
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import own_rates
from own_rates import Ends
from protocol import LAYERS, SCHEMES, STUDY

HERE = Path(__file__).resolve().parent
PRIMARY = (("inverted", "deepnorm", 12), ("inverted", "deepnorm", 32), ("fixed-alpha", "deepnorm", 12))
SIDES = {"worse": -1, "fails": -1, "alike": 0, "better": 1, "only the second fails": 1}  # of a scheme beside DeepNorm


def order(ends: Ends, layers: int) -> str:
    """Return whether the inverted gain changes the place of DeepNorm among the schemes."""
    words = [
        tuple(
            own_rates.difference(STUDY, ends, scheme, baseline, layers).word() for baseline in ("deepnorm", "inverted")
        )
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
    orders = [f"P4: the order at {layers} layers: {order(ends, layers)}" for layers in LAYERS]
    return [*own_rates.answers(STUDY, ends, PRIMARY), *orders]


def main() -> None:
    given = own_rates.arguments(__doc__, HERE).parse_args()
    print("\n".join(answers(own_rates.ends_of(STUDY, own_rates.data_of(given), given.out))))


if __name__ == "__main__":
    main()
