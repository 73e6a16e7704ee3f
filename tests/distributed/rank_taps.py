"""Values that a model shows by ``tap``, on ranks that each have half of the batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_toys import ListSink
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from stabilitylab.probes import Watcher

sys.path.append(str(Path(__file__).parents[1] / "probes"))
from tap_toys import BareDecoder, ids

PROBES = "ln_input,residual_norm,activation_grad_norm,activation_sparsity"


def shown(kind: str) -> dict[str, dict[str, list[float]]]:
    """Table -> site -> numbers of each column at row 1; ``kind``: how the model is spread, "" for one process."""
    torch.manual_seed(0)
    model: Any = BareDecoder().double()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    half = slice(None) if not kind else slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    sink, optimizer = ListSink(), torch.optim.SGD(model.parameters(), 0.1)
    options: dict[str, Any] = {"every": 1, "update_every": 1, "probes": PROBES, "strict": True}
    options["parallel"] = "auto" if kind else "off"
    with Watcher(model, sink, reference=lambda: model(ids(100)[half]), **options) as watcher:
        for row in range(2):
            model(ids(row)[half]).square().mean().backward()
            watcher.step()
            optimizer.step()
            optimizer.zero_grad()
    tables = {name: cells for step, _, row in sink.rows if step == 1 for name, cells in row.items()}
    sites = {name: [row.site for row in table.rows] for name, table in sink.tables.items()}
    return {name: dict(zip(sites[name], cells.values.tolist(), strict=True)) for name, cells in tables.items()}


TAP_CASES: dict[str, Callable[[Path], Any]] = {
    "taps_": lambda folder: shown(""),
    "taps_ddp": lambda folder: shown("ddp"),
    "taps_fsdp": lambda folder: shown("fsdp"),
}
