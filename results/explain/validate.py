"""Makes and judges the runs of the validation of ``stabilitylab explain``: ``python results/explain/validate.py``.

Each cell (set, kind, model, seed) is a line of cells.csv; a cell that is there is not made again. ``--say`` prints the
tables of what is there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faults import FAULTS, LISTED
from healthy import DECOYS, HEALTHY
from subjects import FIRST, STEPS, Loop, loss_fn

sys.path.append(str(Path(__file__).resolve().parents[1]))

from page_blocks import differing, renewed
from shared import Lines, rows_of

import stabilitylab as sl
from stabilitylab.diagnose import diagnose
from stabilitylab.errors import StabilityLabError
from stabilitylab.reports.statistics import t_interval

SETS = {"fault": FAULTS, "healthy": HEALTHY, "decoy": DECOYS}
MODELS = ("decoder-only", "encoder-decoder")
SEEDS = (11, 12, 13)
WITHIN = 10  # updates: a right step lies so near to the update at which the fault begins
FILE = Path(__file__).with_name("cells.csv")
ROOT = FILE.resolve().parents[2]
PAGES = (FILE.with_name("README.md"), ROOT / "docs" / "explain.md")
COLUMNS = (
    *("set", "kind", "model", "seed", "verdict", "named", "place", "step", "right", "accused", "wrong", "updates"),
    *("loss_before", "loss_after", "diagnose", "error"),
)


def recorder(loop: Loop) -> Any:
    """The settings that every cell is recorded with."""
    scheduler = getattr(loop, "scheduler", None)
    return sl.Recorder(
        loss_fn, every=20, keep=(1, 2, 4), digests=5, after=24, labels="labels", masks="mask", scheduler=scheduler,
        accumulate=1,
    )  # fmt: skip


def train(loop: Loop, out: Path, steps: int = STEPS) -> list[float]:
    """Train a loop under watch; return its losses."""
    torch.manual_seed(loop.seed)
    losses = []
    with sl.watch(
        loop.model, out=out, optimizer=loop.optimizer, record=recorder(loop), probes="standard", every=5, reference=None
    ) as w:
        for t in range(steps):
            loop.between(t)
            total = 0.0
            for part in range(loop.micro):
                given = w.batch(loop.batch(t, part))
                loss = loop.loss(t, given)
                loss.backward()
                total += loss.detach()
            loop.gradients(t)
            w.step(loss=total)
            loop.handed(t)
            for _ in range(loop.steps):
                loop.optimizer.step()
            loop.after(t)
            if loop.zeroes:
                loop.optimizer.zero_grad()
            losses.append(float(total))
    return losses


def explained(kind: type[Loop], model: str, seed: int, out: Path) -> Any:
    """Explain a run with a fresh loop that does what is declared; a fault in the model itself is there too."""
    fresh = kind(model, seed) if kind.own or hasattr(kind(model, seed), "scheduler") else Loop(model, seed)
    if not kind.own and kind.make_optimizer is not Loop.make_optimizer:
        fresh = kind(model, seed)
    return sl.explain(out, fresh.model, loss_fn, fresh.optimizer, scheduler=getattr(fresh, "scheduler", None))


def judged(kind: type[Loop], found: Any) -> dict[str, Any]:
    """Hold an explanation against the fault: ``right`` if the first thing that it names is of an allowed kind, in an
    allowed place, within :data:`WITHIN` updates; ``accused``: it names anything; ``wrong``: it names something else."""
    accused = [one for one in found.findings if one.accused]
    cause = found.cause
    own = found.experiment.causes[0].intervention if cause else None
    if own is not None:
        named = own.finding.kind if own.finding is not None else cause
        place, step = own.finding.place if own.finding is not None else cause, own.step
    elif accused and found.verdict in ("cause", "finding", "no lasting harm"):
        named, place, step = accused[0].kind, accused[0].place, accused[0].step
    else:
        named, place, step = "", "", None
    begins = 0 if kind.own else FIRST
    near = step is not None and (kind.own or abs(step - begins) <= WITHIN)
    fits = any(one == named or one in named for one in kind.kinds) if named else False
    in_place = not kind.places or any(one in place for one in kind.places)
    right = (fits and in_place and near) if kind.scope and kind.kinds else not named
    return {
        "verdict": found.verdict, "named": named, "place": place, "step": step, "right": int(right),
        "accused": int(bool(named)), "wrong": int(bool(named) and not right), "updates": found.updates,
    }  # fmt: skip


def cell(group: str, name: str, model: str, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """Make one cell: train, explain, judge."""
    kind = SETS[group][name]
    row: dict[str, Any] = {"set": group, "kind": name, "model": model, "seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        losses = train(kind(model, seed), out, steps)
        row |= {"loss_before": np.mean(losses[FIRST - 10 : FIRST]), "loss_after": np.mean(losses[-10:])}
        try:
            first = diagnose(sl.Run.open(out)).events[:1]
            row["diagnose"] = first[0].kind if first else ""
            row |= judged(kind, explained(kind, model, seed, out))
        except StabilityLabError as error:
            row["error"] = str(error)
    return row


def run(groups: list[str], kinds: list[str], models: list[str], seeds: list[int], file: Path) -> None:
    """Make the cells that are missing, one line each."""
    lines = Lines(file, COLUMNS, end="\r\n")
    for group in groups:
        for name in SETS[group]:
            for model in models:
                for seed in seeds:
                    if (kinds and name not in kinds) or lines.has(group, name, model, seed):
                        continue
                    row = cell(group, name, model, seed)
                    lines.add(row)
                    print(group, name, model, seed, row.get("verdict", row.get("error")), row.get("right"), flush=True)


def share(rows: list[dict[str, str]], column: str) -> tuple[float, float, float, int]:
    """Return a share and its 95 % interval; the unit is the kind: its cells are averaged first."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_kind[row["kind"]].append(float(row[column] or 0))
    found = t_interval(float(np.mean(values)) for values in by_kind.values())
    low, high = (found.low, found.high) if found.n < 2 else (max(0.0, found.low), min(1.0, found.high))
    return found.mean, low, high, found.n


