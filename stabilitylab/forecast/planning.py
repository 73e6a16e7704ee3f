"""The plan of a forecast of architectures: their configurations, and time and memory before anything is measured."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from ..config import PRESETS, Config, merge, resolve, stack_of
from ..data import Dataset
from ..designs import design_of
from ..errors import ResourceError, UsageError
from ..models import ARCHS, parameter_count
from ..store import AbsentRun
from ..train.footprint import PROCESS, Footprint
from ..train.footprint import estimate as footprint
from ..train.loop import Trainer
from . import trials
from .measuring import UPDATES

# The largest cost of one architecture, in units of one update: its first updates twice, each with two searches for a
# critical rate; one update's effect on the output; trials and their held-out passes. Two searches make at most MOST
# trials if their critical rates lie within a factor of 4.
MOST = 10
UNITS = 2 * UPDATES + 24 + MOST * (trials.UPDATES + 0.5 * trials.UPDATES / trials.EVERY)
# Bytes a parameter. BACKWARD: weights, gradients, Adam's two moments and one copy, beside the activations of a backward
# pass. SEARCH, for a search for a critical rate, which keeps no activations: theta before and after an update, their
# difference in float64, and the copy for comparison with the first pass. tests/forecast/test_forecast_planning.py
# compares both with the allocator.
BACKWARD, SEARCH = 20, 44


@dataclass(frozen=True)
class Ask:
    """The request: ``given`` are settings by section; None: the value of the preset."""

    depth: int
    d_model: int | None = None
    archs: Sequence[str] = ()  # none: all
    given: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Estimate:
    """The cost: ``parameters`` and ``bytes`` of the largest architecture; ``seconds`` of all ``runs``, one after
    another."""

    parameters: int
    bytes: int
    seconds: float
    runs: int

    def sentence(self) -> str:
        minutes = math.ceil(self.seconds / 60)
        time = f"{minutes} minute{'s' * (minutes > 1)}" if minutes < 90 else f"{minutes / 60:.1f} hours"
        models = f"{self.runs} model{'s' * (self.runs > 1)} of {self.parameters:,} parameters"
        return f"{models}: at most about {time}, {self.bytes / 2**30:.1f} GiB"


def wanted(ask: Ask) -> tuple[list[Config], list[str]]:
    """Return the configurations, architecture by architecture, and notes on architectures that are not defined for the
    stack.

    Raises UsageError for a wrong setting, for an unknown architecture, and for a requested one that is not defined for
    the stack.
    """
    model = ask.given.get("model", {})
    stack = stack_of(model)
    if stack == "encoder-decoder" and ask.depth % 2:
        raise UsageError(f"--depth {ask.depth} is odd: an encoder-decoder has depth/2 layers a side; give an even one.")
    names = list(dict.fromkeys(ARCHS.resolve(name) for name in ask.archs)) or list(ARCHS)
    missing = [name for name in names if stack not in ARCHS[name].defined_for]
    if missing and ask.archs:
        raise UsageError(f"architecture {missing[0]!r} is not defined for --stack {stack}: leave it out of --arch.")
    if "arch" in model or "decoder_arch" in model:
        raise UsageError("name architectures with --arch, not with --set model.arch.")
    notes = [f"{name} is not defined for a single {stack}, and is left out." for name in missing]
    sizes = {} if ask.d_model is None else shape(ask.d_model)
    if design_of(model):  # which says how wide its blocks are
        sizes.pop("d_ffn", None)
    own: Mapping[str, Any] = {"model": sizes} if sizes else {}
    configs = [
        resolve(
            merge(own, ask.given, {"model": {"arch": name}}),
            depth=ask.depth,
        )
        for name in names
        if name not in missing
    ]
    return configs, notes


def shape(d_model: int) -> dict[str, int]:
    """Return the sizes of the preset of that width; for another width, 4 d in the feed-forward blocks and 64 a head."""
    for preset in ("tiny", "small", "base"):
        sizes = {key: PRESETS[preset].get("model", {}).get(key) for key in ("d_model", "d_ffn", "heads")}
        if preset == "tiny":
            sizes = {"d_model": 64, "d_ffn": 128, "heads": 2}
        if sizes["d_model"] == d_model:
            return {key: value for key, value in sizes.items() if value is not None}
    return {"d_model": d_model, "d_ffn": 4 * d_model, "heads": d_model // 64 if d_model % 64 == 0 else 1}


def estimate(configs: Sequence[Config], dataset: Dataset, device: torch.device) -> Estimate:
    """Estimate the cost from models of one and three layers a stack; raises ResourceError if a model does not fit.

    Time is affine in the number of layers. All architectures are assumed to take equal time, which holds to tens of
    percent.
    """
    config = configs[0]
    sizes = {"source_vocab": dataset.source_vocab, "target_vocab": dataset.target_vocab}
    archs = {one.model.arch: one for one in configs}
    weights = max(parameter_count(one.model, **sizes) for one in archs.values())
    check(Estimate(weights, bytes_of(Footprint(weights, 0, 0)), 0.0, 0), device)  # before a layer of it is made
    largest = max((footprint(one, dataset, device) for one in archs.values()), key=bytes_of)
    check(Estimate(weights, bytes_of(largest), 0.0, 0), device)
    seconds = UNITS * update_seconds(config, dataset, device)
    return Estimate(largest.parameters, bytes_of(largest), len(configs) * seconds, len(configs))


def bytes_of(need: Footprint) -> int:
    """Return the bytes at the peak of a measurement, including those of the process itself."""
    return max(SEARCH * need.parameters, BACKWARD * need.parameters + need.activations) + PROCESS


def check(need: Estimate, device: torch.device) -> None:
    """Raise ResourceError if the estimate does not fit."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if need.bytes > free:
        raise ResourceError(
            f"this needs about {need.bytes / 2**30:.1f} GiB ({need.parameters:,} parameters) and {free / 2**30:.1f} "
            f"GiB are free on {device}: give a smaller --depth, --d-model or --set data.sentences=..."
        )


def update_seconds(config: Config, dataset: Dataset, device: torch.device) -> float:
    """Return the wall seconds of one update at the configuration's depth."""
    layers = {key: getattr(config.model, key) for key in ("encoder_layers", "decoder_layers")}
    deepest = max(layers.values())
    few, more = (_fastest(config, layers, n, dataset, device) for n in (1, 3))
    return few + max(more - few, 0.0) / 2 * (deepest - 1)


def _fastest(config: Config, layers: Mapping[str, int], n: int, dataset: Dataset, device: torch.device) -> float:
    """Return the seconds of the fastest of three updates; an update before them creates the optimizer's state."""
    model = config.model.model_copy(update={key: n if there else 0 for key, there in layers.items()})
    probes = config.probes.model_copy(update={"names": ("none",), "every": 1000, "update_every": 1000})
    small = config.model_copy(update={"model": model, "probes": probes})
    trainer = Trainer(small, dataset, AbsentRun("."), device)
    taken = []
    try:
        for _ in range(4):
            began = time.perf_counter()
            dict(trainer.update())
            trainer.row += 1
            taken.append(time.perf_counter() - began)
    finally:
        trainer.watcher.close()
    return min(taken[1:])
