"""The training loop. The probes watch each update and do not change it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Config
from ..data import Batch, Dataset
from ..errors import InputError
from ..models import build_model
from ..models.groups import groups_of
from ..probes import DeviceRecorder, Watcher
from ..probes.numerics import attention
from ..store import AbsentRun, RunWriter
from ..verdict import Verdict
from . import checkpoint
from .environment import aligned, peak_memory
from .fast import (
    Directly,
    ReplayedPass,
    Replays,
    ReplaysApart,
    WorkingWeights,
    are_apart,
    compile_layers,
    explained,
    shapes_of,
)
from .hessian import without_hessian
from .judging import Judging
from .passes import Passes
from .ranks import Team
from .recipe import group_settings, learning_rate, optimizer_of, own_rates, param_groups, set_rate, token_losses
from .recording import held, recorder_of


def is_stateless(model: nn.Module) -> bool:
    """Return True if every module is of this package or of torch: a pass in eval mode writes nothing to these."""
    return all(type(module).__module__.partition(".")[0] in ("stabilitylab", "torch") for module in model.modules())


@dataclass(frozen=True)
class Report:
    """The data of a display after an update: the numbers of the row and the wall seconds of the update."""

    row: int
    metrics: Mapping[str, float | None]
    seconds: float
    watcher: Watcher


class Trainer:
    """Trains the reference Transformer of ``config`` on ``dataset`` and records it in ``run``.

    ``state``: a checkpoint to continue from. Row t of every table describes the model after t updates. Each rank of a
    ``team`` takes its sentences of every micro-batch; row t stands for the same global batch as in one process.
    ``recorder``: records whole updates and replays them, see :func:`.graph_replays.recorder_for`. ``compiled``: layers
    are compiled, see :func:`.compiling.is_compiled`.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        run: RunWriter | AbsentRun,
        device: torch.device,
        state: dict[str, Any] | None = None,
        team: Team | None = None,
        recorder: DeviceRecorder | None = None,
        compiled: bool = False,
    ) -> None:
        self.config, self.dataset, self.run, self.device = config, dataset, run, device
        self.team = team or Team()
        self.team.check(dataset)
        train = config.train
        self.row = 0
        self.judging = Judging(config, dataset)
        self.checkpoints = checkpoint.Cadence(train, self.team)
        self.model = build_model(
            config.model, source_vocab=dataset.source_vocab, target_vocab=dataset.target_vocab, seed=train.seed
        ).to(device)
        if state is None:  # each rank calibrates on the whole batch, with the dropout masks of the first
            torch.manual_seed(Team().seed(train.seed))
            self.model.calibrate(**self._micro_batch(0, 0).to(device).inputs)
        else:
            self._load_model(state)
        torch.manual_seed(self.team.seed(train.seed))  # dropout; weights and batches have streams of their own
        self.model.set_row(self.row)
        for stack in self.model.stacks.values():
            stack.checkpointing = train.activation_checkpointing
        self.compiled = compiled
        if compiled:
            compile_layers(self.model, shapes_of(dataset))
        self.working = WorkingWeights(self.model) if train.working_weights else None
        self.spread = self.team.spread(self.model, device)  # the module to call: the model or its wrapper
        first = partial(self._micro_batch, 0, 0)
        present = self._present
        self.passes = Passes(config, dataset, device, self.model, self.spread, self.working, first, present)
        on_device = recorder is not None or device.type == "cuda"
        there = device if on_device else None
        self.groups = groups_of(self.model)
        self.optimizer = optimizer_of(train, param_groups(train, self.groups, there), device=there)
        self.watcher = Watcher(
            self.spread,
            run,
            probes=without_hessian(config).probes.names,  # a run records the names as they were asked for
            every=config.probes.every,
            update_every=config.probes.update_every,
            optimizer=self.optimizer,
            mask=lambda: self.passes.masks,
            schedule=self.model.schedule,
            reference=self.passes.reference,
            recorder=recorder,
            stateless=is_stateless(self.model),
            measured=self.evaluates,
            curvature_every=config.probes.curvature_every,
            curvature_loss=self.passes.curvature_loss,
            curvature_batch="update" if config.probes.curvature_batch == "update" else "fixed",
            record=recorder_of(config, device),
            tapped=() if state is None else self.team.own(state)["watcher"].get("tapped", ()),
        )
        # on a GPU a row is read while the next one is computed, unless its numbers may end the run
        self.behind = int(device.type == "cuda" and train.on_divergence == "continue")
        self.apply: Directly | Replays | ReplaysApart = Directly(self.work, device)
        self.source: Callable[[], dict[str, Tensor]] = self.passes.source
        if recorder is not None:
            name, passes = "the pass that measures what the source is worth", self.passes
            self.source = ReplayedPass(name, passes.read_source, recorder, passes.measuring)
            replays = ReplaysApart if are_apart(dataset, train.accumulate) else Replays
            self.apply = replays(self, device, recorder, self.watcher, required=train.cuda_graphs == "on")
        if state is not None:
            self._load_rest(state)

    def fit(self, stop: Callable[[], bool], show: Callable[[Report], None]) -> Verdict | None:
        """Train until the last step, a divergence that ends the run, or ``stop()``; return the verdict, None if
        stopped."""
        train = self.config.train
        untold: deque[Report] = deque()
        self.checkpoints.restart()

        def tell(keep: int = 0) -> None:
            while len(untold) > keep:
                report = untold.popleft()
                self.judging.see(report.row, report.metrics)
                show(report)

        first = True
        while self.row < train.steps and not self.judging.ends_the_run:
            if stop():
                tell()
                self.save()
                return None
            started = time.perf_counter()
            metrics = self.update()
            if first:
                self.run.record(audit=dict(self.watcher.audit))
                first = False
            untold.append(Report(self.row, metrics, time.perf_counter() - started, self.watcher))
            tell(self.behind)
            self.row += 1
            if self.row < train.steps and self.checkpoints.due(self.row):
                tell()
                self.save()
        tell()
        if train.final_checkpoint:
            self.save()
        self.model.set_row(self.row)
        after = self.watcher.finish(**self.passes.validate(), **self.source())
        self.judging.see(self.row, after)
        return self.judging.verdict(self.row, after)

    def update(self) -> Mapping[str, float | None]:
        """Do one optimizer update from theta_t to theta_{t+1}; return the numbers of row t."""
        t = self.row
        started = time.perf_counter()
        self.model.set_row(t)
        rate = self.rate(t)
        set_rate(self.optimizer, rate)
        whole = self._present()
        tokens = sum(batch.tokens for batch in whole)
        batches = [self.team.part(batch).to(self.device) for batch in whole]
        read = self.source() if self.evaluates(t) or self.watcher.due_reference(t) else {}
        metrics = self.apply(batches, tokens / self.team.size)
        schedule = self.model.schedule
        self.watcher.note(
            lr=rate,
            alpha=schedule.smallest(t) if schedule is not None else None,
            tokens=tokens,
            tokens_per_second=tokens / (time.perf_counter() - started),
            memory_bytes=peak_memory(self.device),
            **read,
        )
        return metrics

    def rate(self, row: int) -> float:
        """Return the learning rate of update ``row``, which steps from theta_row to theta_{row + 1}."""
        return learning_rate(self.config.train, row)

    def work(self, batches: Sequence[Batch], tokens: Tensor) -> Mapping[str, float | None]:
        """Do the update on the device. No operator depends on numbers of the host that change from row to row."""
        try:
            loss, nll = self.forward_backward(batches, tokens)
            return self.change(loss, nll)
        finally:  # after a recording that failed, too
            self.forget()

    def change(self, loss: Tensor, nll: Tensor) -> Mapping[str, float | None]:
        """Do the second half of an update: record the row of theta_t, then clip and step to theta_{t+1}."""
        metrics = self.watcher.step(loss=loss, nll=nll)
        if self.config.train.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.clip_norm)
        self.optimizer.step()
        if self.working is not None:
            self.working.refresh()
        return metrics

    def forget(self) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.working is not None:
            self.working.forget()

    def forward_backward(self, batches: Sequence[Batch], tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradients of the loss per real token of all micro-batches together; return (loss, unsmoothed
        nll).

        On several ranks ``tokens`` is the number of tokens of all ranks divided by the number of ranks. Both losses are
        this rank's sums times the number of ranks, divided by all tokens, since gradients and metrics are averaged over
        ranks.
        """
        loss_sum = nll_sum = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, start=1):
            loss, nll = self.micro_batch(batch, tokens, last=number == len(batches))
            loss_sum, nll_sum = loss_sum + loss, nll_sum + nll
        return loss_sum / tokens, nll_sum / tokens

    def micro_batch(self, batch: Batch, tokens: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        """Add the gradients of one micro-batch; return the sums of its losses, smoothed and unsmoothed."""
        self.passes.masks = batch.masks
        if self.config.probes.record:
            self.watcher.batch(held(batch, tokens, self.row))
        compiling = explained() if self.compiled else nullcontext()
        with compiling, attention(self.passes.kernels), self.team.accumulating(self.spread, last=last):
            with self.passes.autocast():
                logits = self.spread(**batch.inputs)
            loss, nll = token_losses(logits, batch.labels, batch.weight, self.config.train.label_smoothing)
            (loss / tokens).backward()
        if self.working is not None:
            self.working.widen()
        return loss.detach(), nll.detach()

    def evaluates(self, row: int) -> bool:
        """Return True if the held-out loss is measured at this row, apart from the probes: ``train.evaluations`` times,
        as evenly over the schedule (``train.span``) as rows allow, from row 0 on."""
        count, span = self.config.train.evaluations, self.config.train.span
        return row * count // span != (row - 1) * count // span

    def save(self) -> None:
        """Close the tables' current parts and write a checkpoint; a resume starts exactly here."""
        self.watcher.flush()
        own = {
            "watcher": self.watcher.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        state = {
            "row": self.row,
            "part": self.run.seal(),
            "model": self.team.model_state(self.model),
            "optimizer": self.team.optimizer_state(self.model, self.optimizer),
            **self.team.gathered(own),
            **self.judging.state_dict(),
        }
        if self.team.first:
            checkpoint.save(self.run.path / "checkpoints", self.row, state, self.run.run_id)
        self.checkpoints.restart()

    def _load_model(self, state: dict[str, Any]) -> None:
        try:
            self.model.load_state_dict(state["model"])
            self.row = int(state["row"])
            self.judging.load_state_dict(state)
        except (KeyError, RuntimeError, TypeError) as error:
            raise InputError("the checkpoint does not belong to this run's configuration; remove it.") from error

    def _load_rest(self, state: dict[str, Any]) -> None:
        own = self.team.own(state)
        if group_settings(state["optimizer"]["param_groups"]) != group_settings(self.optimizer.param_groups):
            raise InputError(
                "the checkpoint has other parameter groups (rate factor, eps, decay) than this version gives to "
                f"architecture {self.config.model.arch!r}: start the run again under another --name."
            )
        with own_rates(self.optimizer):
            self.team.load_optimizer(self.model, self.optimizer, state["optimizer"])
        self.watcher.load_state_dict(own["watcher"])
        torch.set_rng_state(own["rng"].cpu())
        if own["cuda_rng"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda_rng"].cpu(), self.device)

    def _present(self) -> list[Batch]:
        """Return the micro-batches of this row's update, each whole."""
        return [self._micro_batch(self.row, index) for index in range(self.config.train.accumulate)]

    def _micro_batch(self, row: int, index: int) -> Batch:
        return aligned(self.dataset.micro_batch(row, index, self.config.train.accumulate), self.device)
