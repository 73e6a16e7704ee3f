"""The result of a search: three numbers with their intervals, and the sentences that describe them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..errors import listed

Outcome = Literal["found", "fails at every rate", "constant", "too early"]


@dataclass(frozen=True)
class Bracket:
    """A number with its interval. An end that is None is open: nothing beyond it was tried."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        low = "?" if self.low is None else f"{self.low:.3g}"
        high = "?" if self.high is None else f"{self.high:.3g}"
        return f"{self.value:.3g} [{low}, {high}]"


@dataclass(frozen=True)
class SafeTrend:
    """The trend of the largest safe rate over the rungs: log(rate) = a + ``slope`` log(updates). ``low`` and ``high``:
    the 95 % interval of the slope. ``rungs``: the number of rungs. ``at_horizon``: the line continued to the horizon,
    with the line's interval there."""

    slope: float
    low: float
    high: float
    rungs: int
    at_horizon: Bracket


@dataclass(frozen=True)
class RateAnswer:
    """The result of ``lr_find``.

    - ``outcome``: "found"; "fails at every rate"; "constant" (no trial changed the loss); "too early" (the search was
      stopped within its first rung).
    - ``best``: the rate of the lowest loss. Its interval contains every rate whose loss may be as low, by the paired
      interval over batches and the spread of seeds, and half a step of the grid on each side.
    - ``safe``: the largest rate at which no seed failed and the mean loss is within ``delta`` of the best. The rate
      errs on the low side. Its interval reaches from the largest rate that is certainly within delta to the lowest rate
      that is certainly not.
    - ``warmup``: the shortest warm-up that does not lower the safe rate. Its interval starts at the longest warm-up
      that does.
    - ``updates``: the rung from which the numbers are read. ``horizon``: the updates of the planned run.
    - ``seeds``: the number of seeds behind the best and the safe rate.
    - ``losses``: rung -> rate -> loss of the first seed (inf: failed). ``start``: the loss before training.
      ``failures``: rate -> the reason of its first failure.
    - ``safe_by_rung``: rung -> largest safe rate of the first seed. ``trend``: the trend of these rates; None with
      fewer than three rungs.
    - ``cost``: the number of updates that ran. ``seconds``: the wall time.
    - ``stopped``: the reason why the search ended early; "" if it did not.
    - ``scores``: the losses that ranked the rates ("held-out loss" or "smoothed training loss").
    - ``notes``: sentences about doubts. ``out``: the folder of the search.
    """

    outcome: Outcome
    best: Bracket | None
    safe: Bracket | None
    warmup: Bracket | None
    delta: float
    updates: int
    horizon: int
    seeds: int
    losses: Mapping[int, Mapping[float, float]]
    failures: Mapping[float, str]
    safe_by_rung: Mapping[int, float]
    trend: SafeTrend | None
    notes: Sequence[str]
    start: float
    planned_warmup: int | None = None
    stopped: str = ""
    cost: int = 0
    seconds: float = 0.0
    name: str = "the model"
    scores: str = "held-out loss"
    rates: Sequence[float] = ()  # the user's own rates of all parameter groups, if there are several
    out: str = ""
    signal: int | None = None  # that ended the search

    @property
    def whole(self) -> bool:
        """True if the horizon was reached."""
        return self.updates == self.horizon

    def as_dict(self) -> dict[str, Any]:
        """Return all fields; rates that are keys become text."""
        own = asdict(self)
        own["losses"] = {
            str(rung): {f"{rate:g}": loss for rate, loss in losses.items()} for rung, losses in self.losses.items()
        }
        own["failures"] = {f"{rate:g}": why for rate, why in self.failures.items()}
        own["safe_by_rung"] = {str(rung): rate for rung, rate in self.safe_by_rung.items()}
        return own

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def sentences(self) -> list[str]:
        """Return the answer in sentences, the rates first."""
        return [*_TOLD[self.outcome](self), *self.notes, *_cost(self)]


def _cost(one: RateAnswer) -> list[str]:
    """Return the cost in a sentence."""
    return [f"The search took {one.cost:,} updates ({one.cost / one.horizon:.1f} horizons)."] if one.cost else []


