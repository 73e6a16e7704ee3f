"""The subject of a search: a model that can be made anew for every trial, with its batches, losses and optimizers."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ..errors import InputError, StabilityLabError, UsageError, first_line
from ..probes.state import RandomStates, random_states, set_random_states

Shape = Literal["constant", "linear", "cosine", "inverse_sqrt"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
USUAL_WARMUP, WARMUP_SHARE = 160, 0.1  # of a plan that names no warm-up: so many updates, at most this share of it
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TrialModel:
    """A fresh model and its optimizers. ``shares``: of each optimizer, the rates of its groups over the largest of
    all."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    shares: tuple[tuple[float, ...], ...]

    def set_rate(self, rate: float) -> None:
        """Set the largest rate of all parameter groups; the others keep their proportion to it."""
        for optimizer, shares in zip(self.optimizers, self.shares, strict=True):
            for group, share in zip(optimizer.param_groups, shares, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate * share)
                else:
                    group["lr"] = rate * share

    def step(self, step: Callable[[Optimizer], Any]) -> None:
        """Call ``step`` on each optimizer."""
        for optimizer in self.optimizers:
            step(optimizer)

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class RateSubject:
    """A model and its training, as a search needs them.

    - ``make(seed)``: returns a fresh model at its initialisation.
    - ``losses(model, t, seed)``: returns the losses of the micro-batches of update t. Their sum is minimised.
    - ``held_out(model)``: returns the losses of the parts of the held-out data. Their mean counts. None without such
      data.
    - ``enter(model, t)``: is called before update t.
    - ``rate_at(peak, t, warmup)``: returns the rate of update t, the schedule.
    - ``warmup``: the planned warm-up; None if the schedule has its own.
    - ``rate``: the optimizer's own rate, the largest of its groups. ``rates``: the rates of all groups.
    - ``clipping``: the norm to which gradients are clipped; 0 for none.
    - ``source_worth(model)``: returns the increase of the loss with another sentence's source [nats/token].
    - ``manifest``: further entries of each trial's run.json. ``measured``: the name of the held-out loss in the run
      directory.
    - ``config``: the settings from which the subject can be made again; {} for a model of a user's own.
    """

    name: str
    make: Callable[[int], TrialModel]
    losses: Callable[[nn.Module, int, int], Iterable[Tensor]]
    rate_at: Callable[[float, int, int], float]
    rate: float
    rates: tuple[float, ...]
    held_out: Callable[[nn.Module], Sequence[float]] | None = None
    enter: Callable[[nn.Module, int], None] = lambda model, t: None
    warmup: int | None = 0
    clipping: float = 0.0
    scaled: bool = False  # gradients are scaled, as in fp16
    source_worth: Callable[[nn.Module], float | None] = lambda model: None
    manifest: Mapping[str, Any] = field(default_factory=dict)
    measured: str = "held_out_loss"
    notes: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


def schedule_of(schedule: Shape | Callable[[int], float], horizon: int) -> Callable[[int, int], float]:
    """Return the schedule: a function of the update t and the warm-up w that returns the share of the peak rate.

    It is (t + 1) / w before update w. From then on, with n = ``horizon``: "constant" 1; "linear" (n - t) / (n - w);
    "cosine" (1 + cos(pi (t - w) / (n - w))) / 2; "inverse_sqrt" sqrt(w / t), or sqrt(1 / (t + 1)) for w = 0. A function
    of t is used as it is, times (t + 1) / w before update w.
    """
    if not callable(schedule) and schedule not in SHAPES:
        raise UsageError(f"schedule = {schedule!r} must be one of {', '.join(SHAPES)}, or a function of the update.")

    def decayed(t: int, w: int) -> float:
        if callable(schedule):
            return float(schedule(t))
        if t < w:
            return 1.0
        rest = max(1, horizon - w)
        return {
            "constant": lambda: 1.0,
            "linear": lambda: max(0.0, (horizon - t) / rest),
            "cosine": lambda: 0.5 * (1 + math.cos(math.pi * min(1.0, (t - w) / rest))),
            "inverse_sqrt": lambda: math.sqrt(w / t) if w else math.sqrt(1 / (t + 1)),
        }[schedule]()

    def share(t: int, w: int) -> float:
        return decayed(t, w) * (min(1.0, (t + 1) / w) if w else 1.0)

    return share


