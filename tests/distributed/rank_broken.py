"""Two ranks of which one has an instrument that raises: training goes on, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_neutral import Model
from rank_toys import ListSink
from torch.nn.parallel import DistributedDataParallel

from stabilitylab.probes import Watcher
from stabilitylab.probes.instruments.instrument import Instrument
from stabilitylab.probes.instruments.parameter_tables import ParameterTables
from stabilitylab.probes.instruments.training_pass import TrainingRows

BREAKS = 2  # the row at which it raises
CASES: dict[str, tuple[type[Instrument], str]] = {
    "tables": (ParameterTables, "after_backward"),
    "updates": (ParameterTables, "after_update"),
    "pass": (TrainingRows, "after_backward"),
}


def trained(broken: tuple[type[Instrument], str] | None, watched: bool = True) -> dict[str, Any]:
    torch.manual_seed(3)
    model = DistributedDataParallel(Model("nothing"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sink = ListSink()
    names = "grad_norm,update_ratio,ln_input"
    watcher = Watcher(model, sink, probes=names, every=1, optimizer=optimizer) if watched else None
    for row in range(5):
        draw = torch.Generator().manual_seed(10 * row + dist.get_rank())
        loss = model(torch.randn(6, 4, generator=draw)).square().mean()
        loss.backward()
        if broken is not None and row == BREAKS and dist.get_rank() == 1:
            mock.patch.object(*broken, side_effect=ZeroDivisionError("broken")).start()
        if watcher is not None:
            watcher.step(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
    if watcher is not None:
        watcher.finish()
        watcher.close()
    mock.patch.stopall()
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    rows = [(step, dict(metrics), {name: cells.values.copy() for name, cells in tables.items()})
            for step, metrics, tables in sink.rows]  # fmt: skip
    return {"state": state, "rows": rows, "ended": dict(watcher.ended) if watcher is not None else {}}


def broken(folder: Path) -> Any:
    """Case -> (is the model that of an unwatched run, rows of a sound watch, rows, ended tables)."""
    plain, sound = trained(None, watched=False), trained(None)
    found = {}
    for name, case in CASES.items():
        own = trained(case)
        same = all(torch.equal(value, own["state"][key]) for key, value in plain["state"].items())
        found[name] = {"same": same, "sound": sound["rows"], "rows": own["rows"], "ended": own["ended"]}
    return found


BROKEN_CASES: dict[str, Callable[[Path], Any]] = {"broken": broken}
