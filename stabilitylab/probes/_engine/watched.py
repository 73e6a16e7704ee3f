"""The watched model, and the facts about it that all instruments share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from ...errors import UsageError
from ...schema import Sink, Table
from ..base import When
from ..parameters.pieces import Parameters
from ..parameters.pipeline import Pipeline
from ..parameters.ranks import NullSink
from ..parameters.spreading import spread_out
from ..places.sites import Sites
from .board import Board, CleanPasses, allocate, lay_out_anew
from .cadence import is_due
from .guard import Guard
from .hooks import RootHook
from .masks import OF_EACH_PASS, Mask, Masks
from .neutral_pass import Audit, NeutralPass
from .options import WatchOptions
from .outside import OUTSIDE, rows_of
from .selection import boards_for, chosen, extended, find_sites, split_sites
from .stages import agreed, check_for_stages
from .tap_places import mentions
from .watchable import as_tuple, check_arguments, check_current, check_watchable, compiled_modules


class Watched:
    """The model with its places, parameters, optimizers, processes and tables, by the options of a watcher.

    ``declare`` tells the sink which tables there are. ``total``: True if each row has the norm of the whole gradient.
    Raises UsageError for a model or an option that cannot serve, before anything is attached or written.
    """

    def __init__(
        self, model: nn.Module, sink: Sink, options: WatchOptions, declare: Callable[[], None], audit: Audit
    ) -> None:
        check_watchable(model)
        check_arguments(options.optimizer, options.scaler, options.mask, options.reference)
        own, narrowed = split_sites(options.sites)
        self.model, self.options, self.declare, self.audit = model, options, declare, audit
        self.optimizers, self.scaler = as_tuple(options.optimizer), options.scaler
        self.total = options.total_every_step
        self.reference = options.reference
        self.ranks = ranks = spread_out(model, options.parallel, options.share)
        self.stages = ranks if isinstance(ranks, Pipeline) else None
        if self.stages is not None:
            check_for_stages(model, options.mask, self.reference)
            self.reference = None
        self.sites = ranks.own_sites(find_sites(model, options.output_site, own))
        self.sink = sink if ranks.rank == 0 else NullSink()
        self.first = ranks.rank == 0 or self.stages is not None
        self.parameters = Parameters(model, self.sites.place, self.optimizers, ranks)
        loss = options.curvature_loss or options.curvature_batch == "update"
        given = {"optimizer": self.optimizers, "reference": self.reference, "loss": loss}
        lacks = [name for name, one in given.items() if not one]
        self._lay = partial(boards_for, options.probes, parameters=self.parameters, only=narrowed, lacks=lacks)
        mentioned = mentions(model)
        later = self.stages is not None or mentioned  # what is missing is elsewhere, or shown in the first pass
        self.boards, self.dropped = self._lay(sites=self.sites, elsewhere=later)
        if self.stages is not None:
            self.boards, self.dropped = agreed(self.boards, dict(self.dropped), options.probes, self.stages)
        sums = allocate(self.boards, self.parameters.device)
        ranks.check_alike([board.table for board in self.boards])
        self.scaled = self.scaler is not None and self.scaler.is_enabled()
        self.guard = Guard(options.strict)
        self.clean = CleanPasses(sums) if ranks.alone else None
        shows = self.stages is None and mentioned and bool(chosen(options.probes))
        # whether the training pass is probed
        self._trains = shows or any(board.probe.on not in ("reference", "curvature") for board in self.boards)
        self._laid_out = False
        self._handle: Any = None

    @property
    def tables(self) -> dict[str, Table]:
        """The definitions of all tables by name, those of every stage of a pipeline among them."""
        tables = [board.table for board in self.boards] if self.stages is None else self.stages.tables
        return {table.name: table for table in tables}

    def on(self, *when: When) -> list[Board]:
        """Return the boards whose probes look at one of these passes."""
        return [board for board in self.boards if board.probe.on in when]

    def due(self, t: int) -> bool:
        """Return True if the training pass of this row is probed, by what is recorded in it."""
        return self._trains and self.in_turn(t)

    def in_turn(self, t: int) -> bool:
        """Return True if ``every`` names this row, whatever is recorded."""
        return is_due(t, self.options.every)

    def masks(self, mask: Mask | Callable[[], Mask | None] | None, advice: str = OF_EACH_PASS) -> Masks:
        stacks = [stack.name for stack in self.sites.stacks]
        return Masks(mask, stacks, self.options.batch_first is False, advice)

    def neutral_pass(self, kind: str, boards: Callable[[], Sequence[Board]]) -> NeutralPass:
        """Return the guard around a kind of pass that fills ``boards``: "reference" or "curvature"."""
        options = self.options
        return NeutralPass(
            kind, self.model, boards, self.guard, self.audit, self.ranks, options.restore, options.stateless
        )

    def await_layout(self) -> None:
        """Look at how the model lies on the ranks: now, or at its first forward if that cannot be told yet."""
        if self.ranks.known:
            self.lay_out()
        else:
            self._handle = self.model.register_forward_pre_hook(RootHook(lambda *_: self.lay_out()))

    def lay_out(self) -> None:
        """Read what each rank has of the model, once the model lies on the ranks as it will."""
        if self._laid_out:
            return
        self._laid_out = True
        if self.ranks.found.tensor > 1 and compiled_modules(self.model):
            raise UsageError("a compiled tensor-parallel model cannot be watched: leave torch.compile out.")
        if self.ranks.late:
            check_current(self.optimizers, self.model)
            self.parameters.bind()
        self._tell(self.boards)

    def _tell(self, boards: Sequence[Board]) -> None:
        """Tell the probes what this rank has of a batch and of the heads."""
        shards = self.ranks.shards_of(self.sites)
        for board in boards:
            board.probe.batch_first = self.options.batch_first
            board.probe.of_batch = self.ranks.found.of_batch(self.ranks.rank)
            if shards is not None:
                board.probe.all_heads = shards.all_heads

    def extend(self, sites: Sites) -> Sequence[Board]:
        """Bring places that the model shows in its first pass to the tables; return the tables that are new."""
        self.sites = sites
        boards, self.dropped = self._lay(sites=sites, elsewhere=True)
        new = extended(self.boards, boards)
        self.boards += new
        if self._laid_out:
            self._tell(new)
        return new

    def leave_out(self, stack: str) -> None:
        """Leave out what tables of the residual stream have of the layers of a stack, since these return branches. An
        output that the caller has named stays."""
        layers = [site for site in self.sites.layers if site.stack == stack]
        own, _ = split_sites(self.options.sites)
        named = self.sites.outputs if self.options.output_site is not None or "outputs" in own else ()
        for board in self.boards:
            if board.probe.of_stream:
                rows = [row for row in rows_of(board.sites, layers) if board.sites[row] not in named]
                board.leave_out(rows, OUTSIDE)

    def make_room(self) -> None:
        """Lay the numbers of all tables out anew, after places came."""
        lay_out_anew(self.boards, self.parameters.device, self.clean)

    def close(self) -> None:
        self.ranks.close()
        if self._handle is not None:
            self._handle.remove()
