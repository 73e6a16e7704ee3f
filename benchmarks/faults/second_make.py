#!/usr/bin/env python
"""Makes the second corpus, run by run; what is there is not made again, so a stopped call goes on where it was.

    nice -n 19 python benchmarks/faults/second_make.py --data PATH/multi30k --out runs/second [--part 1/2]

A run is one Parquet file, written when it is whole, and one line of ``ledger.jsonl``. Each part writes a ledger of its
own (``ledger-1-of-2.jsonl``). First come the sweeps that find the edge of each subject (``edges/``). ``--more`` tops
up, once all runs are there, if there are too few failures. ``--count`` says what there is to do, and trains nothing.
``results/alarm/second/gather.py`` takes what is to be committed.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow.parquet as pq
import torch
from make import COMMIT, facts_of, store
from second_families import FAMILIES, ROWS, SecondPlan
from second_labels import Labels, labels
from second_recipes import PILOT, counts, enough, half, more, recipes
from second_training import COLUMNS, HELD_EVERY, Kept, train
from subjects import SECOND
from training import Recipe

LOW, HIGH = 2e-4, 0.4  # rates of a sweep
BEHIND, IN_A_ROW = 0.25, 3  # nats over the lowest held-out loss, in evaluations one after the other
LIGHT = ("grad_norm",)
Say = Callable[[str], object]


def edge_of(kept: Kept) -> float:
    """Return the rate at which a sweep broke: its held-out loss stayed .25 nats above its lowest for three evaluations,
    or a number was not finite; that of its end if it did not break."""
    rates, held = kept.columns["lr"], kept.columns["held_out"]
    lowest, above = math.inf, 0
    for row in np.flatnonzero(~np.isnan(held)):
        above = above + 1 if held[row] > lowest + BEHIND else 0
        lowest = min(lowest, float(held[row]))
        if above == IN_A_ROW:
            return float(rates[row - (IN_A_ROW - 1) * HELD_EVERY])
    return float(rates[-1])


def sweep(subject: str, seed: int, text: Path | None, updates: int) -> Kept:
    """Train a run whose rate goes from 2e-4 to .4."""
    what = SecondPlan(rate=lambda row: LOW * (HIGH / LOW) ** (row / updates))
    return train(Recipe(subject, seed, "sweep"), 1.0, text, updates, what, LIGHT)


def edges(
    out: Path, text: Path | None, subjects: Iterable[str], updates: int = ROWS, say: Say = print
) -> dict[str, float]:
    """Return the edge of each subject, the geometric mean of two sweeps; sweeps that are not there are made."""
    found = {}
    for subject in subjects:
        rates = []
        for seed in PILOT:
            path = out / "edges" / f"{subject}-s{seed}.json"
            if not path.exists():
                kept = sweep(subject, seed, text, updates)
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_name(f".{path.name}")
                told = {"subject": subject, "seed": seed, "rate": edge_of(kept), "seconds": kept.seconds}
                part.write_text(json.dumps(told))
                part.rename(path)
                say(f"sweep {subject} seed {seed}: {told['rate']:.3g}, {kept.seconds:.1f} s")
            rates.append(json.loads(path.read_text())["rate"])
        found[subject] = math.exp(float(np.mean(np.log(rates))))
    return found


def path_of(recipe: Recipe, out: Path) -> Path:
    return out / f"{recipe.name}.parquet"


def columns_of(path: Path) -> dict[str, np.ndarray]:
    """Return the columns of a finished run."""
    table = pq.read_table(path)
    return {name: table[name].to_numpy().astype(float) for name in table.column_names}


def make(recipe: Recipe, out: Path, edge: float, text: Path | None, updates: int = ROWS) -> dict[str, Any] | None:
    """Make one run, and its twin before it; return its line of the ledger, None if it is there already."""
    path = path_of(recipe, out)
    if path.exists():
        return None
    twin = Recipe(recipe.subject, recipe.seed, "twin")
    if recipe.family != "twin":
        make(twin, out, edge, text, updates)
    kept = train(recipe, edge, text, updates)
    told = facts(recipe, kept, edge)
    store({name: kept.columns[name] for name in COLUMNS}, told, path)
    ended = labels(columns_of(path), None if recipe.family == "twin" else columns_of(path_of(twin, out)))
    return line(told, ended)


def facts(recipe: Recipe, kept: Kept, edge: float) -> dict[str, Any]:
    """Return what a run was, and what was said of it."""
    family = FAMILIES[recipe.family]
    return {
        **asdict(recipe),
        "run": recipe.name,
        "half": half(recipe.seed),
        "kind": family.kind,
        "edge": edge,
        "rows": len(kept.columns["nll"]),
        "at": kept.at,
        "diagnosis": kept.diagnosis,
        "seconds": round(kept.seconds, 2),
        "commit": COMMIT,
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def line(told: dict[str, Any], ended: Labels) -> dict[str, Any]:
    """Return the line of the ledger of a finished run."""
    names = ("run", "half", "kind", "subject", "family", "seed", "strength", "rows", "at", "seconds")
    collapse = None if ended.collapse is None else ended.collapse[0]
    event = None if ended.event is None else ended.event.kind
    return {**{name: told[name] for name in names}, "outcome": ended.outcome, "event": event, "collapse": collapse}


def ledger(out: Path) -> list[dict[str, Any]]:
    """Return the lines of all ledgers of a folder; a line that was cut short is left out."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(out.glob("ledger*.jsonl")):
        for text in path.read_text().splitlines():
            try:
                told = json.loads(text)
            except ValueError:
                continue
            found[told["run"]] = told
    return list(found.values())


