"""Measurements of a model: a gradient, 30 updates and short trials, each with a line of evidence."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, UsageError
from ..onestep.initial_model import moved, part_of
from ..probes import Site, Sites, Watcher, evaluation, find_sites
from ..probes.parameters.pieces import Parameters
from ..probes.places.sites import tensor_of
from ..schema import Cells, Row, Table
from .candidate import Candidate
from .ramp import clip, held_out
from .trials import Trials, trial_lines, trials

RATE, UPDATES, WARM = 1e-3, 30, 40  # of the first updates; WARM: the warm-up of "with warm-up" if none is requested
SMALL = 1e-4  # the rate at which one update's effect on the output is measured
EPS = 1e-8  # Adam's eps
NO_BASELINE = "no trials: without the loss of a model that ignores its input ('baseline') what is stuck cannot be told"
GROUPS = {"update": "", "update_vo_ffn": "vo_ffn", "update_ln": "ln"}  # "": all parameters
NAMES = {"update": "all parameters", "update_vo_ffn": "v, out, fc1 and fc2", "update_ln": "the norms"}


@dataclass(frozen=True)
class Probes:
    """Measurements of a model's start and first updates. ``numbers``: the predictors, all as log10; names with
    ``_cold`` are of updates without warm-up. ``evidence``: a line each; ``update_seconds``: CPU time of an update,
    median (on a GPU wall time)."""

    facts: Mapping[str, Any]
    numbers: Mapping[str, float]
    evidence: Sequence[str]
    update_seconds: float


@dataclass(frozen=True)
class Measured(Probes):
    """The same with ``trials`` by warm-up ({} without a baseline), and ``seconds`` of wall time and CPU time of the
    whole measurement."""

    name: str
    trials: Mapping[int, Trials]
    seconds: float
    cpu_seconds: float


def measure(candidate: Candidate, warmup: int = WARM) -> Measured:
    """Measure a model. ``warmup``: updates of the requested warm-up. Trials run with it and without warm-up (if it is
    0, with ``WARM`` updates and without).

    Raises InputError if the loss is not finite before the first update.
    """
    if not math.isfinite(start := held_out(candidate, candidate.model(), 0)):
        raise InputError(
            f"the {_loss(candidate)} loss of {candidate.name} is {start:g} before its first update, so that it trains "
            "at no rate: look for the layer with 'stabilitylab check'."
        )
    began, began_cpu = time.perf_counter(), time.process_time()
    own = probe(candidate, warmup)
    found = trials(candidate, both(warmup)) if candidate.baseline is not None else {}
    numbers = {f"trial{'' if updates else '_cold'}": one.edge for updates, one in found.items()}
    lines = [*trial_lines(found, _loss(candidate)), *own.evidence] if found else [NO_BASELINE, *own.evidence]
    took = time.perf_counter() - began, time.process_time() - began_cpu
    return Measured(own.facts, {**own.numbers, **numbers}, lines, own.update_seconds, candidate.name, found, *took)


def both(warmup: int) -> tuple[int, int]:
    """Return the requested warm-up, and the other one."""
    return warmup, 0 if warmup else WARM


def probe(candidate: Candidate, warmup: int = WARM) -> Probes:
    """Measure a gradient and the first updates; ``warmup``: updates of the warm-up that "with warm-up" means."""
    facts, sizes, where = at_start(candidate)
    numbers = dict(sizes)
    cold, places = first_updates(candidate, 0)
    gc.collect()  # a watcher is part of cycles, and the watched model would stay in memory
    warm, _ = first_updates(candidate, warmup or WARM)
    gc.collect()
    update_seconds = warm.pop("update_seconds")
    numbers |= {key: cold[key] for key in ("critical_start", "gradient", "growth_start")}
    for key in ("critical_later", "growth_later", "loss_later"):
        numbers |= {key: warm[key], f"{key}_cold": cold[key]}
    lines = [
        f"first update: the {_loss(candidate)} loss rises beyond a rate of {10 ** cold['critical_start']:.2g}; after "
        f"{UPDATES} updates at {RATE:g} beyond {10 ** warm['critical_later']:.2g} with warm-up, "
        f"{10 ** cold['critical_later']:.2g} without",
        *(places[key] for key in ("gradient", "growth") if key in places),
        *([where] if where else []),
    ]
    return Probes({**facts, **candidate.facts}, numbers, lines, update_seconds)


def _loss(candidate: Candidate) -> str:
    return "held-out" if candidate.apart else "training"


class Probed:
    """A sink that keeps its rows."""

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}
        self.rows: dict[int, Mapping[str, Cells]] = {}

    def open(self, tables: Sequence[Table]) -> None:
        self.tables = {table.name: table for table in tables}

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        if tables:
            self.rows[step] = tables

    def close(self) -> None: ...

    def column(self, table: str, column: str, step: int) -> Iterator[tuple[Row, float]]:
        """Yield (row, number) of the numbers that exist; nothing for a table or column that does not exist."""
        spec, cells = self.tables.get(table), self.rows.get(step, {}).get(table)
        if spec is not None and cells is not None and column in spec.columns:
            values = cells.values[:, spec.columns.index(column)].tolist()
            yield from ((row, x) for row, x, none in zip(spec.rows, values, cells.absent, strict=True) if not none)


def first_updates(candidate: Candidate, warmup: int) -> tuple[dict[str, float], dict[str, str]]:
    """Return (numbers, evidence) of a fresh model's first updates, at rate ``RATE``, which a warm-up reaches after
    ``warmup`` updates (at most ``UPDATES``)."""
    model = candidate.model()
    optimizer = candidate.optimizer(model, RATE)
    shares = [group.get("share", 1.0) for group in optimizer.param_groups]
    last, sink, now = UPDATES - 1, Probed(), [0]
    watcher = Watcher(
        model,
        sink,
        probes=_probes(find_sites(model)),
        every=last,
        update_every=last,
        curvature_every=last,
        optimizer=optimizer,
        mask=lambda: candidate.masks(now[0]),
        curvature_loss=lambda: candidate.held_out(model),
        total_every_step=False,
        **candidate.sites,
    )
    try:
        clock = time.perf_counter if next(model.parameters()).is_cuda else time.process_time
        times = []
        for t in range(UPDATES):
            now[0], began = t, clock()
            model.train()
            candidate.enter(model, t)
            for group, share in zip(optimizer.param_groups, shares, strict=True):
                group["lr"] = RATE * share * (min(1.0, (t + 1) / min(warmup, UPDATES)) if warmup else 1.0)
            loss = candidate.loss(model, t)
            loss.backward()
            watcher.step(loss=loss.detach())
            clip(candidate, model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            times.append(clock() - began)
        watcher.flush()
        later = held_out(candidate, model, UPDATES)
    finally:
        watcher.close()
    critical = {at: [x for _, x in sink.column("critical_sharpness", "critical_rate", at)] for at in (0, last)}
    gradient, line = gradient_decades(list(sink.column("activation_grad_norm", "value", 0)))
    start, _ = growth(sink, 0)
    grown, grown_line = growth(sink, last)
    numbers = {
        "critical_start": _log10(critical[0]),
        "critical_later": _log10(critical[last]),
        "gradient": gradient,
        "growth_start": start,
        "growth_later": grown,
        "loss_later": later,
        "update_seconds": median(times[1:last]),  # the first and last updates are probed
    }
    return numbers, {key: text for key, text in (("gradient", line), ("growth", grown_line)) if text}


def _probes(sites: Sites) -> list[str]:
    if not sites.layers:
        raise UsageError("no stack of layers was found in the model: give sites={'layers': PATTERN} beside it.")
    return ["critical_sharpness", "activation_grad_norm", "residual_norm", *(["ln_input"] if sites.norms else [])]


def gradient_decades(rows: Sequence[tuple[Row, float]]) -> tuple[float, str]:
    """Return (log10(max / min) over a stack's layers of ||dE/dx|| at the layer's output, worse stack; a line that says
    where).

    Stacks whose gradient is 0 throughout are left out. It is inf if the gradient reaches only some layers of a stack.
    Admin, Fig. 3.
    """
    layers: dict[str, dict[int, float]] = {}
    for row, value in rows:
        if row.layer:
            layers.setdefault(row.stack, {})[row.layer] = value  # the last value of a layer is that of its output
    worst, line = 0.0, ""
    for stack, own in layers.items():
        if not all(map(math.isfinite, own.values())):
            return math.nan, f"gradient: ||dE/dx|| is not finite in {stack}"
        low, high = min(own, key=lambda n: own[n]), max(own, key=lambda n: own[n])
        if not own[high] > 0:
            continue
        span = math.log10(own[high] / own[low]) if own[low] > 0 else math.inf
        if span >= worst:
            worst = span
            most = f"layer {high}{_of(stack)}"
            line = f"gradient: ||dE/dx|| spans {span:.2g} decades, largest at {most}, smallest at layer {low}"
            line = line if span else f"gradient: ||dE/dx|| is the same at all layers{_of(stack)}"
    return worst, line


def _of(stack: str) -> str:
    return f" of {stack}" if stack else ""


def growth(sink: Probed, step: int) -> tuple[float, str]:
    """Return (log10 of the last over the first layer's norm input, worse stack; a line that says where).

    Only norms on the residual stream count, if the model shows which norms these are. A model without norms gives the
    stream itself. DeepNet, Fig. 4; Sun et al. 2025.
    """
    shown = dict(sink.column("ln_input", "shortcut", step))  # not empty if the model shows the terms of its sums
    values = [(row, value) for row, value in sink.column("ln_input", "value", step) if row.layer]
    own = [(row, value) for row, value in values if not shown or math.isfinite(shown[row])]
    own = own or [(row, value) for row, value in sink.column("residual_norm", "value", step) if row.layer]
    layers: dict[str, dict[int, list[float]]] = {}
    for row, value in own:
        layers.setdefault(row.stack, {}).setdefault(row.layer, []).append(value)
    worst, line = math.nan, ""
    for stack, mine in layers.items():
        first, last = min(mine), max(mine)
        low, high = fmean(mine[first]), fmean(mine[last])
        found = math.log10(high / low) if 0 < low < math.inf and 0 < high < math.inf else math.nan
        if math.isnan(worst) or found > worst:
            worst = found
            where = f"layer {last}{_of(stack)} as in layer {first}"
            line = f"norm input: {10**found:.2g} times as large in {where} after the updates"
    return worst, line


def at_start(candidate: Candidate) -> tuple[dict[str, Any], dict[str, float], str]:
    """Return (facts, log10 of ||dF|| of Adam's first update at ``SMALL`` over sqrt(2) ||F|| by group, a line with the
    largest).

    F is the last stack's output, mean over real tokens. Behind a norm of gain 1 the unit is the distance of two
    unrelated outputs. DeepNet, Sec. 4.2.
    """
    model = candidate.model()
    sites = find_sites(model)
    _probes(sites)
    parameters = Parameters(model, sites.place)
    model.train()
    candidate.enter(model, 0)
    candidate.loss(model, 0).backward()
    facts = {"layers": sum(len(stack.numbers) for stack in sites.stacks), "stacks": len(sites.stacks)}
    if not sites.outputs:
        return facts, {}, ""
    site, mask = sites.outputs[-1], candidate.masks(0)
    weight = mask.get(site.stack) if isinstance(mask, Mapping) else mask

    def output() -> Tensor:
        with evaluation(model), torch.no_grad():
            found = _heard(candidate, model, site).double()
        return found[weight] if isinstance(weight, Tensor) and weight.shape == found.shape[:-1] else found

    start = output()
    facts["width"] = start.shape[-1]
    unit = math.sqrt(2) * float(torch.linalg.vector_norm(start, dim=-1).mean())
    found = {
        key: float(torch.linalg.vector_norm(changed - start, dim=-1).mean()) / unit
        for key, group in GROUPS.items()
        if (changed := _changed(parameters, group, output)) is not None
    }
    named = {key: share for key, share in found.items() if GROUPS[key] and share > 0}
    most = f", most of the groups by {NAMES[max(named, key=lambda key: named[key])]}" if len(named) > 1 else ""
    line = (
        f"one update at {SMALL:g} moves the output of {site.stack or 'the model'} by {found['update']:.2g} of the "
        f"distance of two unrelated ones{most}"
    )
    return facts, {key: _log10([share]) for key, share in found.items()}, line


def _heard(candidate: Candidate, model: torch.nn.Module, site: Site) -> Tensor:
    caught: list[Tensor] = []

    def hear(module: Any, given: Any, out: Any) -> None:
        found = tensor_of(out)
        caught.extend([] if found is None else [found])

    handle = site.module.register_forward_hook(hear)
    try:
        candidate.loss(model, 0)
    finally:
        handle.remove()
    if not caught:
        raise UsageError(f"{site.name}, the model's last module, gives no tensor: name another with 'output_site'.")
    return site.arranged(caught[-1])


def _changed(parameters: Parameters, group: str, output: Callable[[], Tensor]) -> Tensor | None:
    """Return the output after Adam's first update at ``SMALL`` of one group; the parameters are restored."""
    weights, steps = [], []
    for piece in parameters.pieces:
        own = parameters.tensors[piece.index]
        if own.grad is not None and (not group or piece.group == group):
            gradient = part_of(own.grad.to_dense() if own.grad.is_sparse else own.grad, piece.part)
            weights.append(part_of(own.data, piece.part))
            steps.append(gradient / (gradient.abs() + EPS))
    if not weights:
        return None
    with moved(weights, steps, -SMALL):
        return output()


def _log10(values: Sequence[float]) -> float:
    return math.log10(values[0]) if values and 0 < values[0] < math.inf else math.nan
