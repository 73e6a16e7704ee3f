"""DDP under torch.compile, with buckets that split its graph and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from rank_tensor import LENGTH, ROWS, VOCAB, Decoder, Heard
from rank_toys import ListSink, sentence
from rest_slow import EVERY
from torch.nn.parallel import DistributedDataParallel

from stabilitylab.probes import Watcher

COMPILED_CASES: dict[str, Callable[[Path], Any]] = {}


def train_compiled(kind: str, watched: str = "it", steps: int = 2) -> dict[str, Any]:
    """``kind``: "one" process, or DDP in "several" buckets, or in one ("whole"). ``watched``: what torch.compile
    returned ("it"), the model "before" torch.compile, or "no"."""
    torch._dynamo.reset()
    plain = Decoder().double()
    rank, size = (0, 1) if kind == "one" else (dist.get_rank(), dist.get_world_size())
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    distributed: Any = dist
    first = distributed._DEFAULT_FIRST_BUCKET_BYTES
    distributed._DEFAULT_FIRST_BUCKET_BYTES = 2000 if kind == "several" else first
    try:
        cap = 0.002 if kind == "several" else 25
        inner = plain if kind == "one" else DistributedDataParallel(plain, bucket_cap_mb=cap)
        model: Any = inner if kind == "one" else torch.compile(inner, backend=backend)
        sink, optimizer = ListSink(), torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3)

        def batch(seed: int) -> torch.Tensor:
            return torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))

        fixed = batch(99)
        watcher = None
        if watched != "no":
            watcher = Watcher(
                model if watched == "it" else inner,
                sink,
                probes="all,-attention_heads",  # which compiled code does not show
                every=1,
                update_every=1,
                optimizer=optimizer,
                reference=lambda: model(fixed) * 0,
                strict=True,
            )
        for step in range(steps):
            tokens = batch(step).chunk(size)[rank]
            loss = F.cross_entropy(model(tokens).flatten(0, 1), ((tokens * 5 + 1) % VOCAB).flatten())
            loss.backward()
            if watcher is not None:
                watcher.step(loss=loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        if watcher is not None:
            watcher.finish()
            watcher.close()
    finally:
        distributed._DEFAULT_FIRST_BUCKET_BYTES = first
    parameters = [p.detach().clone() for p in plain.parameters()]
    return {"tables": sink.tables, "rows": sink.rows, "parameters": parameters, "graphs": len(graphs)}


def unsplit(action: Callable[[], Any]) -> Any:
    before, torch._dynamo.config.optimize_ddp = torch._dynamo.config.optimize_ddp, False
    try:
        return action()
    finally:
        torch._dynamo.config.optimize_ddp = before


def compiled_ddp(folder: Path) -> Any:
    """(buckets, what is watched) -> what was recorded and trained."""
    asked = [("whole", "no"), ("whole", "it"), ("unsplit", "no"), ("unsplit", "before")]
    asked += [("whole", "before"), ("unsplit", "it")] if EVERY else []
    found: dict[Any, Any] = {}
    for buckets, watched in asked:
        if buckets == "whole":
            found[buckets, watched] = train_compiled("whole", watched)
        else:
            found[buckets, watched] = unsplit(lambda w=watched: train_compiled("several", w))
    found["several", "no"] = train_compiled("several", "no")
    found["several", "it"] = sentence(lambda: train_compiled("several", "it"))
    with Heard() as heard:
        found["several", "before"] = train_compiled("several", "before")
    found["several", "said"] = heard.lines
    return found


COMPILED_CASES["compiled_ddp"] = compiled_ddp
