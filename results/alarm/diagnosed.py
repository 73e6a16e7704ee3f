#!/usr/bin/env python
"""Scores ``diagnose`` and ``preflight`` on the corpus: the cause that was put in against the one that is named first.

    python results/alarm/diagnosed.py      # confusion.csv, judged.csv

The map from causes to what can be named from tables was committed before any run was diagnosed. A cause that leaves
nothing but a worse loss (a corrupt shard, labels of other sentences) cannot be named: right is then to name no cause.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from corpus import HERE, lines
from scipy.stats import binomtest
from score import write

SYMPTOMS = frozenset(
    {"loss_spike", "loss_rise", "divergence", "plateau"}
)  # what anything may end in: they name no cause
RATE = frozenset(
    {"update_jump", "ln_growth", "beyond_the_edge"}
)  # an update that is too large shows as one of these, or not at all
NAMEABLE: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("rate", "ramp", "no_warmup", "slow_moment", "fast_moment", "tiny_eps", "no_decay"), RATE),
    "bf16_weights": RATE,
    "fp16_scale": frozenset({"non_finite"}),
    "attention_growth": frozenset(),  # the probe of attention's entropy is not in the corpus
    "embedding_scale": frozenset(),  # it stands there from the start, and detectors look for changes
    "corrupt_batch": frozenset(),
    "corrupt_shard": frozenset(),
    "shuffled_labels": frozenset(),
    "repeated_batch": frozenset(),
    "rate_jump": frozenset({"lr_jump"}),
    "frozen_layer": frozenset({"dead_layer"}),
    "scaled_layer": frozenset({"exploding_gradient"}),
    "missing_zero_grad": frozenset({"exploding_gradient"}),
}
ACCUSED = ("warning", "failure")


def named(diagnosis: Mapping[str, Any]) -> frozenset[str]:
    """The kinds that came first, without mere symptoms."""
    return frozenset(diagnosis["first"]) - SYMPTOMS


def is_right(family: str, diagnosis: Mapping[str, Any]) -> bool:
    """Whether what is named first is what was put in; of what cannot be named, whether nothing else is."""
    can = NAMEABLE[family]
    return bool(named(diagnosis) & can) if can else not named(diagnosis)


def share(right: int, of: int) -> dict[str, str]:
    """With its exact 95 % interval (Clopper and Pearson)."""
    low, high = binomtest(right, of).proportion_ci(method="exact") if of else (float("nan"),) * 2
    value = right / of if of else float("nan")
    return {"share": f"{value:.3f}", "low": f"{low:.3f}", "high": f"{high:.3f}", "of": str(of)}


def ill(run: Mapping[str, str]) -> bool:
    """Whether something was wrong with it: a fault from outside, or a failure from within."""
    return bool(run["at"]) or bool(run["failed"])


def judged(runs: Sequence[Mapping[str, str]], half: str) -> Iterable[dict[str, str]]:
    """Shares by seed's half: right of what was ill, healthy runs accused, the majority's cause, preflight's."""
    own = [run for run in runs if run["half"] == half]
    told = [(run, json.loads(run["diagnosis"]), json.loads(run["preflight"])) for run in own]
    sick = [(run, found, before) for run, found, before in told if ill(run) and run["family"] in NAMEABLE]
    well = [(run, found, before) for run, found, before in told if not ill(run) and not run["open"]]
    can = [(run, found) for run, found, _ in sick if NAMEABLE[run["family"]]]
    most = Counter(kind for run, _, _ in sick for kind in (NAMEABLE[run["family"]] or {""}))
    kind = most.most_common(1)[0][0] if most else ""
    always = sum(kind in (NAMEABLE[run["family"]] or {""}) for run, _, _ in sick)
    within = [(run, before) for run, _, before in sick if not run["at"]]
    measures = {
        "right cause, of what was wrong": (sum(is_right(run["family"], d) for run, d, _ in sick), len(sick)),
        "right cause, of what can be named": (sum(is_right(run["family"], d) for run, d in can), len(can)),
        f"always the most frequent cause ({kind or 'none'})": (always, len(sick)),
        "said to be ill, of what was": (sum(d["verdict"] in ACCUSED for _, d, _ in sick), len(sick)),
        "accused, of healthy runs": (sum(d["verdict"] in ACCUSED for _, d, _ in well), len(well)),
        "preflight fails, of failures from within": (sum(bool(b["fail"]) for _, b in within), len(within)),
        "preflight fails, of healthy runs": (sum(bool(b["fail"]) for _, _, b in well), len(well)),
        "preflight warns, of failures from within": (sum(bool(b["warn"]) for _, b in within), len(within)),
        "preflight warns, of healthy runs": (sum(bool(b["warn"]) for _, _, b in well), len(well)),
    }
    for name, (right, of) in measures.items():
        yield {"half": half, "measure": name, **share(right, of)}


def confusion(runs: Sequence[Mapping[str, str]]) -> Iterable[dict[str, Any]]:
    """How often each kind came first, by what was put in (``healthy``: nothing was wrong)."""
    kinds: dict[str, Counter[str]] = {}
    for run in runs:
        family = run["family"] if ill(run) else "healthy"
        first = sorted(json.loads(run["diagnosis"])["first"]) or ["nothing"]
        kinds.setdefault(family, Counter())[" + ".join(first)] += 1
    columns = sorted({kind for counts in kinds.values() for kind in counts})
    for family, counts in sorted(kinds.items()):
        yield {"put in": family, **{kind: counts[kind] for kind in columns}}


def main(folder: Path = HERE) -> None:
    runs = list(lines(folder))
    halves = sorted({run["half"] for run in runs}, reverse=True)
    write(folder / "judged.csv", [line for half in halves for line in judged(runs, half)])
    write(folder / "confusion.csv", list(confusion(runs)))


if __name__ == "__main__":
    main()
