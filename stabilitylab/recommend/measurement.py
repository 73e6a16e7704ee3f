"""One architecture at one seed: measured once, kept as a small JSON file."""

from __future__ import annotations

import gc
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from .. import onestep
from .._version import __version__
from ..config import Config, DataConfig, Stack, neutral_settings
from ..data import Dataset, load_data
from ..errors import InputError, ResourceError
from ..labels import label
from ..models import canonical
from ..store.files import reading, replace_file
from ..store.layout import plain
from ..train.environment import prepare_process, resolve_device
from .columns import RANKED, UPDATES
from .first_updates import first_updates, range_test
from .initialisation import at_start

METHOD = 1  # counted up when a number changes its meaning, so that older files are not mixed with newer ones


@dataclass(frozen=True)
class Measurement:
    """``numbers`` by column; ``evidence``: what they are made of; ``broken``: bound -> what is wrong."""

    arch: str
    seed: int
    numbers: Mapping[str, float]
    evidence: Mapping[str, Any]
    broken: Mapping[str, str]
    config: Mapping[str, Any]


def file_name(config: Config) -> str:
    """``deepnorm-200-s0-1a2b3c4d``: the digits stand for all settings, so that other ones are another file."""
    settings = json.dumps([METHOD, _settings(config)], sort_keys=True)
    digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
    return f"{label(config.model).replace(' ', '-')}-{config.model.depth}-s{config.train.seed}-{digest}"


def measure(config: Config, out: Path, name: str) -> Path:
    """Writes ``out/name.json``, whole or not at all; raises ResourceError where the memory does not suffice."""
    prepare_process(config.train.threads)
    config = config.model_copy(update={"model": canonical(config.model)})
    device = resolve_device(config.train)
    dataset = _dataset(config.data, config.model.stack)  # pyright: ignore[reportArgumentType] (frozen, so hashable)
    try:
        numbers, evidence = everything(config, dataset, device)
    except RuntimeError as error:
        if "memory" in str(error):
            raise ResourceError(
                f"out of memory on {device}: give a smaller --depth, --d-model or --set data.sentences=..."
            ) from error
        raise
    arch, seed, broken = label(config.model), config.train.seed, bounds(numbers, evidence)
    found = Measurement(arch, seed, numbers, evidence, broken, _settings(config))
    document = {"method": METHOD, "stabilitylab": __version__, **asdict(found)}
    replace_file(out / f"{name}.json", json.dumps(plain(document), indent=1).encode())
    return out / f"{name}.json"


def everything(config: Config, dataset: Dataset, device: torch.device) -> tuple[dict[str, float], dict[str, Any]]:
    """(numbers by column, evidence)."""
    numbers, evidence = at_start(config, dataset, device)
    parts = (
        lambda: first_updates(config, dataset, device, evidence["has_norms"]),
        lambda: range_test(config, dataset, device),
    )
    for part in parts:
        gc.collect()  # a watcher is part of cycles, and what it watched would stay in memory
        more, facts = part()
        numbers |= more
        evidence |= facts
    return numbers, evidence


def bounds(numbers: Mapping[str, float], evidence: Mapping[str, Any]) -> dict[str, str]:
    """Name -> what is wrong, of the bounds that are broken; see docs/recommend.md."""
    broken = {}
    if bad := [column.name for column in RANKED if not math.isfinite(numbers.get(column.name, math.nan))]:
        broken["finite"] = f"{', '.join(bad)}: not a finite number"
    if not evidence["finite_losses"]:
        broken["finite"] = f"a loss or gradient of the first {UPDATES} updates is not finite"
    if floor := evidence["at_adams_floor"]:
        place = max(floor, key=lambda key: floor[key])
        broken["above eps"] = f"{len(floor)} layers at Adam's floor, {100 * floor[place]:.0f} % of {place}"
    if numbers["progress"] <= 0:
        broken["loss falls"] = f"the held-out loss rose by {-UPDATES * numbers['progress']:.2f} nats"
    return broken


def measure_all(
    todo: Sequence[Config], out: Path, jobs: int, done: Callable[[str], None]
) -> tuple[list[Measurement], dict[str, str]]:
    """(what was measured, label and seed -> what failed); finished ones are read, see :func:`onestep.measure_all`."""
    names = {file_name(config): config for config in todo}
    failed = onestep.measure_all([*names.items()], out, jobs, done, measure=measure, finished=is_finished)
    found = [read(out / f"{name}.json") for name in names if name not in failed]
    return found, {f"{label(names[name].model)}, seed {names[name].train.seed}": why for name, why in failed.items()}


def is_finished(path: Path, config: Config) -> bool:
    return path.with_name(f"{path.name}.json").exists()


def read(path: Path) -> Measurement:
    """Raises InputError for a file that is none of ours."""
    try:
        with reading(path):
            document = json.loads(path.read_text(encoding="utf-8"))
        parts = {name: document[name] for name in ("arch", "seed", "numbers", "evidence", "broken", "config")}
        parts["numbers"] = {name: float(value) for name, value in parts["numbers"].items()}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise InputError(f"{path} holds no measurement that can be read: remove it, and it is made again.") from error
    return Measurement(**parts)


def _settings(config: Config) -> dict[str, Any]:
    """Without what changes no number; device and threads change the rounding."""
    settings = config.model_dump(mode="json")
    for key in ("probes", "preset"):
        settings.pop(key)
    neutral = {key.removeprefix("train.") for key in neutral_settings() if key.startswith("train.")}
    for key in ("steps", "on_divergence", *neutral - {"device", "threads"}):
        if key != "steps" or config.train.schedule != "linear":
            settings["train"].pop(key)
    return settings


@lru_cache(maxsize=8)
def _dataset(config: DataConfig, stack: Stack) -> Dataset:
    return load_data(config, stack=stack)
