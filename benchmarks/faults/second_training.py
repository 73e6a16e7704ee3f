"""Trains one run of the second corpus as a run directory that ``watch`` writes, and reads from it what is kept.

What is kept of a run: the alarm's signals in each row, the numbers that labels are made of, and what ``diagnose`` said
at the end. The run directory is gone afterwards.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from judging import MOST_EVENTS, mask_of
from second_families import ROWS, Loop, SecondPlan, plan
from subjects import Student, dataset, known, student
from torch import Tensor, nn
from training import Recipe, backward

import stabilitylab as sl
from stabilitylab.alarm import Signals, names
from stabilitylab.alarm.reading import rows as rows_of
from stabilitylab.data import Batch
from stabilitylab.diagnose import diagnose
from stabilitylab.store import Run

PROBES = (
    *("grad_norm", "activation_grad_norm", "ln_input", "residual_norm", "update_ratio", "adam", "attention_heads"),
    *("logits", "outliers", "attention", "rank", "activation_sparsity"),
)
HELD_EVERY = 10
SPENT, SILENT, DEAD = 0.05, 1e-3, 1e-6  # of an entropy's ceiling; active entries; of a stack's median gradient
MEASURED = ("nll", "gradient", "lr", "held_out", "source_worth", "attention_spent", "tokens_alike", "dead", "silent")
COLUMNS = (*MEASURED, *names())


@dataclass
class Kept:
    """What is kept of a run: ``columns`` (rows,) by name, NaN where a row has no number; the row of a fault from
    outside; what ``diagnose`` said; and the seconds of one core that all of it took."""

    columns: dict[str, np.ndarray]
    at: int | None
    diagnosis: dict[str, Any]
    seconds: float


def train(
    recipe: Recipe,
    edge: float,
    text: Path | None,
    updates: int = ROWS,
    what: SecondPlan | None = None,
    probes: Sequence[str] = PROBES,
) -> Kept:
    """Train, watch and diagnose one run. It ends early if a loss or gradient norm is not finite. ``what``: a plan that
    takes the place of its family's."""
    begun = time.process_time()
    torch.set_flush_denormal(True)
    what = what or plan(recipe.family, edge, recipe.strength, recipe.seed)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        path = Path(folder) / "run"
        worth = _trained(recipe, what, text, updates, path, probes)
        run = Run.open(path)
        return Kept(columns(run, worth), what.at, judged(run), time.process_time() - begun)


def _trained(
    recipe: Recipe, what: SecondPlan, text: Path | None, updates: int, path: Path, probes: Sequence[str]
) -> dict[int, float]:
    """Write the run directory, and return the worth of its source by row (a decoder has none)."""
    data = dataset(recipe.subject, recipe.seed, text)
    subject = student(recipe.subject, recipe.seed, data, text)
    held, current, worth = data.held_out, [data.held_out], dict[int, float]()

    def of_tokens(batch: Batch) -> Tensor:
        current[0] = batch
        real = batch.weight > 0
        return F.cross_entropy(subject.logits(subject.model, batch)[real], batch.labels[real], reduction="none")

    with torch.no_grad():
        for view in parts(subject, what.part) if what.first != 1.0 else ():
            view.mul_(what.first)
    optimizer = torch.optim.AdamW(
        subject.model.parameters(), lr=1e-3, betas=what.betas, eps=what.eps, weight_decay=what.decay, fused=True
    )
    row_of, loop = [0], Loop(subject.model, subject.layers, optimizer)
    handles = [*_scaled(subject, what, row_of), *_changed(optimizer, subject, what, row_of)]  # before watch's own hooks
    watcher = sl.watch(
        subject.model,
        out=path,
        probes=list(probes),
        every=1,
        update_every=HELD_EVERY,
        optimizer=optimizer,
        mask=lambda: mask_of(current[0]),
        schedule=subject.schedule,
        reference=lambda: {"held_out_nll": of_tokens(held).mean()},
        config={"subject": recipe.subject, "family": recipe.family},
    )
    with watcher:
        for row in range(updates):
            row_of[0] = row
            subject.set_row(row)
            what.before(row, loop)
            rate = what.rate(row)
            for group in optimizer.param_groups:
                group["lr"] = rate
                if what.shrinks is not None:
                    group["weight_decay"] = what.shrinks(row) / rate
            nll = backward(row, what, data, of_tokens)
            what.gradients(row, subject.layers)
            told = watcher.step(loss=nll, nll=nll)
            watcher.note(lr=rate)
            if "source" in held.inputs and row % HELD_EVERY == 0:
                with torch.no_grad():
                    other = Batch(held.of_other_sources(), held.labels, held.weight, held.tokens, held.masks)
                    worth[row] = float(of_tokens(other).mean() - of_tokens(held).mean())
            norm = float(told["grad_norm_total"] or 0.0)
            if what.clip < norm < math.inf:
                nn.utils.clip_grad_norm_(subject.model.parameters(), what.clip)
            optimizer.step()
            if what.zero(row):
                optimizer.zero_grad()
            if not (math.isfinite(norm) and math.isfinite(float(nll))):
                break
    for handle in handles:
        handle.remove()
    return worth


