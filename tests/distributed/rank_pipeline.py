"""A model in two stages under a pipeline's schedule, and the same in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_tensor import LENGTH, VOCAB, WIDTH, Layer
from rank_toys import ListSink, sentence
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from stabilitylab.api import watch
from stabilitylab.probes import Watcher
from stabilitylab.store import Run

PIPELINE_CASES: dict[str, Callable[[Path], Any]] = {}
BATCH, MICRO, LAYERS = 8, 4, 4


class Stage(nn.Module):
    """All of a decoder, or its layers ``first`` to ``last`` with what stands before or behind them."""

    def __init__(self, first: int = 0, last: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(6)
        layers = {str(number): Layer() for number in range(LAYERS)}
        embedding, norm, head = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.embedding = embedding if first == 0 else None
        self.layers = nn.ModuleDict({number: layer for number, layer in layers.items() if first <= int(number) < last})
        self.norm, self.head = (norm, head) if last == LAYERS else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def batch(seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def train_stages(
    kind: str,
    steps: int = 3,
    watched: bool = True,
    probes: str = "all,-attention_heads",  # of which a stage has the largest of each module alone
    split: int = 2,
    micro: int = MICRO,
    scale_grads: bool = True,
) -> dict[str, Any]:
    """``kind``: "one" process, or the schedule "1F1B" or "GPipe" of two stages, the first with ``split`` layers."""
    rank = 0 if kind == "one" else dist.get_rank()
    model = (Stage() if kind == "one" else Stage(0, split) if rank == 0 else Stage(split, LAYERS)).double()
    schedule: Any = None
    if kind != "one":
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        made = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}[kind]
        schedule = made(stage, micro, loss_fn=loss_of, scale_grads=scale_grads)
    sink, optimizer = ListSink(), torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    watcher = None
    if watched:
        parallel = "off" if kind == "one" else schedule
        watcher = Watcher(model, sink, probes=probes, every=2, optimizer=optimizer, parallel=parallel, strict=True)
    for step in range(steps):
        tokens = batch(step)
        target, losses = (tokens * 5 + 1) % VOCAB, []
        if kind == "one":
            loss: Any = loss_of(model(tokens), target) * (1 if scale_grads else micro)
            loss.backward()
        else:
            schedule.step(*([tokens] if rank == 0 else []), target=target if rank else None, losses=losses)
            loss = (torch.stack(losses).mean() if scale_grads else torch.stack(losses).sum()) if losses else None
        if watcher is not None:
            watcher.step(loss=None if loss is None else loss.detach(), lr=0.01)
        optimizer.step()
        optimizer.zero_grad()
    if watcher is not None:
        watcher.finish()
        watcher.close()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    dropped = [] if watcher is None else watcher.dropped
    return {"tables": sink.tables, "rows": sink.rows, "parameters": parameters, "dropped": dropped}


def case(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    PIPELINE_CASES[function.__name__] = function
    return function


for kind in ("1F1B", "GPipe"):
    PIPELINE_CASES[f"stages_{kind}"] = lambda folder, kind=kind: train_stages(kind)
PIPELINE_CASES["stages_unwatched"] = lambda folder: train_stages("1F1B", watched=False)
PIPELINE_CASES["stages_summed"] = lambda folder: train_stages("1F1B", scale_grads=False)
PIPELINE_CASES["stages_histograms"] = lambda folder: train_stages("1F1B", probes="histograms,gradient_alignment")
PIPELINE_CASES["stages_uneven"] = lambda folder: train_stages("1F1B", split=3)


def schedule_of(model: nn.Module, of: type = Schedule1F1B) -> Any:
    stage = PipelineStage(model, dist.get_rank(), 2, torch.device("cpu"))
    return of([stage] if of is ScheduleInterleaved1F1B else stage, MICRO, loss_fn=loss_of)


@case
def stages_refused(folder: Path) -> Any:
    """What the watch of a stage does not do -> what it says."""
    own = Stage(0, 2) if dist.get_rank() == 0 else Stage(2, LAYERS)

    def said(model: nn.Module = own, schedule: Any = None, **options: Any) -> str:
        parallel = schedule_of(own) if schedule is None else schedule
        return sentence(lambda: Watcher(model, ListSink(), **{"probes": "grad_norm", "parallel": parallel, **options}))

    renumbered = Stage(0, 2)  # on both
    compiled = Stage(0, 2)
    plan = schedule_of(compiled)
    compiled.compile(backend="eager")
    return {
        "interleaved": said(schedule=schedule_of(own, ScheduleInterleaved1F1B)),
        "another model": said(Stage(), schedule_of(own)),
        "the same names": said(renumbered, schedule_of(renumbered)),
        "mask": said(mask=torch.ones(2, 3)),
        "reference": said(reference=lambda: None),
        "compiled": said(compiled, plan),
        "nothing to find": said(probes="branch_variance"),
        "no schedule": said(schedule="auto"),
    }


@case
def stages_directory(folder: Path) -> Any:
    """``watch`` with what it does by itself."""
    model = Stage(0, 2) if dist.get_rank() == 0 else Stage(2, LAYERS)
    schedule = schedule_of(model)
    with watch(model, out=folder / "stages", every=1, parallel=schedule) as watcher:
        for step in range(2):
            if dist.get_rank() == 0:
                schedule.step(batch(step))
            else:
                schedule.step(target=batch(step))
            watcher.step()
            model.zero_grad()
    dist.barrier()
    run = Run.open(folder / "stages")
    return {
        "status": run.status.state,
        "layers": sorted(set(run.frame("activation_grad_norm")["layer"])),
        "dropped": sorted(run.manifest["probes_dropped"]),
    }
