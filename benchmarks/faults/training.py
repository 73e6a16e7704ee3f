"""Trains one run of the corpus and writes down, at each row, what the alarm and its rivals look at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from failure import Failure, failure
from families import UPDATES, Plan, plan
from judging import Both, foreseen, mask_of
from peers import NUMBERS, Peers
from subjects import Student, dataset, student
from torch import Tensor

from stabilitylab.alarm import Signals, names
from stabilitylab.data import Batch, Dataset
from stabilitylab.probes import Watcher
from stabilitylab.schema import Cells, Table

PROBES = (
    *("grad_norm", "activation_grad_norm", "ln_input", "residual_norm", "update_ratio", "adam", "attention_heads"),
    *("logits", "outliers", "critical_sharpness", "preconditioned_sharpness"),
)
HELD_EVERY, CURVED_EVERY = 5, 20
CURVED_ON = 12  # held-out sentences, the first of them
BESIDE = ("nll", "gradient", "lr", "held_out", "where_grad_norm", "where_update")  # beside the signals
LATER = ("loss.rise", "loss.stall")  # signals that came after this corpus was made
SIGNALS = tuple(name for name in names() if name not in LATER)
COLUMNS = (*BESIDE, *SIGNALS, *NUMBERS)


@dataclass(frozen=True)
class Recipe:
    """One run: which subject and seed, what is done to it, and how much of it."""

    subject: str
    seed: int
    family: str
    strength: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.subject}-{self.family}-s{self.seed}"


@dataclass
class Course:
    """What was written down: (rows, columns) float32, NaN where a row has no number; and when the run failed."""

    rows: np.ndarray
    failure: Failure
    at: int | None
    held_out: list[tuple[int, float]]
    places: list[str] = field(default_factory=list)  # what where_* count
    diagnosis: dict[str, Any] = field(default_factory=dict)
    preflight: dict[str, Any] = field(default_factory=dict)


class Notes:
    """A sink that turns rows into signals."""

    def __init__(self, peers: Peers) -> None:
        self.rows: list[dict[str, float]] = []
        self.held_out: list[tuple[int, float]] = []
        self.places: list[str] = []
        self.more: dict[int, dict[str, float]] = {}  # of peers, by row
        self._peers, self._outputs = peers, ()
        self._signals, self._at = Signals(), {name: place for place, name in enumerate(COLUMNS)}

    def open(self, tables: Sequence[Table]) -> None:
        self._signals.open(tables)
        self.places = [row.site for table in tables if table.name == "grad_norm" for row in table.rows]
        self._outputs = tuple(
            row.site for table in tables if table.name == "activation_grad_norm" for row in table.rows
        )

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        told = self._signals.read(metrics, tables)
        row = {name: own.value for name, own in told.items() if name not in LATER}
        for column, signal in (("where_grad_norm", "grad_norm.z"), ("where_update", "update.drift")):
            if (own := told.get(signal)) is not None and own.place is not None:
                row[column] = float(self.places.index(own.place.site)) if own.place.site in self.places else -1.0
        for column, metric in (("nll", "nll"), ("lr", "lr"), ("gradient", "grad_norm_total")):
            value = metrics.get(metric)
            row[column] = math.nan if value is None else value
        if (held := metrics.get("held_out_nll")) is not None:
            row["held_out"] = held
            self.held_out.append((step, held))
        if (cells := tables.get("activation_grad_norm")) is not None:
            row.update(self._peers.gradients(dict(zip(self._outputs, cells.values[:, 0].tolist(), strict=True))))
        self.rows.append(row | self.more.pop(step, {}))

    def close(self) -> None:
        pass

    def table(self) -> np.ndarray:
        found = np.full((len(self.rows), len(COLUMNS)), np.nan, dtype=np.float32)
        for number, row in enumerate(self.rows):
            for name, value in row.items():
                found[number, self._at[name]] = value
        return found


def train(
    recipe: Recipe,
    edge: float,
    text: Path | None,
    twin: Sequence[tuple[int, float]] | None = None,
    updates: int = UPDATES,
    probes: Sequence[str] = PROBES,
    judged: bool = True,
) -> Course:
    """Trains and watches it; ends early where a number is not finite. ``twin``: the held-out losses of its twin.
    ``judged``: with what diagnose and preflight say of it."""
    torch.set_flush_denormal(True)
    what = plan(recipe.family, edge, recipe.strength, recipe.seed)
    data = dataset(recipe.subject, recipe.seed + what.order, text)
    subject = student(recipe.subject, recipe.seed, data, text)
    peers = Peers(subject.model)
    notes = Notes(peers)
    sink = Both(notes) if judged else notes
    held, few = data.held_out, first(data.held_out, CURVED_ON)
    optimizer = torch.optim.AdamW(
        subject.model.parameters(), lr=1e-3, betas=what.betas, eps=what.eps, weight_decay=what.decay, fused=True
    )
    current = [held]  # the batch that the model is given

    def of_tokens(batch: Batch) -> Tensor:
        """The loss of each real token."""
        current[0] = batch
        real = batch.weight > 0
        return F.cross_entropy(subject.logits(subject.model, batch)[real], batch.labels[real], reduction="none")

    with torch.no_grad():
        subject.embedding.mul_(what.embedding)
    before = foreseen(subject, what, data) if judged else {}
    handles = _half(subject, what)
    watcher = Watcher(
        subject.model,
        sink,
        probes=probes,
        every=1,
        update_every=HELD_EVERY,
        optimizer=optimizer,
        mask=lambda: mask_of(current[0]),
        schedule=subject.schedule,
        reference=lambda: {"held_out_nll": of_tokens(held).mean()},
        curvature_every=CURVED_EVERY,
        curvature_loss=lambda: of_tokens(few),
    )
    with watcher:
        for row in range(updates):
            subject.set_row(row)
            rate = what.rate(row)
            for group in optimizer.param_groups:
                group["lr"] = rate
            nll = backward(row, what, data, of_tokens)
            what.gradients(row, subject.layers)
            watcher.step(loss=nll, nll=nll)
            watcher.note(lr=rate)
            _update(optimizer, subject, what)
            notes.more[row] = peers.updated(row)
            if what.zero(row):
                optimizer.zero_grad()
            if _over(notes):
                break
    for handle in handles:
        handle.remove()
    found = notes.table()[:updates]
    told = [(step, nll) for step, nll in notes.held_out if step <= len(found)]
    at = {name: found[:, COLUMNS.index(name)].astype(float) for name in ("nll", "gradient")}
    ended = failure(at["nll"], at["gradient"], told, twin)
    after = sink.judged(len(found)) if isinstance(sink, Both) else {}
    return Course(found, ended, what.at, told, notes.places, after, before)


def first(batch: Batch, sentences: int) -> Batch:
    """The first sentences of a batch."""
    weight = batch.weight[:sentences]
    inputs, masks = ({name: own[:sentences] for name, own in each.items()} for each in (batch.inputs, batch.masks))
    return Batch(inputs, batch.labels[:sentences], weight, int(weight.sum()), masks)


def backward(row: int, what: Plan, data: Dataset, of_tokens: Any) -> Tensor:
    """Gradients of the mean loss of the row's tokens, which is returned."""
    count, first = what.accumulate(row), what.which(row)
    total = torch.zeros(())
    for part in range(count):  # a larger batch takes those that would have come much later too
        batch = what.batch(row, data.micro_batch(first + part * UPDATES), data.target_vocab)
        loss = of_tokens(batch).mean() / count
        (loss * count if what.summed else loss).backward()
        total = total + loss.detach()
    return total


def _update(optimizer: torch.optim.Optimizer, subject: Student, what: Plan) -> None:
    """The optimizer's step, with what the plan does to queries and keys, and to the weights' precision."""
    before = [view.clone() for view in subject.query_key] if what.query_key != 1.0 else []
    optimizer.step()
    with torch.no_grad():
        for view, old in zip(subject.query_key, before, strict=False):
            view.add_(view - old, alpha=what.query_key - 1.0)
        if what.half == "bf16":
            for parameter in subject.model.parameters():
                parameter.copy_(parameter.bfloat16())


def _half(subject: Student, what: Plan) -> list[Any]:
    """Hooks through which gradients of the layers' outputs pass float16, multiplied by the loss scale."""
    if what.half != "fp16":
        return []

    def through(gradient: Tensor) -> Tensor:
        return (gradient * what.loss_scale).half().float() / what.loss_scale

    def hook(module: Any, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(through)

    return [layer.register_forward_hook(hook) for layer in subject.layers]


def _over(notes: Notes) -> bool:
    """Whether the last row that is known ended the run: a number that was not finite."""
    last = notes.rows[-1] if notes.rows else {}
    return not all(math.isfinite(last.get(name, 0.0)) for name in ("nll", "gradient"))
