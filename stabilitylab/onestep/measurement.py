"""The measurement of one configuration at its initialisation, written as a run directory."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..config import Config, DataConfig, Stack
from ..data import Dataset, load_data
from ..errors import ResourceError, UsageError
from ..models import canonical
from ..probes import chosen
from ..store import RunWriter
from ..train.environment import prepare_process, resolve_device
from ..train.footprint import Footprint, check_memory, estimate
from ..train.hessian import say_unmeasured, without_hessian
from ..train.run import Plan, manifest
from .attention import lemma41
from .curvature import KNOWN, curvature
from .initial_model import Filled, Subject, hooked
from .jacobian import Jacobians
from .perturbation import Outputs, perturbation
from .rates import directions, update_rate
from .standard_probes import ordinary
from .theorem import Connections, applies, theorem

log = logging.getLogger(__name__)


def measure(config: Config, out: Path, name: str) -> Path:
    """Measure a configuration into a run directory ``out/name`` of kind "onestep".

    All numbers are computed in float64 for any ``train.precision``, with dropout off, at step 0 alone. Nothing is
    written before everything is measured. Raises UsageError if ``out/name`` holds a run, ResourceError if the memory
    does not suffice.
    """
    prepare_process(config.train.threads)
    say_unmeasured(config)
    path, asked = out / name, settled(config)
    config = without_hessian(asked)
    if config.model.prores != "off" and config.model.prores_t0 == 0:
        log.warning(
            "model.prores closes all branches in row 0, so the rates of their parameters are 0: "
            "--set model.prores_t0=N measures the same weights with the alphas of row N."
        )
    if (path / "run.json").exists():
        raise UsageError(f"{path} exists already and is never overwritten: choose another --name.")
    device = resolve_device(config.train)
    dataset = _dataset(config.data, config.model.stack)  # pyright: ignore[reportArgumentType] (frozen, so hashable)
    footprint = estimate(config, dataset)
    check_memory(Footprint(footprint.parameters, 2 * footprint.state, 2 * footprint.activations), device)
    try:
        metrics, tables = everything(Subject.of(config, dataset, device))
    except RuntimeError as error:
        if "memory" in str(error):
            raise ResourceError(
                f"out of memory on {device}: give a smaller --depth or --set data.sentences=..."
            ) from error
        raise
    facts = manifest(Plan(asked, dataset, device, footprint)) | {"kind": "onestep", "precision": "float64"}
    return _write(path, facts, metrics, tables)


def everything(subject: Subject) -> tuple[dict[str, float | None], list[Filled]]:
    """Return the metrics and tables of a one-step run."""
    metrics, tables = ordinary(subject)
    before, jacobians, connections = Outputs(subject), Jacobians(subject), Connections(subject)
    with ExitStack() as hooks:
        for each in (before, jacobians, connections):
            hooks.enter_context(hooked(each.hooks()))
        start = subject.output()
    updates = directions(subject)
    rates = update_rate(subject, updates, start)
    tables += [rates, perturbation(subject, before)]
    if jacobians.sites:
        tables.append(jacobians.table())
    if applies(subject):
        by_site = {row.site: value for row, value in zip(rates[0].rows, rates[1].values[:, 0].tolist(), strict=True)}
        tables.append(theorem(subject, connections, updates, by_site))
    tables.append(lemma41(subject.config.model.d_model, subject.config.train.seed))
    if curved := [name for name in KNOWN if name in chosen(subject.config.probes.names)]:  # as costly as all the rest
        tables += curvature(subject, curved)
    return metrics, tables


def settled(config: Config) -> Config:
    """Return the configuration as a run directory stores it: with canonical names of architectures."""
    return config.model_copy(update={"model": canonical(config.model)})


@lru_cache(maxsize=8)
def _dataset(config: DataConfig, stack: Stack) -> Dataset:
    return load_data(config, stack=stack)


def _write(path: Path, facts: Mapping[str, Any], metrics: Mapping[str, float | None], tables: Sequence[Filled]) -> Path:
    run = RunWriter.create(path, facts)
    try:
        run.open([table for table, _ in tables])
        run.append(0, metrics, {table.name: cells for table, cells in tables})
        run.set_status("finished", 0)
        run.close()
    except BaseException:
        with suppress(ResourceError):
            run.close()
        shutil.rmtree(path, ignore_errors=True)  # half a run would only block the name
        raise
    return path
