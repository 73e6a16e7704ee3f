"""A watched training run of tiny real models, and what the oracle tests need to work its numbers out on their own."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rest_slow import rest_slow
from torch import Tensor, nn

from stabilitylab.models import Residual, Transformer, build_model
from stabilitylab.probes import Watcher
from stabilitylab.schema import Cells, Table

Place = tuple[str, int, str]  # stack, layer, sub-layer
Column = dict[Place, float]

WIDTH, VOCAB, UPDATES, MICRO_BATCHES, ADAM_EPS = 16, 40, 3, 2, 1e-3
CALIBRATION, HELD_OUT = 1000, 2000  # seeds of batches

PAIR, ENCODER, DECODER = ({"encoder_layers": n, "decoder_layers": m} for n, m in ((2, 2), (2, 0), (0, 2)))
CASES: dict[str, dict[str, Any]] = {
    "postln": {"arch": "postln", **PAIR},
    "preln": {"arch": "preln", **PAIR},
    "deepnorm": {"arch": "deepnorm", **PAIR, "decoder_layers": 3},
    "branchnorm": {"arch": "branchnorm", **PAIR},
    "admin": {"arch": "admin", **PAIR},
    "postln-preln": {"arch": "postln", "decoder_arch": "preln", **PAIR, "tie": "none"},
    "preln-branchnorm": {"arch": "preln", "decoder_arch": "branchnorm", **PAIR, "tie": "all"},
    "encoder-deepnorm": {"arch": "deepnorm", "stack": "encoder", **ENCODER, "tie": "none"},
    "encoder-preln": {"arch": "preln", "stack": "encoder", **ENCODER},
    "decoder-branchnorm": {"arch": "branchnorm", "stack": "decoder", **DECODER},
    "decoder-admin": {"arch": "admin", "stack": "decoder", **DECODER},
    "alpha-from-0": {"arch": "branchnorm", **PAIR, "t0": 0},
    "dropout": {"arch": "branchnorm", **PAIR, "dropout": 0.2, "attention_dropout": 0.1, "activation_dropout": 0.1},
}
EXACT = [(name, torch.float64) for name in CASES]
ROUNDED = [(name, torch.float32) for name in CASES if name != "dropout"]  # float64 draws other dropout masks
FAST = {("branchnorm", torch.float32)} | {
    (name, torch.float64) for name in ("deepnorm", "preln-branchnorm", "encoder-preln", "dropout")
}
RUNS = pytest.mark.parametrize(
    ("case", "dtype"), rest_slow(EXACT + ROUNDED, FAST), ids=lambda x: str(x).removeprefix("torch.")
)


# Batches -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    inputs: dict[str, Tensor]
    labels: Tensor  # (B, T)
    counted: Tensor  # (B, T) True where a label counts in the loss
    masks: dict[str, Tensor]  # stack -> (B, L) True on real tokens


def make_batch(kind: str, seed: int, junk: int = 0) -> Batch:
    """Sentences of different lengths; the token ids on padding are drawn from the seed ``junk`` alone."""
    draw, noise = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(junk)
    rows = 13 + seed % 3

    def side(length: int, *, pad_left: bool) -> tuple[Tensor, Tensor]:
        ends = torch.randint(3, length + 1, (rows, 1), generator=draw)
        real = torch.arange(length) < ends
        if pad_left:
            real[::2] = real[::2].flip(1)
        tokens = torch.randint(0, VOCAB, (rows, length), generator=draw)
        return torch.where(real, tokens, torch.randint(0, VOCAB, (rows, length), generator=noise)), real

    source, source_real = side(9 + seed % 4, pad_left=True)
    target, target_real = side(11 - seed % 3, pad_left=kind == "encoder")
    labels = torch.randint(0, VOCAB, target.shape, generator=draw)
    if kind == "encoder":  # some of the real tokens are to be predicted
        chosen = target_real & (torch.rand(target.shape, generator=draw) < 0.5)
        return Batch({"tokens": target, "mask": target_real}, labels, chosen, {"encoder": target_real})
    if kind == "decoder":
        return Batch({"tokens": target, "mask": target_real}, labels, target_real, {"decoder": target_real})
    inputs = {"source": source, "target": target, "source_mask": source_real, "target_mask": target_real}
    return Batch(inputs, labels, target_real, {"encoder": source_real, "decoder": target_real})


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(**batch.inputs)[batch.counted], batch.labels[batch.counted], reduction="sum")


def loss_tokens(batches: Sequence[Batch]) -> int:
    return sum(int(batch.counted.sum()) for batch in batches)


# A watched run -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Run:
    """What the sink got, and for each row a float64 model with its parameters and alpha, made without any hook."""

    tables: dict[str, Table] = field(default_factory=dict)
    rows: dict[int, tuple[dict[str, float | None], dict[str, Cells]]] = field(default_factory=dict)
    twins: list[Transformer] = field(default_factory=list)
    batches: list[list[Batch]] = field(default_factory=list)
    random: list[Tensor] = field(default_factory=list)  # the generator's state as each row began
    held_out: list[Batch] = field(default_factory=list)
    closed: bool = False

    def open(self, tables: Sequence[Table]) -> None:
        self.tables = {table.name: table for table in tables}

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        assert step not in self.rows
        self.rows[step] = dict(metrics), dict(tables)

    def close(self) -> None:
        self.closed = True

    def places(self, table: str) -> list[Place]:
        return [(row.stack, row.layer, row.sublayer) for row in self.tables[table].rows]

    def column(self, row: int, table: str, column: str) -> Column:
        values = self.rows[row][1][table].values[:, self.tables[table].columns.index(column)]
        return dict(zip(self.places(table), values.tolist(), strict=True))


def twin(model: Transformer) -> Transformer:
    fresh = build_model(model.config, source_vocab=VOCAB, target_vocab=VOCAB).double()
    fresh.load_state_dict(model.state_dict())
    return fresh


def watched_run(
    case: str,
    dtype: torch.dtype,
    *,
    junk: int = 0,
    masked: bool = True,
    held_out: int = 1,
    every: int = 1,
    update_every: int = 1,
    loss_scale: float = 1.0,
) -> Run:
    """AdamW updates of a tiny model, each over micro-batches of different sizes; every parameter away from its start.

    Without a mask every token counts, and the batches of the run say so; the model and its loss still know the padding.
    """
    run, sizes = Run(), {"d_model": WIDTH, "d_ffn": 24, "heads": 2, "T": 7}
    model = build_model(**sizes, **CASES[case], source_vocab=VOCAB, target_vocab=VOCAB, seed=1).to(dtype)

    def batch(seed: int, junk: int = junk) -> Batch:
        made = make_batch(model.config.stack, seed, junk)
        ones = {stack: torch.ones_like(mask) for stack, mask in made.masks.items()}
        return made if masked else replace(made, masks=ones)

    model.calibrate(**batch(CALIBRATION, junk=0).inputs)  # Admin's profile counts padding
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    run.held_out = [batch(HELD_OUT + i) for i in range(held_out)]
    current = run.held_out[0]

    def evaluate() -> dict[str, Tensor]:
        nonlocal current
        before, nll = current, torch.zeros(())
        for current in run.held_out:
            nll = nll + loss_sum(model, current) / loss_tokens(run.held_out)
        current = before
        return {"held_out_nll": nll}

    torch.manual_seed(3)  # dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=ADAM_EPS, fused=True)
    watcher = Watcher(
        model,
        run,
        probes="all,-parameter_norm",
        every=every,
        update_every=update_every,
        optimizer=optimizer,
        mask=(lambda: current.masks) if masked else None,
        schedule=model.schedule,
        reference=evaluate,
    )
    for row in range(UPDATES):
        model.set_row(row)
        run.twins.append(twin(model))
        run.random.append(torch.get_rng_state())
        run.batches.append([batch(MICRO_BATCHES * row + i) for i in range(MICRO_BATCHES)])
        for current in run.batches[row]:
            (loss_scale * loss_sum(model, current) / loss_tokens(run.batches[row])).backward()
        watcher.step()
        optimizer.step()
        optimizer.zero_grad()
    model.set_row(UPDATES)
    run.twins.append(twin(model))
    watcher.finish()
    watcher.close()
    return run


@functools.cache
def run_of(case: str, dtype: torch.dtype) -> Run:
    return watched_run(case, dtype)


def agree(actual: Column, expected: Column, dtype: torch.dtype, *, scale: float = 0.0, within: float = 0.0) -> None:
    """Equal places and numbers: to 1e-9 in float64; in float32 to 2e-5, or 1e-6 of ``scale`` where they cancel."""
    assert actual.keys() == expected.keys()
    exact = dtype == torch.float64
    rel, floor = (1e-9, 1e-13) if exact else (2e-5, 1e-6)
    assert actual == pytest.approx(expected, rel=within or rel, abs=floor * scale, nan_ok=True)


# What a pass holds ---------------------------------------------------------------------------------------------------


@dataclass
class Pass:
    """Each sub-layer's input x, branch F and output, each fc1's output, each stack's output, and the result."""

    x: dict[Place, Tensor] = field(default_factory=dict)
    branch: dict[Place, Tensor] = field(default_factory=dict)
    out: dict[Place, Tensor] = field(default_factory=dict)
    fc1: dict[Place, Tensor] = field(default_factory=dict)
    stack: dict[str, Tensor] = field(default_factory=dict)
    result: Tensor = field(default_factory=lambda: torch.zeros(()))


def sublayers(model: Transformer) -> Iterator[tuple[Place, Residual]]:
    for name, stack in model.stacks.items():
        for number, layer in enumerate(stack.layers, start=1):
            for sublayer in ("self_attn", "cross_attn", "ffn"):
                if (residual := getattr(layer, sublayer)) is not None:
                    yield (name, number, sublayer), residual


def listen(model: Transformer, batch: Batch) -> Pass:
    seen, handles = Pass(), []

    def keep(module: nn.Module, where: dict[Any, Tensor], key: object, *, entering: bool = False) -> None:
        def hook(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            assert key not in where
            where[key] = args[0] if entering else output

        handles.append(module.register_forward_hook(hook))

    for place, residual in sublayers(model):
        keep(residual, seen.x, place, entering=True)
        keep(residual, seen.out, place)
        keep(residual.f, seen.branch, place)
        if place[2] == "ffn":
            keep(residual.f.get_submodule("fc1"), seen.fc1, place)
    for name, stack in model.stacks.items():
        keep(stack, seen.stack, name)
    seen.result = loss_sum(model, batch)
    for handle in handles:
        handle.remove()
    return seen