def _tried(one: RateAnswer) -> tuple[float, float]:
    rates = [rate for losses in one.losses.values() for rate in losses]
    return min(rates), max(rates)


def _fails(one: RateAnswer) -> list[str]:
    low, high = _tried(one)
    why = next(iter(one.failures.values()), "")
    return [
        f"{one.name} fails at every rate from {low:.3g} to {high:.3g} ({low:.3g}: {why}): look for the layer with "
        "'stabilitylab check', or try even smaller rates.",
        *([one.stopped] if one.stopped else []),
    ]


def _constant(one: RateAnswer) -> list[str]:
    return [
        f"The loss of {one.name} stays at {one.start:.6g} at every rate: check that loss_fn calls the model that it is "
        "given, and that the optimizer holds the model's parameters."
    ]


def _too_early(one: RateAnswer) -> list[str]:
    return ["No rung has ended, so that no rate can be named.", *([one.stopped] if one.stopped else [])]


def _found(one: RateAnswer) -> list[str]:
    assert one.best is not None
    assert one.safe is not None
    seeds = f"{one.seeds} seeds" if one.seeds > 1 else "1 seed"
    lines = [
        f"best rate          {_range(one.best)}",
        f"largest safe rate  {_range(one.safe)}",
    ]
    if one.warmup is not None:
        lines.append(f"least warm-up      {_warmup(one)}")
    lines.append(
        f"By the {one.scores} after {one.updates:,} updates, {seeds}. Safe: no failure, and at most {one.delta:.3g} "
        "above the best loss."
    )
    if one.safe.high is None:
        lines.append(f"No rate failed: {_tried(one)[1]:.3g} is the largest that was tried.")
    lines += _horizon(one)
    if len(own := list(dict.fromkeys(one.rates))) > 1:
        each = [f"{one.best.value * rate / max(own):.3g}" for rate in own]
        lines.append(
            f"A rate is the largest of all parameter groups; at the best rate the groups have {listed(each, 6)}."
        )
    if one.stopped:
        lines.append(one.stopped)
    return lines


def _range(bounds: Bracket) -> str:
    if bounds.low is None and bounds.high is None:
        return f"{bounds.value:.3g}"
    if bounds.high is None:
        return f"{bounds.value:.3g}  (at least {bounds.low:.3g})"
    if bounds.low is None:
        return f"{bounds.value:.3g}  (at most {bounds.high:.3g})"
    return f"{bounds.value:.3g}  ({bounds.low:.3g} to {bounds.high:.3g})"


def _warmup(one: RateAnswer) -> str:
    assert one.warmup is not None
    value = f"{one.warmup.value:.0f} updates"
    if not one.warmup.value:
        return f"0  (the planned {one.planned_warmup} are not needed)"
    return f"{value}  ({one.warmup.low:.0f} are not enough)"


def _horizon(one: RateAnswer) -> list[str]:
    """Return how far the safe rate is shown, and its trend."""
    assert one.safe is not None
    rungs = ", ".join(f"{rate:.3g} to {updates:,}" for updates, rate in one.safe_by_rung.items())
    lines = [f"Largest safe rate by rung (1 seed): {rungs} updates."] if len(one.safe_by_rung) > 1 else []
    if one.whole:
        return lines
    shown = f"Safe to {one.updates:,} updates; at the horizon of {one.horizon:,}"
    if one.trend is None:
        count = len(one.safe_by_rung)
        few = "one rung shows" if count == 1 else f"{count} rungs show"
        return [*lines, f"{shown} nothing is known, since {few} no trend."]
    there = one.trend.at_horizon
    return [
        *lines,
        f"{shown}, extrapolated from {one.trend.rungs} rungs: {there.value:.2g} ({there.low:.2g} to {there.high:.2g}); "
        "not shown.",
    ]


_TOLD: dict[str, Callable[[RateAnswer], list[str]]] = {
    "fails at every rate": _fails,
    "constant": _constant,
    "too early": _too_early,
    "found": _found,
}