def say(rows: list[dict[str, str]]) -> str:
    """Return the table of goals."""
    scope = {name for name, kind in FAULTS.items() if kind.scope}
    listed = {kind.__name__ for kind in LISTED}
    faults = [row for row in rows if row["set"] == "fault"]
    inside = [row for row in faults if row["kind"] in scope]
    lines = [
        ("right cause or finding, faults in the declared scope", inside, "right", "at least .85"),
        ("of them, kinds that were listed", [r for r in inside if r["kind"] in listed], "right", ""),
        ("of them, new kinds", [r for r in inside if r["kind"] not in listed], "right", ""),
        ("wrong name, all faults", faults, "wrong", "at most .05"),
        ("accused, healthy changes", [r for r in rows if r["set"] == "healthy"], "accused", "at most .05"),
        ("right cause, decoys", [r for r in rows if r["set"] == "decoy"], "right", "at least .80"),
    ]
    text = ["| what | share [95 %, by kind] | kinds | goal |", "|---|---|---|---|"]
    for what, own, column, goal in lines:
        middle, low, high, count = share(own, column)
        text.append(f"| {what} | {middle:.2f} [{low:.2f}, {high:.2f}] | {count} | {goal} |")
    costs = [float(row["updates"]) for row in rows if row["updates"]]
    if costs:
        text.append(f"\nCost: {np.median(costs):.0f} updates replayed a run (median), at most {max(costs):.0f}.")
    if failed := sum(bool(row["error"]) for row in rows):
        text.append(f"{failed} cells ended with an error, which counts as naming nothing.")
    return "\n".join(text)


def by_kind(rows: list[dict[str, str]]) -> str:
    """Return the table of kinds: cells that are right, what is named there most often, and diagnose's first event."""
    text = ["| set | kind | right | names most often | diagnose's first event, most often |", "|---|---|---|---|---|"]
    kinds = dict.fromkeys((row["set"], row["kind"]) for row in rows)
    for group, name in kinds:
        own = [row for row in rows if (row["set"], row["kind"]) == (group, name)]
        right = sum(int(row["right"] or 0) if row["set"] != "healthy" else 1 - int(row["accused"] or 0) for row in own)
        word = name if group != "fault" or FAULTS[name].scope else f"{name} (out of scope)"
        text.append(f"| {group} | {word} | {right} of {len(own)} | {most(own, 'named')} | {most(own, 'diagnose')} |")
    return "\n".join(text)


def most(rows: list[dict[str, str]], column: str) -> str:
    """Return the most frequent entry of a column, with its count; "nothing" for an empty one."""
    entry, count = Counter(row[column] for row in rows).most_common(1)[0]
    return f"{entry or 'nothing'} ({count})"


def anew(rows: list[dict[str, str]]) -> Callable[[str], str]:
    """Return what puts the tables of the cells between the marks of a page."""
    blocks = {"goals": lambda: say(rows).splitlines(), "kinds": lambda: by_kind(rows).splitlines()}
    return lambda page: renewed(page, blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--say", action="store_true", help="print the tables of what is there, and make nothing")
    parser.add_argument("--write", action="store_true", help="put these tables into the pages that show them")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not (given.say or given.write):
        run(given.sets, given.kinds, given.models, given.seeds, given.out)
    rows = rows_of(given.out)
    print(f"{say(rows)}\n\n{by_kind(rows)}")
    if given.write:
        differing(PAGES, anew(rows), write=True)


if __name__ == "__main__":
    main()
