"""What the ranks train: models whose parameters do not divide by two, batches that are shared out unevenly, a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from stabilitylab.errors import StabilityLabError
from stabilitylab.models import build_model
from stabilitylab.probes import PROBES, Max, Mean, Probe, Watcher, probe
from stabilitylab.probes.places.attending import Part
from stabilitylab.probes.places.sites import layers
from stabilitylab.schema import Cells, Table

ROWS, VOCAB = 6, 23
SHARES = (4, 2)  # sentences of each rank: uneven, and padded unevenly as well


def translation(seed: int) -> dict[str, Tensor]:
    """Keyword arguments of an encoder-decoder: 6 sentences, those of the last rank much shorter."""
    draw = torch.Generator().manual_seed(seed)

    def side(length: int) -> tuple[Tensor, Tensor]:
        ends = torch.randint(2, length + 1, (ROWS, 1), generator=draw)
        ends[SHARES[0] :] = 2
        return torch.randint(0, VOCAB, (ROWS, length), generator=draw), torch.arange(length)[None] < ends

    (source, source_mask), (target, target_mask) = side(7), side(5)
    return {"source": source, "target": target, "source_mask": source_mask, "target_mask": target_mask}


def part(inputs: Mapping[str, Tensor], rank: int | None, shares: tuple[int, int] = SHARES) -> dict[str, Tensor]:
    """This rank's sentences; all of them in one process."""
    return {k: v if rank is None else v.split(shares)[rank] for k, v in inputs.items()}


class Uneven(nn.Module):
    """A reference Transformer (fused q, k, v of 18 rows: two halves of 9 cut k in two) and parameters that leave the
    second rank with less, or with nothing."""

    def __init__(self, arch: str = "branchnorm") -> None:
        super().__init__()
        settings = {"d_model": 6, "d_ffn": 9, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "T": 3}
        self.inner = build_model(arch=arch, **settings, source_vocab=VOCAB, target_vocab=VOCAB, seed=3)
        self.single = nn.Parameter(torch.full((1, VOCAB), 1.1))
        self.three = nn.Parameter(torch.full((3,), 0.9))
        self.wide = nn.Parameter(torch.linspace(0.5, 1.5, 48).view(4, 12))
        self.frozen = nn.Parameter(torch.full((5,), 0.7), requires_grad=False)

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.inner(**inputs) * self.single * self.three.prod() * self.frozen.mean() * self.wide.square().mean()

    def parameter_roles(self) -> dict[str, tuple[str, Part]]:
        roles = {role: (f"inner.{name}", rows) for role, (name, rows) in self.inner.parameter_roles().items()}
        columns = {"five": slice(0, 5), "seven": slice(5, 12)}  # of 12: halves of 6 cut the latter in two
        roles |= {role: ("wide", (slice(None), own)) for role, own in columns.items()}
        return roles | {name: (name, None) for name in ("single", "three", "frozen")}


class Alpha:
    def __init__(self, model: Uneven) -> None:
        self.schedule = model.inner.schedule

    def get(self) -> float:
        return self.schedule.get()


def by_columns(parameter: nn.Parameter) -> Shard | None:
    """Along the second dimension where it is even, which torch asks for; else along the first."""
    return Shard(1) if parameter.dim() > 1 and parameter.shape[1] % 2 == 0 else None


def wrapped(model: Uneven, kind: str) -> nn.Module:
    if kind == "one":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model)
    options: dict[str, Any] = {}
    if kind == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shape = {"hsdp": (2, 1), "hsdp-flat": (1, 2)}.get(kind, (2,))
    names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
    if kind in ("columns", "hsdp"):
        options["shard_placement_fn"] = by_columns
    options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for stack in model.inner.stacks.values():
        for layer in stack.layers:
            fully_shard(layer, **options)
    return fully_shard(model, **options, ignored_params={model.frozen})


class ListSink:
    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}
        self.rows: list[tuple[int, dict[str, float | None], dict[str, Cells]]] = []

    def open(self, tables: Any) -> None:
        self.tables = {table.name: table for table in tables}

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        self.rows.append((step, dict(metrics), dict(tables)))

    def close(self) -> None: ...


