"""The check that the optimizers which ``watch`` was given are those that step."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .._engine.row import RowRecord
from .._engine.watched import Watched
from ..state.bits import version, versions
from .instrument import Instrument
from .loop_checks import LoopChecks

WITNESSES = 4  # gradients that are compared, the smallest: what is held of them costs no memory
UPDATES = 2  # updates in turn in which something else moved the parameters: one alone may be meant


@dataclass
class Unstepped:
    """The updates in turn in which an optimizer did not step.

    ``since``: the first of them; ``moved``: the number of the last ones in turn in which something else moved its
    parameters. ``writes``: the parameters that have a gradient, each with the number of writes to it; ``gradients``: a
    few of these parameters, each with its gradient and the number of writes to that gradient.
    """

    since: int
    moved: int = 0
    writes: list[tuple[Tensor, int | None]] = field(default_factory=list)
    gradients: list[tuple[Tensor, Tensor, int | None]] = field(default_factory=list)

    def mark(self, parameters: Iterable[Tensor]) -> None:
        """Note the parameters as they are. One that is updated inside backward is left out."""
        held = [p for p in parameters if p.grad is not None and not getattr(p, "_post_accumulate_grad_hooks", None)]
        self.writes = list(zip(held, versions(held), strict=True))
        few = heapq.nsmallest(WITNESSES, held, key=Tensor.numel)
        self.gradients = [(p, p.grad, version(p.grad)) for p in few if p.grad is not None]

    def has_moved(self, others: set[int]) -> bool:
        """Return True if something wrote to most of the parameters since, as an optimizer writes to all. Those of
        ``others``, whose optimizers stepped, do not count. (A single one is written in a forward pass, too, such as
        that of ``nn.Embedding(max_norm=)``.)

        False while gradients are added up, since no update is made then. (If they were zeroed in between, there are two
        writes to them, or they are other tensors.)
        """
        if all(p.grad is g and (version(g) or 0) <= (writes or 0) + 1 for p, g, writes in self.gradients):
            return False
        written = [version(p) != before for p, before in self.writes if id(p) not in others]
        return 2 * sum(written) > len(written)


class GivenOptimizers(Instrument):
    """The warning of an optimizer that ``watch`` was given and that does not step, while its parameters move: another
    one was made, or the wrong one was given. It comes with the second update in turn in which this is known.

    Of an optimizer of another model, which was told already, nothing more is said.

    ``since``: optimizers of which this is certain, by number, with the first update without a step of theirs; they are
    removed once they step. A parameter is known to have moved by autograd's count of writes, on the host. Optimizers
    that step cost nothing. If a GradScaler leaves an update out, no parameter moves.
    """

    def __init__(self, checks: LoopChecks) -> None:
        self._checks = checks
        self.since: dict[int, int] = {}
        self._silences: dict[int, Unstepped] = {}
        self._stepped: set[int] = set()  # optimizers that stepped since the last step()
        self._begun = False  # step() was called

    def open(self, watched: Watched) -> None:
        self._watched = watched
        # what is recorded for replays is a loop of ours; of a pipeline, a rank sees its own stage alone
        self._wanted = watched.options.recorder is None and watched.stages is None

    def after_step(self, number: int) -> None:
        self._stepped.add(number)
        self._silences.pop(number, None)
        self.since.pop(number, None)

    def after_backward(self, row: RowRecord) -> None:
        """Look at the update before this row, of row t - 1."""
        count = len(self._watched.optimizers)
        if self._wanted and self._begun and len(self._stepped) < count:
            silent = [number for number in range(count) if number not in self._stepped | self.since.keys()]
            others = {id(p) for number in self._stepped for p in self._parameters(number)}
            for number in silent:
                self._follow(number, row.step - 1, others)
            self._warn(row.step, [n for n in silent if self._silences[n].moved >= UPDATES])
        self._begun = True
        self._stepped.clear()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Forget the loop before: the parameters are loaded, too."""
        self.since.clear()
        self._silences.clear()

    def _follow(self, number: int, update: int, others: set[int]) -> None:
        """Take an update in which the optimizer of this number did not step."""
        silence = self._silences.get(number)
        if silence is None:
            silence = self._silences[number] = Unstepped(update)
        elif silence.has_moved(others):
            silence.moved += 1
        else:
            silence.since, silence.moved = update + 1, 0
        silence.mark(self._parameters(number))

    def _parameters(self, number: int) -> Sequence[Tensor]:
        """Return the parameters of an optimizer: those of the model if no optimizer holds any of them, as one does not
        that was made for another model."""
        of_model = self._watched.parameters.originals
        known = {id(p) for p in of_model}
        groups = self._watched.parameters.optimizer_groups
        if not any(id(p) in known for group in groups for p in group["params"]):
            return of_model
        return [p for group in self._watched.optimizers[number].param_groups for p in group["params"]]

    def _warn(self, row: int, stopped: Sequence[int]) -> None:
        count = len(self._watched.optimizers)
        for number in stopped:
            self.since[number] = since = self._silences.pop(number).since
            if self._checks.has_told("others"):
                continue
            if count == 1:
                which, what = "the optimizer that watch was given", "(optimizer=...) the optimizer that steps"
            else:
                which = f"optimizer {number} (counted from 0) of the {count} that watch was given"
                what = "(optimizer=[...]) all optimizers that step"
            self._checks.warn(
                row,
                f"given optimizer {number}",
                f"{which} has not stepped since row {since}, while its parameters move: give watch{what}",
            )
