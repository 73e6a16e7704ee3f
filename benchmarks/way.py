#!/usr/bin/env python
"""Counts the functions of ours that a number passes between a hook and the sink, and those that one ``step`` calls.

    python benchmarks/way.py [--modules]

A probe measures one number that nothing else could be, at the one norm of a model. Under ``sys.setprofile`` every
function of the package that returns before the sink has the number, or that calls the sink, is looked into: it counts
where that number stands among its arguments and local variables, in a tensor, an array, a list or a field. One row is
forward, backward, ``step``, the optimizer's step and ``flush``.

Then a model of two layers is watched, and the functions, files and calls inside one ``step`` are counted: of a row that
is not probed, and of rows of the standard and of the default probes. ``--modules`` lists the files. ``way.md`` keeps
what was printed; nothing gates on these numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from timing import Nowhere
from torch import nn

import stabilitylab
from stabilitylab.probes import Mean, Probe, Watcher, probe
from stabilitylab.probes.places import norms

HOME = Path(stabilitylab.__file__).parent
MARK = 8131.708253
DEPTH = 4  # how far a container is looked into


@probe("marked", on="forward", at=norms, columns={"value": Mean()})
class Marked(Probe):
    """A number that nothing else could be."""

    def measure(self, site: Any, x: Any, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.full((), MARK, dtype=torch.float64)


class Sink:
    """The end of the way."""

    def __init__(self) -> None:
        self.found = 0.0

    def open(self, tables: Any) -> None: ...

    def append(self, step: int, metrics: Any, tables: Any) -> None:
        self.found = float(tables["marked"].values[0, 0])
        self.arrived(sys._getframe(1))

    def arrived(self, caller: FrameType) -> None: ...

    def close(self) -> None: ...


def functions() -> tuple[dict[str, str], set[tuple[str, str]]]:
    """Those that the number passes, in order of their returns: qualified name -> file; and all that are called."""
    passed: dict[str, str] = {}
    called: set[tuple[str, str]] = set()
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watcher = Watcher(model, sink := Sink(), probes="marked", every=1, optimizer=optimizer, strict=True)

    def look(frame: FrameType, event: str, _: Any = None) -> None:
        file, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if event != "return" or HOME not in file.parents or name.endswith(">"):  # a comprehension
            return
        called.add((name, str(file.relative_to(HOME))))
        held = (value for key, value in frame.f_locals.items() if key != "self")
        if name not in passed and any(_is_marked(value) for value in held):
            passed[name] = str(file.relative_to(HOME))

    def arrived(caller: FrameType | None) -> None:
        sys.setprofile(None)
        while caller is not None:
            look(caller, "return")
            caller = caller.f_back

    def update() -> None:
        model(torch.randn(2, 4)).square().mean().backward()
        watcher.step(loss=1.0)
        optimizer.step()
        watcher.flush()

    update()
    sink.found, sink.arrived = 0.0, arrived
    sys.setprofile(look)
    update()
    watcher.close()
    if sink.found != MARK:
        raise SystemExit(f"the number did not arrive: {sink.found}")
    return passed, called


def _is_marked(value: Any, depth: int = DEPTH) -> bool:
    if isinstance(value, float):
        return value == MARK
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() and bool((value.detach() == MARK).any())
    if isinstance(value, np.ndarray):
        return value.dtype == np.float64 and bool((value == MARK).any())
    return depth > 0 and any(_is_marked(item, depth - 1) for item in _inside(value))


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set)):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, each.name) for each in dataclasses.fields(value))


def calls_of_step(probes: str, every: int) -> Counter[tuple[str, str]]:
    """(qualified name, file) -> calls inside one ``step``, the fourth of a small Transformer's: what is looked at once
    is over by then."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    watcher = Watcher(model, Nowhere(), probes=probes, every=every, optimizer=optimizer, strict=True)
    calls: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, _: Any = None) -> None:
        file, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if event == "call" and HOME in file.parents and not name.endswith(">"):
            calls[name, str(file.relative_to(HOME))] += 1

    for row in range(4):
        loss = model(torch.randn(2, 3, 8)).square().mean()
        loss.backward()
        if row == 3:
            sys.setprofile(count)
        watcher.step(loss=loss)
        sys.setprofile(None)
        optimizer.step()
        optimizer.zero_grad()
    watcher.close()
    return calls


ROWS = {"not probed": ("standard", 5), "standard": ("standard", 1), "default": ("default", 1)}  # probes, every

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Count the functions on a number's way.")
    parser.add_argument("--modules", action="store_true", help="list the files that a step enters")
    listed = parser.parse_args().modules
    found, called = functions()
    for number, (name, file) in enumerate(found.items(), start=1):
        print(f"{number:3d}  {name:40s}  {file}")
    print(f"{len(found)} functions in {len(set(found.values()))} files have the number in their hands")
    print(f"{len(called)} functions in {len({file for _, file in called})} files are called for the row")
    for row, (probes, every) in ROWS.items():
        counted = calls_of_step(probes, every)
        files = sorted({file for _, file in counted})
        print(f"step, {row}: {len(counted)} functions in {len(files)} files, {counted.total()} calls")
        for file in files if listed else ():
            names = [name for name, home in counted if home == file]
            print(f"      {file:40s}  {', '.join(names)}")
