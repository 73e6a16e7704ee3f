"""The questions about the whole model, asked of a copy before its one update, during it and after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import listed
from ..probes import random_states_kept
from ..probes.state import StateSnapshot, seed_all
from . import evaluation, leaks, shifts, start, units, wiring
from .answers import Answers
from .bounds import BOUNDS, not_checked
from .result import Check
from .seen import CrossEntropy, Seen, look

NAMES = (
    *(start.LOSS, start.CHANGE, leaks.SAMPLE, leaks.FUTURE, shifts.NAME, units.NAME, wiring.DETACHED, wiring.SHARED),
    *(wiring.LEFT_OUT, wiring.DOUBLES, evaluation.DROPOUT, evaluation.REPEATS),
)
SHARES = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 1e-3, 1e-4)  # tried instead of a rate that is too high
Loss = Callable[[nn.Module, Any], Tensor]


class Questions:
    """The questions to ask. ``twin``: the copy that is stepped, equal to ``model`` until then. ``classes``, ``causal``,
    ``batch_first`` and ``skip`` are those of :func:`stabilitylab.preflight`.

    A question that cannot be answered is "not checked", with the reason, such as the error that it raised.
    """

    def __init__(
        self,
        twin: nn.Module,
        model: nn.Module,
        batch: Any,
        loss_fn: Loss,
        *,
        classes: int | None,
        causal: bool | None,
        batch_first: bool | None,
        skip: Collection[str],
    ) -> None:
        self._twin, self._model, self._batch, self._loss_fn = twin, model, batch, loss_fn
        self._classes, self._causal, self._batch_first = classes, causal, batch_first
        self._before: CrossEntropy | None = None
        self._known = False  # True once the predictions before the update are known
        self._answers = Answers(NAMES, skip)

    @property
    def checks(self) -> list[Check]:
        """Return the answers."""
        return self._answers.checks

    @property
    def nats(self) -> float:
        """Return the mean cross-entropy before the update; 1 if there is none."""
        found = math.nan if self._before is None else float(self._before.losses().mean())
        return found if found > 0 else 1.0

    def before(self) -> None:
        """Ask the questions about the model before the update; the copy is restored."""
        self._answers.ask((units.NAME,), lambda: [units.duplicated_units(self._twin)])
        self._answers.ask((wiring.SHARED,), lambda: [wiring.shared_memory(self._model)])
        self._answers.ask((start.LOSS,), self._at_start)
        self._answers.ask((evaluation.DROPOUT, evaluation.REPEATS), self._repeats)
        self._answers.ask((leaks.SAMPLE, leaks.FUTURE, shifts.NAME), self._dependences)

    def during(self, still: Mapping[str, bool], used: Collection[str], layers: Collection[str]) -> None:
        """Ask which matrices the loss reaches. ``still``: matrices without a gradient in two steps; ``used``: modules
        called."""
        count = sum(own.requires_grad and own.dim() > 1 for own in self._twin.parameters())
        self._answers.ask((wiring.DETACHED,), lambda: wiring.reached(still, used, layers, count))

    def held(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Ask which parameters the optimizers hold, while gradients exist."""
        self._answers.ask((wiring.LEFT_OUT, wiring.DOUBLES), lambda: wiring.held(self._twin, optimizers))

    def after(self, rates: Mapping[str, float], why_not: str) -> None:
        """Ask how the update changed the output, unless there was none (``why_not``). ``rates``: the largest of each
        optimizer."""
        if why_not:
            self._answers.ask((start.CHANGE,), lambda: [not_checked(start.CHANGE, why_not)])
        else:
            self._answers.ask((start.CHANGE,), lambda: [self._change(rates)])

    def _at_start(self) -> Iterator[Check]:
        seen = self._trained()
        self._before, self._known = seen.main, True
        yield start.loss_at_start(seen, self._classes)

    def _repeats(self) -> Iterator[Check]:
        yield from evaluation.repeats(*(self._look(seed, training=False) for seed in (0, 1)))

    def _dependences(self) -> Iterator[Check]:
        seen = self._look(0, training=False, inputs=True)
        lined = shifts.lined(seen, self._batch)
        first = shifts.batch_first(seen, lined) if self._batch_first is None else self._batch_first
        among, axes = leaks.samples(seen, first)
        yield among
        ahead, causal = leaks.future(seen, axes, shifts.next_of(seen, lined), self._causal)
        yield ahead
        yield shifts.label_shift(seen, lined, causal)

    def _change(self, rates: Mapping[str, float]) -> Check:
        if not self._known:
            return not_checked(start.CHANGE, "the predictions before the update are not known")
        found = start.output_change(self._before, self._now())
        if found.state != "fail":
            return found
        return start.output_change(self._before, self._now(), self._lower(rates))

    def _lower(self, rates: Mapping[str, float]) -> str:
        """Return the advice with the rates at which the same update keeps to the bound; "" if there are none."""
        limit = BOUNDS[start.CHANGE, "fail"].limit
        pairs = [
            (own, own.detach().clone(), old.detach().to(own.device))
            for own, old in zip(self._twin.parameters(), self._model.parameters(), strict=True)
        ]
        try:
            for share in SHARES:
                for own, new, old in pairs:
                    own.data.copy_(torch.lerp(old, new, share) if own.is_floating_point() else old)
                assert self._before is not None
                if start.divergence(self._before, self._now()) <= limit:
                    lower = [f"from {rate:.2g} to about {rate * share:.2g}" for rate in rates.values()]
                    if len(lower) == 1:
                        return f"lower the rate of step one {lower[0]}, or warm up"
                    each = ", ".join(f"that of {name} {change}" for name, change in zip(rates, lower, strict=True))
                    return f"lower the rates of step one ({each}), or warm up"
        finally:
            for own, new, _ in pairs:
                own.data.copy_(new)
        return ""

    def _now(self) -> CrossEntropy | None:
        return self._trained().main

    def _trained(self) -> Seen:
        """Run a pass in training mode, as in a step, with the same random numbers each time."""
        return self._look(0, training=True)

    def _look(self, seed: int, *, training: bool, inputs: bool = False) -> Seen:
        with random_states_kept(self._twin), as_it_was(self._twin, training):
            seed_all(seed)
            return look(self._twin, self._batch, self._loss_fn, inputs=inputs)


@contextmanager
def as_it_was(model: nn.Module, training: bool) -> Iterator[None]:
    """Set training or eval mode within this context; then restore modes and state (parameters, buffers, attributes),
    whatever a forward pass writes there. Raises MemoryError if a tensor was written and memory had no room for a
    copy."""
    modes = [(module, module.training) for module in model.modules()]
    snapshot = StateSnapshot(model)
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        lasting = [change.name for change in snapshot.compare().read() if not change.undone]
    if lasting:
        raise MemoryError(f"no room for a copy of {listed(lasting)}, which the forward writes")