def parts(subject: Student, part: str) -> list[Tensor]:
    """Return views of the parameters that ``part`` names: "query_key", "embedding" or "norms"; [] for "". Raises
    ValueError for another name."""
    if part == "query_key":
        return subject.query_key
    if part == "embedding":
        return [subject.embedding.data]
    if part == "norms":
        norms = [module for module in subject.model.modules() if "Norm" in type(module).__name__]
        return [parameter.data for module in norms for parameter in module.parameters(recurse=False)]
    if part:
        raise ValueError(f"no part {part!r}; there are query_key, embedding and norms.")
    return []


def sinking(model: nn.Module) -> list[Tensor]:
    """Return the biases in front of the ReLUs."""
    found = [module.fc1 for module in model.modules() if isinstance(getattr(module, "fc1", None), nn.Linear)]
    return [one.bias.data for one in found if one.bias is not None]


def _changed(optimizer: torch.optim.Optimizer, subject: Student, what: SecondPlan, row: list[int]) -> list[Any]:
    """Hooks that change what a step of the optimizer does, as if the step did it."""
    old: list[Tensor] = []
    views = parts(subject, what.part)
    biases = sinking(subject.model) if what.sinks(ROWS) else []

    def before(*_: Any) -> None:
        old[:] = [view.clone() for view in views] if what.faster(row[0]) != 1.0 else []

    def after(*_: Any) -> None:
        with torch.no_grad():
            for view, was in zip(views, old, strict=False):
                view.add_(view - was, alpha=what.faster(row[0]) - 1.0)
            for bias in biases:
                bias.sub_(what.sinks(row[0]))

    if not views and not biases:
        return []
    return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]


def _scaled(subject: Student, what: SecondPlan, row: list[int]) -> list[Any]:
    """Hooks through which gradients of the layers' outputs pass float16, multiplied by the loss scale of the row."""
    scale = what.scale
    if scale is None:
        return []

    def hook(module: Any, inputs: Any, output: Any) -> None:
        first, now = output[0] if isinstance(output, tuple) else output, scale(row[0])
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(lambda gradient: (gradient * now).half().float() / now)

    return [layer.register_forward_hook(hook) for layer in subject.layers]


def columns(run: Run, worth: dict[int, float] | None = None) -> dict[str, np.ndarray]:
    """Return the kept columns of a run, (rows,) each: what labels are made of, and the alarm's signals."""
    signals, told = Signals(), list[dict[str, float]]()
    signals.open([run.table(name) for name in run.tables])
    for _, metrics, tables in rows_of(run):
        row = {name: own.value for name, own in signals.read(metrics, tables).items()}
        for column, metric in (
            ("nll", "nll"),
            ("gradient", "grad_norm_total"),
            ("lr", "lr"),
            ("held_out", "held_out_nll"),
        ):
            value = metrics.get(metric)
            row[column] = math.nan if value is None else float(value)
        told.append(row)
    if told and math.isnan(told[-1]["nll"]) and math.isnan(told[-1]["gradient"]):
        told.pop()  # the evaluation behind the last update
    found = {name: np.array([row.get(name, math.nan) for row in told]) for name in COLUMNS}
    for name, states in _states(run).items():
        for step, value in states.items():
            if step < len(told):
                found[name][step] = value
    for step, value in (worth or {}).items():
        if step < len(told):
            found["source_worth"][step] = value
    return found


def _states(run: Run) -> dict[str, dict[int, float]]:
    """Return the states that collapses are made of, by step of an evaluation."""
    found: dict[str, dict[int, float]] = {name: {} for name in ("attention_spent", "tokens_alike", "dead", "silent")}
    if "attention" in run.tables:
        own = run.frame("attention")
        spent = (own["entropy"] / own["ceiling"]) < SPENT
        found["attention_spent"] = spent.groupby(own["step"]).mean().to_dict()
    if "rank" in run.tables:
        own = run.frame("rank")
        last = own[own["layer"] == own.groupby("stack_name")["layer"].transform("max")]
        found["tokens_alike"] = last.groupby("step")["token_cosine"].max().to_dict()
    if "activation_sparsity" in run.tables:
        own = run.frame("activation_sparsity")
        found["silent"] = (own["nonzero_fraction"] < SILENT).groupby(own["step"]).mean().to_dict()
    own = run.frame("grad_norm")
    own = own[(own["layer"] > 0) & (own["step"] % HELD_EVERY == 0)]
    value = own["value"].where(~own["absent"].astype(bool), 0.0)
    middle = value.groupby([own["step"], own["stack_name"]]).transform("median")
    dead = (value <= DEAD * middle).groupby([own["step"], own["stack_name"]]).mean()
    found["dead"] = dead.groupby(level="step").max().to_dict()
    return found


def judged(run: Run) -> dict[str, Any]:
    """Return what diagnose says: verdict, the kinds that came first, the named cause, and of each event its kind, step,
    severity and strength."""
    found = diagnose(run).as_dict()
    events: list[list[Any]] = [
        [
            own["kind"],
            own["step"],
            own["severity"],
            None if own["strength"] is None else float(f"{own['strength']:.4g}"),
        ]
        for own in found["events"][:MOST_EVENTS]
    ]
    return {**{name: found[name] for name in ("verdict", "first", "cause", "chain")}, "events": events}


def encoder_of(name: str) -> bool:
    """True if the subject has an encoder."""
    return known(name).kind == "encoder-decoder"
