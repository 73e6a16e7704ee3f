"""A model cut into stages, one per process, which pass micro-batches on (torch.distributed.pipelining)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ...errors import UsageError
from ...schema import Row, Table
from ..places.sites import Sites
from ..rules import Rule
from .layouts import ModelLayout, ddp_wrappers, whole_layout
from .ranks import Ranks, RankShare, T, gathered, nothing


@dataclass(frozen=True)
class Part:
    """The rows and rules of a table that one stage has."""

    table: Table
    rules: Mapping[str, Rule]  # by column


class Pipeline(Ranks):
    """The stages of one model, of which each process trains its own.

    Tables have the rows of all stages, in the order of the stages; a stage adds its own rows. If a schedule divides the
    gradients of parameters by the number of micro-batches, E is the mean of the losses of micro-batches; gradients of
    activations are then divided by the same number.
    """

    staged = True
    alike = False  # the loss is the last stage's, and kinds of parameters differ

    def __init__(self, model: nn.Module, schedule: Any) -> None:
        check_stage(model, schedule)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.shards, self.late, self.apart = None, False, {}
        self._schedule = schedule
        self._found = ModelLayout({parameter: whole_layout(parameter, 1.0) for parameter in model.parameters()})
        self._own: dict[str, Part] = {}
        self._all: dict[str, Part] = {}
        self._rows: dict[str, list[int]] = {}  # table -> numbers of this stage's rows among those of all stages
        self._metrics = {}

    @property
    def replicated(self) -> bool:
        """Return False: no stage has a copy of another stage's parameters."""
        return False

    @property
    def loss_share(self) -> float:
        return 1 / self._schedule._n_microbatches if self._schedule.scale_grads else 1.0

    @property
    def running(self) -> bool:
        """True if a forward pass now belongs to training. Before its first micro-batch the schedule tries shapes on
        values that mean nothing; this is False meanwhile."""
        done = self._schedule
        return done._stage_forward_initialized and done._stage_backward_initialized == done._has_backward

    @property
    def tables(self) -> list[Table]:
        """The tables of all stages."""
        return [part.table for part in self._all.values()]

    def own_sites(self, sites: Sites) -> Sites:
        """Return the sites without inputs and outputs in the middle of a stack: inputs stay on the stage with the
        stack's first layer, outputs on the stage with its last layer."""
        own = {stack.name: (min(stack.numbers), max(stack.numbers)) for stack in sites.stacks}
        known = self.gathered(own)
        ends = {
            name: (min(each[name][0] for each in known if name in each), max(e[name][1] for e in known if name in e))
            for name in own
        }
        return replace(
            sites,
            inputs=tuple(site for site in sites.inputs if own[site.stack][0] == ends[site.stack][0]),
            outputs=tuple(s for s in sites.outputs if s.stack not in own or own[s.stack][1] == ends[s.stack][1]),
        )

    def agree(self, parts: Sequence[Part], names: Sequence[str], missing: Mapping[str, str]) -> dict[str, Part]:
        """Return the tables that any stage has, in the order of ``names``, with the rows of all stages. ``missing``:
        probes that the caller named and that find nothing on this stage, with the reason. Raises UsageError if no stage
        has a named probe."""
        self._own = {part.table.name: part for part in parts}
        known = self.gathered((self._own, dict(missing)))
        for name, why in missing.items():
            if not any(name in own for own, _ in known):
                raise UsageError(f"probe {name!r} {why}.")
        for name in names:
            if having := [own[name] for own, _ in known if name in own]:
                self._all[name] = _joined(having)
                rows = self._all[name].table.rows
                own = self._own[name].table.rows if name in self._own else ()
                self._rows[name] = [rows.index(row) for row in own]
        return self._all

    def check_alike(self, tables: Sequence[Table]) -> None:
        """Check nothing: stages differ, and :meth:`agree` settles their common tables."""

    def add_up(self, shares: Sequence[RankShare], device: torch.device) -> list[RankShare]:
        placed = [self._placed(share, device) if share.kind == "table" else share for share in shares]
        return super().add_up(placed, device)

    def gathered(self, own: T) -> list[T]:
        """Return the ``own`` of every stage, first stage to last."""
        found = gathered((self._schedule._stage.stage_index, own))
        return [each for _, each in sorted(found, key=lambda pair: pair[0])]

    def _placed(self, share: RankShare, device: torch.device) -> RankShare:
        """Put this stage's rows among the rows of all stages."""
        part, rows = self._all[share.name], self._rows[share.name]
        own = dict(zip(self._own[share.name].rules if rows else (), share.columns, strict=bool(rows)))
        index = torch.tensor(rows, dtype=torch.int64, device=device)
        seen = np.zeros((len(part.table.rows), len(part.rules)), dtype=bool)
        columns = []
        for place, (column, rule) in enumerate(part.rules.items()):
            numbers = nothing(rule, len(part.table.rows), device)
            if rows and column in own:
                numbers.index_copy_(0, index, own[column][1])
                seen[rows, place] = share.seen[:, list(own).index(column)]
            columns.append((rule, numbers))
        return replace(share, columns=columns, seen=seen, copies=False)


def check_stage(model: nn.Module, schedule: Any) -> None:
    """Raise UsageError for schedules and stages that would be read wrongly."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle
    from torch.distributed.tensor import DTensor

    if not isinstance(schedule, PipelineScheduleSingle):
        raise UsageError(
            f"{type(schedule).__name__} gives a process several stages, which interleave: use Schedule1F1B "
            "or ScheduleGPipe, or give parallel='off' and each process a run of its own."
        )
    stage: Any = schedule._stage
    if stage.submod is not model:
        raise UsageError("the model to watch must be the stage's own module: give watch what PipelineStage was given.")
    if stage.num_stages != dist.get_world_size():
        raise UsageError(
            f"a pipeline of {stage.num_stages} stages on {dist.get_world_size()} processes has copies of each stage, "
            "which cannot be watched: watch one without, or give parallel='off' for a run of each process's own."
        )
    if ddp_wrappers(model) or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UsageError("a stage that is sharded itself cannot be watched: use pipeline parallelism alone.")


def _joined(parts: Sequence[Part]) -> Part:
    """Join the parts of several stages, first to last, into one table."""
    rows: list[Row] = [row for part in parts for row in part.table.rows]
    twice = next((row.site for number, row in enumerate(rows) if row in rows[:number]), None)
    if twice is not None:
        raise UsageError(
            f"two stages of the pipeline have {twice!r}: name layers alike in all of them, as a ModuleDict whose keys "
            "are the numbers that they have in the whole model does."
        )
    fullest = max(parts, key=lambda part: len(part.rules))
    rules = {column: rule for part in (fullest, *parts) for column, rule in part.rules.items()}
    return Part(replace(fullest.table, rows=tuple(rows), columns=tuple(rules)), rules)