class _RandomApart:
    """Random states of their own for a stream of batches: the trial that happens to read it draws as all others do."""

    def __init__(self) -> None:
        self._own: RandomStates | None = None
        self._before: RandomStates = {}

    def __enter__(self) -> None:
        self._before = random_states()
        if self._own is not None:
            set_random_states(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = random_states()
        set_random_states(self._before)


class BatchStore:
    """The training batches, in an order that depends on the seed.

    A sequence is read epoch by epoch, each epoch in an order that the seed draws. A function is called with the update;
    seed number k gets the updates from k times the horizon on. Any other iterable is read once, as far as the longest
    trial needs, and kept; at its end it starts again.
    """

    def __init__(self, batches: Any, horizon: int, seeds: Sequence[int]) -> None:
        self._horizon, self._place = horizon, {seed: number for number, seed in enumerate(seeds)}
        self._function: Callable[[int], Any] | None = None
        self._stream: Iterator[Any] | None = None
        self._ended, self._random = False, _RandomApart()
        self._kept: Any = []
        if callable(batches):
            self._function = batches
        elif isinstance(batches, Sized) and hasattr(batches, "__getitem__") and not isinstance(batches, Mapping | str):
            self._kept = batches
            if not len(batches):
                raise UsageError("batches is empty: give the batches to train on, one after another.")
        elif isinstance(batches, Iterable) and not isinstance(batches, Mapping | str | Tensor):
            self._stream = iter(batches)
        else:
            raise UsageError(
                f"batches is {type(batches).__name__}: give a list of batches, a loader, or a function of the update."
            )

    def __call__(self, t: int, seed: int) -> Any:
        if self._function is not None:
            return self._function(self._place.get(seed, 0) * self._horizon + t)
        if self._stream is not None:
            if len(self._kept) <= t and not self._ended:
                with self._random:
                    self._read(t)
            if not self._kept:
                raise UsageError("batches is empty: give the batches to train on, one after another.")
            return self._kept[t % len(self._kept)]
        epoch, place = divmod(t, len(self._kept))
        return self._kept[int(self._order(seed, epoch)[place])]

    def _read(self, t: int) -> None:
        assert self._stream is not None
        while len(self._kept) <= t and not self._ended:
            try:
                self._kept.append(next(self._stream))
            except StopIteration:
                self._ended = True

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        return np.random.default_rng([abs(seed), epoch]).permutation(len(self._kept))


def model_subject(
    model: nn.Module | Callable[[], nn.Module],
    batches: Any,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    optimizer: Any,
    *,
    horizon: int,
    seeds: Sequence[int],
    held_out: Any = None,
    schedule: Shape | Callable[[int], float] = "constant",
    warmup: int | None = None,
    clipping: float = 0.0,
    precision: str = "fp32",
    name: str = "",
    make: Callable[[int], tuple[nn.Module, Any]] | None = None,
) -> RateSubject:
    """Return the subject of a search for a user's model. The arguments are those of :func:`.find.lr_find`.

    ``make(seed)``: returns model and optimizer. By default a module is copied, together with its optimizers, and a
    function that makes a module is called. ``name``: the name of the model; by default that of its class.

    Raises UsageError for wrong values, InputError if ``loss_fn`` fails.
    """
    if precision not in ("fp32", *PRECISIONS):
        raise UsageError(f"precision = {precision!r} must be fp32 (the model as it is), bf16 or fp16 (autocast).")
    if isinstance(clipping, bool) or not isinstance(clipping, int | float) or not 0 <= clipping < math.inf:
        raise UsageError(f"clipping = {clipping!r} must be the norm that gradients are clipped to, 0 for none.")
    if not callable(loss_fn):
        raise UsageError("loss_fn must be a function of (model, batch) that returns the loss.")
    if not isinstance(model, nn.Module) and not callable(model):
        raise UsageError("model must be a torch.nn.Module, or a function that makes one.")
    store = BatchStore(batches, horizon, seeds)
    own = make or (lambda seed: made_by(model, optimizer))

    def fresh(seed: int) -> TrialModel:
        return trial_model(*own(seed))

    first = fresh(seeds[0])
    device = _device(first.model)
    kind = PRECISIONS.get(precision)

    def cast() -> Any:
        return nullcontext() if kind is None else torch.autocast(device.type, dtype=kind)

    def one(model: nn.Module, batch: Any) -> Tensor:
        try:
            with cast():
                found = loss_fn(model, batch)
        except StabilityLabError:
            raise
        except Exception as error:
            raise InputError(f"loss_fn(model, batch) failed: {type(error).__name__}: {error}") from error
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise UsageError(f"loss_fn(model, batch) gave {_shape(found)}: it must return one number with a gradient.")
        return found.reshape(())

    def training(model: nn.Module, t: int, seed: int) -> Iterator[Tensor]:
        found = one(model, store(t, seed))
        if not found.requires_grad:
            raise UsageError("the loss has no gradient: loss_fn must return a number that depends on the parameters.")
        yield found

    parts, share = _parts(held_out), schedule_of(schedule, horizon)
    largest, rates = rates_of(first.optimizers)
    planned, notes = warmup, []
    if warmup is None:
        planned = None if callable(schedule) else usual_warmup(horizon)
    if isinstance(batches, Sequence) and len(batches) == 1:
        notes.append("There is one batch: the rates are those for learning it by heart. Give more batches.")
    return RateSubject(
        name=name or type(first.model).__name__,
        make=fresh,
        losses=training,
        rate_at=lambda peak, t, warmup: peak * share(t, warmup),
        rate=largest,
        rates=rates,
        held_out=None if parts is None else lambda model: [float(one(model, batch)) for batch in parts],
        warmup=planned,
        clipping=float(clipping),
        scaled=precision == "fp16" and device.type == "cuda",
        notes=tuple(notes),
    )


def usual_warmup(horizon: int) -> int:
    """Return the warm-up of a plan that names none: 160 updates, at most a tenth of the horizon."""
    return min(USUAL_WARMUP, int(WARMUP_SHARE * horizon))


def made_by(model: nn.Module | Callable[[], nn.Module], optimizer: Any) -> tuple[nn.Module, Any]:
    """Return a fresh model and its optimizers: a module is copied together with optimizers that were made for it; a
    function that makes a module is called, and ``optimizer`` must be a function too."""
    own = _optimizers(optimizer)
    if not isinstance(model, nn.Module):
        if own is not None:
            raise UsageError("optimizer belongs to another model than model() makes: give a function that makes it.")
        return model(), optimizer
    try:
        plain = getattr(model, "_orig_mod", model)
        return copy.deepcopy((plain, own)) if own is not None else (copy.deepcopy(plain), optimizer)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"the model cannot be copied ({first_line(error)}): give a function that makes it, or the module "
            "as it is before DistributedDataParallel, fully_shard or a backward pass."
        ) from error


