"""What watches a model, made from what a watcher is given: places, boards and passes, each from those before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from ...errors import UsageError
from ...schema import Sink, Table
from .._engine.board import Board, CleanPasses, allocate, lay_out_anew
from .._engine.curvature_rows import CurvatureRows
from .._engine.first_batch import FirstBatch
from .._engine.guard import Guard
from .._engine.hooks import RootHook
from .._engine.leftover import Leftover
from .._engine.masks import Mask, Masks
from .._engine.neutral_pass import Audit
from .._engine.notices import Notices
from .._engine.options import WatchOptions
from .._engine.reference_rows import ReferenceRows
from .._engine.selection import Names, boards_for, chosen, extended, find_sites, left_out, split_sites
from .._engine.stages import agreed, check_for_stages
from .._engine.tapped import Place, Tapped, mentions
from .._engine.training_pass import TrainingPass
from .._engine.watchable import as_tuple, check_arguments, check_current, check_watchable, compiled_modules
from ..base import PROBES, When
from ..incidents.report import Forensics
from ..parameters.pieces import Parameters
from ..parameters.pipeline import Pipeline
from ..parameters.ranks import NullSink
from ..parameters.spreading import spread_out
from ..places.sites import Sites


class Assembly:
    """The parts of a watcher; ``declare`` tells the sink which tables there are.

    Raises UsageError for a model or an argument that cannot serve, before anything is attached or written.
    """

    def __init__(
        self,
        model: nn.Module,
        sink: Sink,
        options: WatchOptions,
        declare: Callable[[], None],
        audit: Audit,
    ) -> None:
        probes, mask, scaler, recorder = options.probes, options.mask, options.scaler, options.recorder
        reference = options.reference
        check_watchable(model)
        check_arguments(options.optimizer, scaler, mask, reference)
        own, narrowed = split_sites(options.sites)
        self.model, self.optimizers, self.scaler = model, as_tuple(options.optimizer), scaler
        self.ranks = ranks = spread_out(model, options.parallel, options.share)
        self.stages = ranks if isinstance(ranks, Pipeline) else None
        if self.stages is not None:
            check_for_stages(model, mask, reference)
            reference = None
        self.sites = find_sites(model, options.output_site, own)
        if ranks is not None:
            self.sites = ranks.own_sites(self.sites)
        self.sink = sink if ranks is None or ranks.rank == 0 else NullSink()
        self.parameters = Parameters(model, self.sites.place, self.optimizers, ranks)
        loss = options.curvature_loss or options.curvature_batch == "update"
        given = {"optimizer": self.optimizers, "reference": reference, "loss": loss}
        lacks = [name for name, one in given.items() if not one]
        self._named = {name for name, named in chosen(probes).items() if named and self.stages is None}
        self._lay = partial(boards_for, probes, parameters=self.parameters, only=narrowed, lacks=lacks)
        later = self.stages is not None or mentions(model)  # what is missing is elsewhere, or shown in the first pass
        self.boards, self.dropped = self._lay(sites=self.sites, elsewhere=later)
        if self.stages is not None:
            self.boards, self.dropped = agreed(self.boards, dict(self.dropped), probes, self.stages)
        sums = allocate(self.boards, self.parameters.device)
        if ranks is not None:
            ranks.check_alike([board.table for board in self.boards])

        scaled = scaler is not None and scaler.is_enabled()
        self.guard, self.audit = Guard(options.strict), audit
        self.notices = Notices(model, ranks is None or ranks.rank == 0 or self.stages is not None, scaled)
        self.notices.left_out(left_out(self.sites, chosen(probes)))
        self.clean = CleanPasses(sums) if ranks is None else None
        self.training = TrainingPass(
            model,
            self.on("forward", "backward"),
            self._masks(mask),
            self.guard,
            scaler,
            ranks,
            self.clean,
            recorder is not None,
        )
        compiled = self.notices.compiled()
        if compiled:
            self.training.stay()
        # what is recorded for replays is a loop of ours
        self.leftover = Leftover(self.parameters, able=recorder is None and self.stages is None and not compiled)
        self.training.leftover = self.leftover
        self.reference, self._first = None, None
        if isinstance(reference, str):
            reference = self._first = FirstBatch(model, self.training.masks)
        if reference is not None:
            self.reference = ReferenceRows(
                model,
                self.on("reference"),
                self._masks(self._first.mask if self._first else mask),
                self.guard,
                reference,
                options.update_every,
                options.schedule,
                self.parameters,
                ranks,
                recorder,
                options.measured,
                self.audit,
                options.restore,
            )
        self.curvature = CurvatureRows(
            model,
            self.on("curvature"),
            self.guard,
            options.curvature_every,
            options.curvature_loss,
            reference,
            self.parameters,
            ranks,
            options.curvature_batch,
            self.audit,
            options.restore,
        )
        self.tapped = self._taps(probes, options.tapped)
        self.training.tapped = self.tapped
        if self.reference is not None:
            self.reference.tap(self.tapped)
        self.forensics = Forensics(self.boards, self.parameters, self._order, self.sink, scaled)
        self._declare = declare
        self._laid_out = False
        self._handles: list[Any] = []
        if ranks is not None and ranks.known:
            self.lay_out()
        elif ranks is not None:
            self._handles.append(model.register_forward_pre_hook(RootHook(lambda *_: self.lay_out())))

    @property
    def tables(self) -> dict[str, Table]:
        """What is recorded, over all stages of a pipeline: the definitions of the tables, by name."""
        tables = [board.table for board in self.boards] if self.stages is None else self.stages.tables
        return {table.name: table for table in tables}

    def on(self, *when: When) -> list[Board]:
        """The boards whose probes look at one of these passes."""
        return [board for board in self.boards if board.probe.on in when]

    def after_steps(self, stepped: Callable[[int], None]) -> None:
        """Calls ``stepped`` with an optimizer's number after each of its steps."""
        self._handles += [
            optimizer.register_step_post_hook(lambda *_, number=number: stepped(number))
            for number, optimizer in enumerate(self.optimizers)
        ]

    def lay_out(self) -> None:
        """Once the model lies on the ranks as it will: what each of them has of it."""
        if self._laid_out or self.ranks is None:
            return
        self._laid_out = True
        if self.ranks.found.tensor > 1 and compiled_modules(self.model):
            raise UsageError("a compiled tensor-parallel model cannot be watched: leave torch.compile out.")
        if self.ranks.late:
            check_current(self.optimizers, self.model)
            self.parameters.bind()
        if (shards := self.ranks.shards_of(self.sites)) is not None:
            for board in self.boards:
                board.probe.all_heads = shards.all_heads

    def settle_places(self, t: int) -> None:
        """At the first row: the tables are as they will be, with what the model showed in its first pass."""
        expected = self.tapped.expected
        if self.tapped.settle():
            if self.ranks is not None:
                self.ranks.check_alike(list(self.tables.values()))
            self._declare()
        if expected and (missing := [(name, why) for name, why in self.dropped if name in self._named]):
            raise UsageError(f"probe {missing[0][0]!r} {missing[0][1]}.")
        self.tapped.say(t)

    def recall_places(self, known: Sequence[Place]) -> None:
        """What an earlier attempt of the run knew of the values that the model shows."""
        if self.tapped.recall(self.boards, known):
            self._declare()
        self.tapped.settle()

    def close(self) -> None:
        """Takes every hook away."""
        self.training.close()
        self.curvature.close()
        self.tapped.close(bool(compiled_modules(self.model)))
        if self._first is not None:
            self._first.close()
        if self.ranks is not None:
            self.ranks.close()
        for handle in self._handles:
            handle.remove()

    def _taps(self, probes: Names, known: Sequence[Place]) -> Tapped:
        why_not = ""
        if self.stages is not None:
            why_not = "is in a stage of a pipeline, whose tables are laid out with those of all"
        kinds = [PROBES[name] for name in chosen(probes)]
        return Tapped(self.model, self.sites, self.boards, kinds, self._extend, known, why_not)

    def _extend(self, sites: Sites) -> None:
        """Places come to the tables, which the model shows in its first pass."""
        self.sites = sites
        boards, self.dropped = self._lay(sites=sites, elsewhere=True)
        for board in extended(self.boards, boards):
            self.boards.append(board)
            home = self.reference if board.probe.on == "reference" else self.training
            assert home is not None
            home.add(board)
        lay_out_anew(self.boards, self.parameters.device, self.clean)

    def _masks(self, mask: Mask | Callable[[], Mask | None] | None) -> Masks:
        return Masks(mask, [stack.name for stack in self.sites.stacks])

    def _order(self) -> dict[tuple[str, int], int]:
        """When each place is called in a forward pass; the held-out pass comes after."""
        held_out = self.reference.order if self.reference is not None else {}
        return {**self.training.order, **{key: len(self.training.order) + n for key, n in held_out.items()}}
