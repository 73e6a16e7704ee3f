"""Make the three ledgers: ``python results/setups/make.py``; ``--only NAME`` shows a case and writes nothing."""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from faults import FAULTS, Fault
from later import LATER
from setups import SETUPS

import stabilitylab as sl

HERE = Path(__file__).resolve().parent
COLUMNS = {
    "faults": ("bug", "source", "ranks", "first finding", "found", "measured", "findings without the bug"),
    "setups": ("set-up", "ranks", "findings", "accused", "answered", "not checked"),
}


def every(size: int) -> list[tuple[str, Any]]:
    """The cases of so many ranks: (name, function that returns the arguments)."""
    cases: list[tuple[str, Any]] = [(one.name, one.make) for one in SETUPS if one.ranks == size]
    for one in (*FAULTS, *LATER):
        if one.ranks == size:
            cases += [
                (one.name, lambda one=one: one.make(True)),
                (f"without: {one.name}", lambda one=one: one.make(False)),
            ]
    return cases


def run(rank: int, folder: Path, size: int, names: Sequence[str], show: bool) -> None:
    """All cases on one rank; rank 0 writes what it was told."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{size}", rank=rank, world_size=size)
    told: dict[str, Any] = {}
    for name, make in every(size):
        if names and name not in names:
            continue
        try:
            found = sl.check_ranks(**make())
            told[name] = found.as_dict()
            if show and rank == 0:
                print(f"{name}\n{found}\n", flush=True)
        except Exception:
            told[name] = traceback.format_exc()
            print(f"rank {rank}: {name}: {told[name]}", file=sys.stderr, flush=True)
            break
    if rank == 0:
        torch.save(told, folder / f"told-{size}.pt")
    dist.barrier() if len(told) else None
    os._exit(0)


def answers(names: Sequence[str] = (), show: bool = False) -> dict[str, Any]:
    """Every case and what ``check_ranks`` said."""
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in (2, 4):
            if not names or {name for name, _ in every(size)} & set(names):
                processes.start_processes(  # pyright: ignore[reportPrivateImportUsage]
                    run, (Path(folder), size, tuple(names), show), nprocs=size, start_method="spawn", join=True
                )
                told |= torch.load(Path(folder) / f"told-{size}.pt", weights_only=False)
    return told


def rows(told: dict[str, Any]) -> dict[str, list[dict[str, str]]]:
    """The three ledgers, of the cases in ``told``."""
    setups = []
    for one in (one for one in SETUPS if one.name in told):
        found = _findings(told[one.name])
        checks = [] if isinstance(told[one.name], str) else told[one.name]["checks"]
        left = [check["name"] for check in checks if check["state"] == "not checked"]
        said = "; ".join(each["bound"] for each in found)
        values = (one.name, one.ranks, said, bool(found), len(checks) - len(left), "; ".join(left))
        setups.append(dict(zip(COLUMNS["setups"], map(str, values), strict=True)))
    found_of = {
        name: [_row(one, told) for one in own if {one.name, f"without: {one.name}"} <= told.keys()]
        for name, own in (("faults", FAULTS), ("later", LATER))
    }
    return {**found_of, "setups": setups}


def _row(one: Fault, told: dict[str, Any]) -> dict[str, str]:
    found, clean = _findings(told[one.name]), _findings(told[f"without: {one.name}"])
    first = found[0] if found else {"bound": "", "text": ""}
    right = first["bound"] in one.checks and not clean
    without = "; ".join(each["bound"] for each in clean)
    values = (one.name, one.source, one.ranks, first["bound"], right, first["text"], without)
    return dict(zip(COLUMNS["faults"], map(str, values), strict=True))


def _findings(told: Any) -> list[dict[str, Any]]:
    return [{"bound": "it raised", "text": told.splitlines()[-1]}] if isinstance(told, str) else told["findings"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="A case's name; repeatable. The ledgers here are not written then.",
    )
    parser.add_argument("--folder", type=Path, default=HERE, help="Where the ledgers are written.")
    given = parser.parse_args()
    told = answers(given.only, show=bool(given.only))
    if given.only and given.folder == HERE:  # whose ledgers have all cases
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, ledger in rows(told).items():
        with (given.folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS["setups" if name == "setups" else "faults"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(ledger)


if __name__ == "__main__":
    main()