def trial_model(model: nn.Module, optimizer: Any) -> TrialModel:
    """Return a model and its optimizers for a trial. ``optimizer``: an optimizer or several, or a function of the
    parameters (of the model, if its argument is called ``model``) that returns them; None: AdamW."""
    _device(model)
    own = _optimizers(optimizer)
    if own is None:
        function = optimizer or AdamW
        if not callable(function):
            raise UsageError("optimizer must be a torch optimizer, a list of them, or a function of the parameters.")
        own = _optimizers(made_for(function, model))
    if not own:
        raise UsageError("optimizer must be a torch optimizer, a list of them, or a function of the parameters.")
    held = {id(p) for one in own for group in one.param_groups for p in group["params"]}
    if not held & {id(p) for p in model.parameters()}:
        raise UsageError("the optimizer holds no parameter of the model: make it from model.parameters().")
    for one in own:
        closure = inspect.signature(one.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise UsageError(
                f"{type(one).__name__} needs a closure, which a search does not have: give another optimizer."
            )
    largest, _ = rates_of(own)
    shares = tuple(tuple(_rate(group) / largest for group in one.param_groups) for one in own)
    return TrialModel(model, own, shares)


def rates_of(optimizers: Sequence[Optimizer]) -> tuple[float, tuple[float, ...]]:
    """Return the largest rate of all parameter groups, and every different one. Raises UsageError if all are 0."""
    rates = [_rate(group) for one in optimizers for group in one.param_groups]
    if not max(rates) > 0:
        raise UsageError("all learning rates of the optimizer are 0: give it the rate that you would try first.")
    return max(rates), tuple(dict.fromkeys(rates))


def _rate(group: Mapping[str, Any]) -> float:
    """Return the peak rate of a parameter group: the initial one, where a scheduler has set another."""
    rate = group.get("initial_lr", group.get("lr"))
    try:
        value = float(rate)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(
            f"the optimizer has the learning rate {rate!r}: give it a number (Adafactor: relative_step=False), which "
            "the search can replace."
        )
    return value


def _optimizers(given: Any) -> tuple[Optimizer, ...] | None:
    """Return optimizers as a tuple; None if none are given."""
    if isinstance(given, Optimizer):
        return (given,)
    if isinstance(given, Sequence) and given and all(isinstance(one, Optimizer) for one in given):
        return tuple(given)
    return None


def made_for(function: Callable[[Any], Any], model: nn.Module) -> Any:
    """Return what a function that makes optimizers makes for a model. It gets the model if its first argument is called
    ``model``, otherwise the model's parameters."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        names = []
    return function(model) if names[:1] == ["model"] else function(model.parameters())


def _device(model: Any) -> torch.device:
    if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        raise UsageError("the model must be a torch.nn.Module with parameters.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("no parameter of the model requires a gradient: call requires_grad_(True) on those to train.")
    return next(model.parameters()).device


def _parts(held_out: Any) -> list[Any] | None:
    """Return held-out batches as a list. A tensor, a mapping or a tuple is one batch."""
    if held_out is None:
        return None
    if isinstance(held_out, Tensor | Mapping | tuple | str) or not isinstance(held_out, Iterable):
        return [held_out]
    parts = list(held_out)
    if not parts:
        raise UsageError("held_out is empty: give a list of batches that are not trained on, or leave it out.")
    return parts


def _shape(found: Any) -> str:
    return f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
