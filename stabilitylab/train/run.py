"""A run from its configuration to its last row: directory, signals, status, summary."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ..config import Config, complete, merge, validated
from ..data import Dataset, load_data
from ..errors import InputError, ResourceError, UsageError
from ..labels import label
from ..models import canonical
from ..models.idle import refuse_idle, say_equal
from ..probes import DeviceRecorder
from ..probes.parameters.ranks import from_first_rank, on_first_rank
from ..stopping import Requests, listening
from ..store import AbsentRun, Run, RunWriter
from ..verdict import Verdict
from . import checkpoint
from .environment import alignment, prepare_process, provenance, resolve_device
from .fast import is_compiled, recorder_for
from .footprint import Footprint, check_memory, estimate
from .hessian import say_unmeasured, unmeasured
from .loop import Report, Trainer
from .ranks import Team, device_of, gather_team
from .trained import has_changed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """A resolved configuration with the data, the device and the memory that its run needs."""

    config: Config
    dataset: Dataset
    device: torch.device
    footprint: Footprint
    team: Team = field(default_factory=Team)
    recorder: DeviceRecorder | None = None
    compiled: bool = False


@dataclass(frozen=True)
class Result:
    """The end of a run. ``state``: finished, diverged or interrupted. ``signal``: the signal that interrupted it."""

    path: Path
    state: str
    row: int
    verdict: Verdict | None
    signal: int | None = None


def plan(config: Config) -> Plan:
    """Return the plan of a new run: its data are loaded, and its memory is estimated. Raises ResourceError if it does
    not fit, UsageError for a setting that changes nothing in its model."""
    refuse_idle(config.model)
    say_equal(config.model)
    return _planned(config)


def _planned(config: Config) -> Plan:
    prepare_process(config.train.threads)
    config = config.model_copy(update={"model": canonical(config.model)})
    say_unmeasured(config)  # before the data are read: an unknown name of a probe raises an error here
    team = gather_team(config.train)
    device = device_of(team, resolve_device(config.train), config.train.device)
    recorder, compiled = recorder_for(config, device, team), is_compiled(config, device, team)
    dataset = load_data(config.data, stack=config.model.stack)
    footprint = estimate(config, dataset, device, recorder is not None)
    shards = team.size if team.kind == "fsdp" else 1
    share = replace(footprint, state=footprint.state // shards, activations=footprint.activations // team.size)
    try:
        check_memory(share, device)
    except ResourceError as error:
        if not footprint.graphs or config.train.cuda_graphs == "on":
            raise
        check_memory(replace(share, graphs=0), device)
        log.warning("CUDA graphs are off: with them %s", error)
        footprint, recorder = replace(footprint, graphs=0), None
    return Plan(config, dataset, device, footprint, team, recorder, compiled)


class RunAudience(Protocol):
    """The receiver of a run's progress."""

    def opened(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Receive the run directory and the entries of its run.json."""

    def show(self, report: Report) -> None:
        """Receive an update."""


class Nobody(RunAudience):
    """The audience of all ranks except the first, and of a run that nobody follows."""


def start(plan: Plan, out: Path, name: str | None = None, audience: RunAudience | None = None) -> Result:
    """Run ``plan`` in the new directory ``out/name``. Without ``name``, an automatic name is used that does not exist
    yet. ``audience``: the receiver of the progress."""
    facts = manifest(plan)
    path = from_first_rank(out / (name or free_name(plan.config, out)))
    with on_first_rank(lambda: RunWriter.create(path, facts)) or AbsentRun(path) as run:
        return _carry_out(run, plan, facts, audience)


def resume(path: Path, steps: int | None = None, audience: RunAudience | None = None) -> Result:
    """Continue the run at ``path`` from its newest checkpoint. ``steps``: the number of updates in all, if it should
    change. ``audience``: the receiver of the progress.

    If the run was killed after its last update, only the last held-out pass and the verdict are made. Raises UsageError
    for a run that has all its steps, or more than ``steps``; InputError if its data have changed.
    """
    stored = Run.open(path)
    config = validated(complete(stored.config))
    if steps is not None:
        config = validated(merge(config.model_dump(), {"train": {"steps": steps}}))
    prepared = _planned(config)
    state = checkpoint.load(path / "checkpoints", prepared.device, stored.identity)
    prepared.team.own(state)
    if state["row"] >= config.train.steps and stored.status.state in ("finished", "diverged"):
        raise UsageError(f"{path} has all its {config.train.steps} steps; --steps N with a larger N continues it.")
    if state["row"] > config.train.steps:
        raise UsageError(f"{path} has made {state['row']} steps already; give --steps N with a larger N.")
    if has_changed(prepared.dataset, stored):
        raise InputError(f"the data of {path} have changed since it started: restore them, or start a new run.")
    facts = manifest(prepared)
    with on_first_rank(lambda: RunWriter.resume(path, part=state["part"], manifest=facts)) or AbsentRun(path) as run:
        return _carry_out(run, prepared, facts, audience, state)


def join(config: Config) -> None:
    """Prepare a process that trains, before everything else: its numeric modes, and its process group under
    torchrun."""
    prepare_process(config.train.threads)
    gather_team(config.train)


def manifest(plan: Plan) -> dict[str, Any]:
    """Return the entries of run.json beside the definitions of tables."""
    config, data = plan.config, plan.dataset
    return {
        "label": label(config.model),
        "config": config.model_dump(mode="json"),
        "data": data.describe(),
        "unigram": asdict(data.unigram),
        "validation_unigram": data.validation_unigram and asdict(data.validation_unigram),
        "best_nll": data.best_nll,
        "padding": data.padding(alignment(plan.device)),
        "parameters": plan.footprint.parameters,
        "loss_normalisation": "per real target token of the whole update",
        "ranks": plan.team.size,
        "cuda_graphs": plan.recorder is not None,
        "compiled": plan.compiled,
        **provenance(config.train, plan.device),
    }


def automatic_name(config: Config) -> str:
    """Return a name made from the configuration, such as ``branchnorm-200-s0``."""
    words = label(canonical(config.model)).replace(" ", "-").replace("/", "-")
    return f"{words}-{config.model.depth}-s{config.train.seed}"


def free_name(config: Config, out: Path, kind: str = "") -> str:
    """Return ``kind`` + :func:`automatic_name`, or the first of ``branchnorm-200-s0-2``, ``-3``, ... that does not
    exist."""
    base = kind + automatic_name(config)
    if not (out / base).exists():
        return base
    return next(name for i in range(2, 10**6) if not (out / (name := f"{base}-{i}")).exists())


def _carry_out(
    run: RunWriter | AbsentRun,
    plan: Plan,
    facts: Mapping[str, Any],
    audience: RunAudience | None,
    state: dict[str, Any] | None = None,
) -> Result:
    """Train to the end, from the checkpoint ``state`` if one is given. ``facts``: the entries of run.json."""
    audience = audience if audience is not None and plan.team.first else Nobody()
    audience.opened(run.path, facts)
    trainer = None
    try:
        # one Ctrl-C reaches several ranks more than once, and torchrun ends them itself
        with listening(at_once=plan.team.size == 1) as caught:
            given = plan.config, plan.dataset, run, plan.device, state, plan.team, plan.recorder, plan.compiled
            trainer = Trainer(*given)
            run.record(probes_dropped={**unmeasured(plan.config), **dict(trainer.watcher.dropped)})
            if len(trainer.groups) > 1:
                run.record(optimizer_groups=[group.described() for group in trainer.groups])
            verdict = trainer.fit(stop=lambda: agreed(caught, plan.team), show=audience.show)
            watcher = trainer.watcher
            noticed = {
                "places_unseen": dict(watcher.unseen),
                "tables_ended": dict(watcher.ended),
                "not_neutral": [*watcher.not_neutral],
            }
            run.record(audit=dict(watcher.audit), **{name: found for name, found in noticed.items() if found})
        if verdict is None:
            name = signal.Signals(caught.signal or signal.SIGINT).name
            run.set_status("interrupted", trainer.row, f"{name}; continue with --resume {run.path}")
            return Result(run.path, "interrupted", trainer.row, None, caught.signal)
        ended = "diverged" if verdict.state == "diverged" else "finished"
        run.set_status(ended, trainer.row, verdict.reason, verdict=verdict.recorded())
        if plan.team.first and not plan.config.train.final_checkpoint:
            checkpoint.discard(run.path / "checkpoints")
        return Result(run.path, ended, trainer.row, verdict)
    except BaseException as error:
        if trainer is not None:
            with suppress(Exception):  # the first error may have made the device unusable
                trainer.watcher.salvage()
        reason = "a second Ctrl-C" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
        with suppress(ResourceError):  # a full disk must not hide the first error
            state_now = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            made = trainer.row if trainer else int(state["row"]) if state else 0
            run.set_status(state_now, made, reason)
        if isinstance(error, RuntimeError) and "memory" in str(error):
            also = ", or --cuda-graphs off" if plan.recorder is not None else ""
            raise ResourceError(
                f"out of memory on {plan.device}: give a smaller --depth or --set data.sentences=...{also}"
            ) from error
        raise
    finally:
        if trainer is not None:
            trainer.watcher.close()


def agreed(caught: Requests, team: Team) -> bool:
    """True if any rank was asked to stop. All ranks stop after the same update, with the same signal."""
    caught.signal = team.largest(caught.signal or 0) or None
    return caught.signal is not None
