#!/usr/bin/env python
"""Scores ``diagnose`` and ``preflight`` on the corpus: the cause that was put in against the one that is named first.

    python results/alarm/diagnosed.py [--half train]      # confusion.csv, judged.csv, bounds.csv

``judged.csv``: by the rules with which the runs were diagnosed; those of the training half are not all the same, since
rules moved on it. ``bounds.csv``: what rules that moved or came later say of the numbers that were kept.

The map from causes to what can be named from tables was committed before any run was diagnosed. A cause that leaves
nothing but a worse loss (a corrupt shard, labels of other sentences) cannot be named: right is then to name no cause.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from corpus import HERE, CorpusRun, lines, read
from scipy.stats import binomtest
from score import write

from stabilitylab.check.bounds import BOUNDS
from stabilitylab.diagnose.detectors.beginning import EXPLODED_LOSS, explosion
from stabilitylab.diagnose.detectors.edge import BEYOND, late_median

# What anything may end in: they name no cause.
SYMPTOMS = frozenset({"loss_spike", "loss_rise", "divergence", "plateau"})
# An update that is too large shows as one of these, or not at all.
RATE = frozenset({"update_jump", "ln_growth", "beyond_the_edge"})
# Commits that made runs of the training half, and the rules of diagnose at that time.
RULES = {"51e807d0b80c": "as they were", "1670a44d83f1": "moved, without beyond_the_edge"}
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
LANGUAGE_MODELS = ("gpt2", "llama")  # how the names of these subjects begin
CURVED_EVERY = 20  # rows between two looks at curvature; a signal stays what it was in between


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
    return {"share": f"{value:.4f}", "low": f"{low:.4f}", "high": f"{high:.4f}", "of": str(of)}


def ill(run: Mapping[str, str]) -> bool:
    """Whether something was wrong with it: a fault from outside, or a failure from within."""
    return bool(run["at"]) or bool(run["failed"])


def rules_of(run: Mapping[str, str]) -> str:
    return RULES.get(run["commit"], "as they are")


def judged(runs: Sequence[Mapping[str, str]]) -> Iterable[dict[str, str]]:
    """Shares: right of what was ill, healthy runs accused or left open, the majority's cause, preflight's."""
    told = [(run, json.loads(run["diagnosis"]), json.loads(run["preflight"])) for run in runs]
    sick = [(run, found, before) for run, found, before in told if ill(run) and run["family"] in NAMEABLE]
    well = [(run, found, before) for run, found, before in told if not ill(run) and not run["open"]]
    can = [(run, found) for run, found, _ in sick if NAMEABLE[run["family"]]]
    most = Counter(kind for run, _, _ in sick for kind in (NAMEABLE[run["family"]] or {""}))
    kind = max(sorted(most), key=most.__getitem__, default="")
    always = sum(kind in (NAMEABLE[run["family"]] or {""}) for run, _, _ in sick)
    within = [(run, before) for run, _, before in told if run["failed"] and not run["at"]]
    measures = {
        "right cause, of what was wrong": (sum(is_right(run["family"], d) for run, d, _ in sick), len(sick)),
        "right cause, of what can be named": (sum(is_right(run["family"], d) for run, d in can), len(can)),
        f"always the most frequent cause ({kind or 'none'})": (always, len(sick)),
        "said to be ill, of what was": (sum(d["verdict"] in ACCUSED for _, d, _ in sick), len(sick)),
        "accused, of healthy runs": (sum(d["verdict"] in ACCUSED for _, d, _ in well), len(well)),
        "called open, of healthy runs": (sum(d["verdict"] == "open" for _, d, _ in well), len(well)),
        "preflight fails, of failures from within": (sum(bool(b["fail"]) for _, b in within), len(within)),
        "preflight fails, of healthy runs": (sum(bool(b["fail"]) for _, _, b in well), len(well)),
    }
    for name, (right, of) in measures.items():
        yield {"measure": name, **share(right, of)}


def bounds(runs: Sequence[Mapping[str, str]], columns: Sequence[CorpusRun]) -> Iterable[dict[str, str]]:
    """How often a run is beyond a bound: of healthy ones, and of failures from within (beyond the edge: of those by a
    rate that was too high)."""
    edges = {own.name: late_median(own.columns["to_edge.level"][::CURVED_EVERY]) for own in columns}
    exploded = {own.name: explosion(until_broken(own.columns["nll"])) is not None for own in columns}
    moved = {run["run"]: max(json.loads(run["preflight"])["numbers"]["moved"].values()) for run in runs}
    for name, values, limit in (
        ("beyond_the_edge", edges, BEYOND),
        ("early_explosion", exploded, EXPLODED_LOSS),
        ("output moved", moved, BOUNDS["output moved", "warn"].limit),
    ):
        groups: dict[str, list[bool]] = {"healthy": [], "failures": []}
        for run in runs:
            value = values[run["run"]]
            beyond = value if isinstance(value, bool) else value > limit
            by_rate = NAMEABLE.get(run["family"]) == RATE
            if not ill(run) and not run["open"]:
                groups["healthy"].append(beyond)
            elif run["failed"] and not run["at"] and (by_rate or name != "beyond_the_edge"):
                groups["failures"].append(beyond)
        for group, found in groups.items():
            yield {"bound": name, "limit": f"{limit:g}", "runs": group, **share(sum(found), len(found))}
    for language in (True, False):
        for group, wanted in (("healthy", False), ("failures", True)):
            fails = [
                bool(json.loads(run["preflight"])["fail"])
                for run in runs
                if not run["open"]
                and not run["at"]
                and bool(run["failed"]) == wanted
                and run["subject"].startswith(LANGUAGE_MODELS) == language
            ]
            name = f"preflight fails, {'GPT-2 and LLaMA' if language else 'reference Transformers'}"
            yield {"bound": name, "limit": "", "runs": group, **share(sum(fails), len(fails))}


def until_broken(losses: np.ndarray) -> np.ndarray:
    """The losses before the first that is not finite."""
    broken = np.flatnonzero(~np.isfinite(losses))
    return losses[: broken[0]] if len(broken) else losses


def confusion(runs: Sequence[Mapping[str, str]]) -> Iterable[dict[str, Any]]:
    """How often each kind came first, by what was put in (``healthy``: nothing was wrong, ``open``: undecided)."""
    kinds: dict[str, Counter[str]] = {}
    for run in runs:
        family = run["family"] if ill(run) else "open" if run["open"] else "healthy"
        first = sorted(json.loads(run["diagnosis"])["first"]) or ["nothing"]
        kinds.setdefault(family, Counter())[" + ".join(first)] += 1
    for family, counts in sorted(kinds.items()):
        for kind, runs_of in sorted(counts.items()):
            yield {"put in": family, "first": kind, "runs": runs_of}


def main(halves: Sequence[str], folder: Path = HERE) -> None:
    runs = [run for run in lines(folder) if run["half"] in halves]
    made: dict[tuple[str, str], list[dict[str, str]]] = {}
    for run in runs:
        made.setdefault((run["half"], rules_of(run)), []).append(run)
    told = [{"half": half, "rules": rules, **line} for (half, rules), own in made.items() for line in judged(own)]
    write(folder / "judged.csv", told)
    first: list[dict[str, Any]] = []
    beyond: list[dict[str, Any]] = []
    for half in halves:
        own = [run for run in runs if run["half"] == half]
        first += [{"half": half, **line} for line in confusion(own)]
        beyond += [{"half": half, **line} for line in bounds(own, read(half, folder))]
    write(folder / "confusion.csv", first)
    write(folder / "bounds.csv", beyond)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("train", "test"), help="leave the other half unopened")
    options = parser.parse_args()
    main([options.half] if options.half else ["train", "test"])