def sentence(action: Callable[[], Any]) -> str:
    """What the error says that the action must end in."""
    try:
        action()
    except StabilityLabError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@contextmanager
def extra_probes() -> Iterator[None]:
    """A maximum of the forward and one of the backward pass; a NaN of one rank must reach the table."""
    with PROBES.restored():
        _register_extra_probes()
        yield


def _register_extra_probes() -> None:
    @probe("peak", on="forward", at=layers, columns={"value": Max(), "spoilt": Max(), "mean": Mean("value")})
    class Peak(Probe):
        """max |x|."""

        def measure(self, site: Any, x: Any, y: Tensor, weight: Tensor) -> Any:
            biggest = y.abs().amax(-1)
            spoilt = torch.full_like(biggest, torch.nan) if len(y) == SHARES[1] else biggest  # on rank 1 alone
            return {"value": biggest, "spoilt": spoilt}

    @probe("gradient_peak", on="backward", at=layers, columns={"value": Max()})
    class GradientPeak(Probe):
        """max |dE/dx|."""

        def measure(self, site: Any, x: Any, y: Tensor, weight: Tensor) -> Tensor:
            return y.abs().amax(-1)


def train(
    kind: str,
    dtype: torch.dtype = torch.float64,
    steps: int = 5,
    watched: bool = True,
    accumulate: int = 1,
    every: Any = 1,
    split_reference: bool = False,
    shares: tuple[int, int] = SHARES,
    before: Callable[[Watcher], None] = lambda watcher: None,
    **options: Any,
) -> dict[str, Any]:
    """Trains on the same global batches whatever the number of ranks; returns what was recorded and what was trained.

    The loss of a rank is its sum over tokens, per token of the whole batch, times the number of ranks, since DDP and
    fully_shard average: so the mean over ranks is the loss of one process.
    """
    torch.manual_seed(0)
    rank = None if kind == "one" else dist.get_rank()
    ranks = 1 if rank is None else dist.get_world_size()
    plain = Uneven().to(dtype)
    model = wrapped(plain, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)  # below it, rounding would show
    now: dict[str, Tensor] = {}
    fixed = part(translation(99), rank if split_reference else None)

    def forward(inputs: dict[str, Tensor]) -> Tensor:
        now.clear()
        now.update({"inner.encoder": inputs["source_mask"], "inner.decoder": inputs["target_mask"]})
        return model(**inputs)

    def reference() -> dict[str, Tensor]:
        return {"held_out": forward(fixed).double().mean()}

    sink = ListSink()
    watcher = None
    if watched:
        watcher = Watcher(
            model,
            sink,
            optimizer=optimizer,
            mask=lambda: dict(now),
            every=every,
            update_every=every,
            schedule=Alpha(plain),
            reference=reference,
            **{"probes": "all", **options},
        )
        before(watcher)
    losses = []
    for t in range(steps):
        plain.inner.set_row(t)
        total = torch.zeros((), dtype=torch.float64)
        for index in range(accumulate):
            whole = translation(t * accumulate + index)
            tokens = accumulate * int(whole["target_mask"].sum())
            mine = part(whole, rank, shares)
            last = index == accumulate - 1
            with model.no_sync() if kind == "ddp" and not last else nullcontext():
                logits, real = forward(mine), mine["target_mask"]
                loss = F.cross_entropy(logits[real].to(dtype), mine["target"][real], reduction="sum") * ranks / tokens
                loss.backward()
            total += loss.detach().double()
        losses.append(total)
        if watcher is not None:
            watcher.step(loss=total, lr=0.01, nothing=None)
        optimizer.step()
        optimizer.zero_grad()
    plain.inner.set_row(steps)
    if watcher is not None:
        watcher.finish()
        watcher.close()
    own = [p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()]
    return {
        "tables": sink.tables,
        "rows": sink.rows,
        "parameters": [p.clone() for p in own],
        "losses": losses,
        "empty": [name for name, p in zip(dict(model.named_parameters()), own, strict=True) if not p.numel()],
    }