def completed(out: Path, own: Path) -> None:
    """Add the lines of runs that are there and have none: a process may end between a run and its line."""
    told = {one["run"] for one in ledger(out)}
    for path in sorted(out.glob("*.parquet")):
        if path.stem not in told:
            known = facts_of(path)
            twin = out / f"{known['subject']}-twin-s{known['seed']}.parquet"
            if twin.exists():
                _add(own, line(known, labels(columns_of(path), None if twin == path else columns_of(twin))))


def todo(out: Path, subjects: Iterable[str], topped: bool) -> Iterator[Recipe]:
    """Yield the runs that are not there, of these subjects; those of a topping-up until there are enough failures."""
    mine = set(subjects)
    if not topped:
        yield from (own for own in recipes() if own.subject in mine and not path_of(own, out).exists())
        return
    for own in more(ledger(out)):
        if own.subject in mine and not path_of(own, out).exists():
            if enough(ledger(out)):
                return
            yield own


def _add(path: Path, told: dict[str, Any]) -> None:
    """Add a line; one that was cut short before stays a line of its own."""
    torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a") as file:
        file.write(("\n" if torn else "") + json.dumps(told) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of Multi30k; without it, the synthetic task")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default="1/1", help="1/2 and 2/2: two processes, each with every second subject")
    parser.add_argument("--more", action="store_true", help="top up, once all runs are there")
    parser.add_argument("--count", action="store_true", help="say what there is to do, and train nothing")
    parser.add_argument("--most", type=int, help="end after so many runs")
    parser.add_argument("--updates", type=int, default=ROWS, help="updates of a run; for trials of this script")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    part, parts = map(int, options.part.split("/"))
    subjects = list(SECOND)[part - 1 :: parts]
    own = options.out / ("ledger.jsonl" if parts == 1 else f"ledger-{part}-of-{parts}.jsonl")
    completed(options.out, own)
    if options.more and (left := sum(1 for _ in todo(options.out, SECOND, False))):
        print(f"{left} runs are not there yet: make them first, without --more.", file=sys.stderr)
        return 2
    left = list(todo(options.out, subjects, options.more))
    told = ledger(options.out)
    seconds = [one["seconds"] for one in told]
    each = f", {sum(seconds) / len(seconds):.1f} s of one core each" if seconds else ""
    print(f"{len(told)} runs are there{each}; {len(left)} to do", file=sys.stderr, flush=True)
    if options.count:
        return 0
    found = edges(options.out, options.data, subjects, options.updates, lambda text: print(text, file=sys.stderr))
    queue, broken = todo(options.out, subjects, True) if options.more else iter(left), list[str]()
    for number, recipe in enumerate(queue, 1):
        if options.most is not None and number > options.most:
            break
        try:
            made = make(recipe, options.out, found[recipe.subject], options.data, options.updates)
        except Exception:  # the others go on; the next call tries it again
            broken.append(recipe.name)
            logging.exception("%s could not be made", recipe.name)
            continue
        completed(options.out, own)  # its line, and its twin's if that was made for it
        if made is not None:
            events, collapses = counts(ledger(options.out))
            print(
                f"{number}/{len(left)} {recipe.name}: {made['outcome']}, {made['seconds']:.1f} s; "
                f"{events} events and {collapses} collapses from within",
                file=sys.stderr,
                flush=True,
            )
    if broken:
        print(f"{len(broken)} runs could not be made: {', '.join(broken[:5])}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
