"""The function ``stabilitylab.lr_find``: the best and the largest safe learning rate of a model, found by trials."""

from __future__ import annotations

import inspect
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import UsageError
from ..probes import random_states_kept
from ..stopping import listening
from .answer import answer
from .folder import SearchFolder
from .halving import SEEDS, WARMUPS, RatePlan, halve
from .result import RateAnswer
from .scale import ScaledRates, scaled
from .search import HORIZON
from .subject import RateSubject, Shape, model_subject
from .trials import Budget, FolderTrials, SearchAudience, Silence, beforehand, seconds_of
from .workers import RateWorkers


def lr_find(
    model: nn.Module | Callable[..., nn.Module],
    batches: Any,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    optimizer: Any = None,
    *,
    held_out: Any = None,
    horizon: int = HORIZON,
    schedule: Shape | Callable[[int], float] = "constant",
    warmup: int | None = None,
    clipping: float = 0.0,
    precision: str = "fp32",
    seeds: Sequence[int] = SEEDS,
    delta: float | None = None,
    warmups: Sequence[int] = WARMUPS,
    updates: int | None = None,
    minutes: float | None = None,
    widths: Sequence[int] = (),
    out: str | Path = "runs/lr-find",
    resume: bool = False,
    audience: SearchAudience | None = None,
) -> RateAnswer | ScaledRates:
    """Find the best learning rate, the largest safe one and the shortest warm-up for a planned run of ``horizon``
    updates.

    The model and its training:

    - ``model``: a module, which each trial copies, or a function that makes one (then the initial weights differ
      between seeds too).
    - ``batches``: a list or loader of training batches, or a function of the update.
    - ``loss_fn(model, batch)``: returns the loss, one number.
    - ``optimizer``: an optimizer of the model, several, or a function of the parameters (of the model, if its argument
      is called ``model``). Parameter groups keep their proportions, and a rate is the largest of the groups' rates.
      None: AdamW.
    - ``held_out``: a list of batches that are not trained on, whose loss ranks the rates. Without it the smoothed
      training loss ranks them.
    - ``schedule``: "constant", "linear", "cosine" or "inverse_sqrt" over the horizon, after a linear ``warmup`` (by
      default 160 updates, but at most a tenth of the horizon). Or a function of the update that returns the share of
      the peak rate.
    - ``clipping``: the norm to which gradients are clipped; 0 for none.
    - ``precision``: "fp32" (the model as it is), or "bf16" or "fp16" by autocast.

    The search:

    - ``seeds``: the first seed searches; the others repeat the best and the largest safe rate.
    - ``delta``: the loss of a safe rate may exceed the lowest loss by this much. By default .05, or a tenth of the fall
      of the loss if that is less.
    - ``warmups``: the warm-ups to try that are shorter than the planned one.
    - ``updates``, ``minutes``: the budget. A search that ends early keeps its results, and so does Ctrl-C.
    - ``widths``: one search for each width. ``model`` must then be a function of ``scale``, and the result is a
      :class:`.scale.ScaledRates`.
    - ``out``: the folder for the run directories of all trials. ``resume=True`` continues the search there.

    The caller's weights, optimizers and random states do not change. docs/lr-find.md has the rules of the search.

    Raises UsageError for a wrong argument, InputError if ``loss_fn`` fails.

    >>> found = lr_find(model, batches, loss_fn, optimizer, held_out=held_out, minutes=10)  # doctest: +SKIP
    >>> print(found)  # doctest: +SKIP
    """
    seeds = tuple(seeds)

    def of_width(make: Any, name: str) -> RateSubject:
        return model_subject(
            make, batches, loss_fn, optimizer, horizon=horizon, seeds=seeds, held_out=held_out, schedule=schedule,
            warmup=warmup, clipping=clipping, precision=precision, name=name,
        )  # fmt: skip

    def one(width: int, subject: RateSubject, folder: Path, budget: Budget) -> RateAnswer:
        return search_rates(
            subject, plan_of(subject, horizon, seeds, delta, warmups), folder, budget, resume=resume,
            audience=audience or Silence(),
        )  # fmt: skip

    check_numbers(horizon, seeds, updates, minutes)
    with random_states_kept():  # a function that makes the model, or a loader, draws
        budget = Budget(updates, minutes)
        if not widths:
            return one(0, of_width(model, ""), Path(out), budget)
        if isinstance(model, nn.Module) or "scale" not in inspect.signature(model).parameters:
            raise UsageError(
                "widths= needs model to be a function of scale=, such as lambda scale: Model(width=scale)."
            )
        return scaled(
            widths, lambda width: of_width(lambda: model(scale=width), f"width {width}"), one, Path(out), budget
        )


def plan_of(
    subject: RateSubject, horizon: int, seeds: Sequence[int], delta: float | None, warmups: Sequence[int] = WARMUPS
) -> RatePlan:
    """Return the plan of a search for ``subject``."""
    return RatePlan(subject.rate, horizon, tuple(seeds), subject.warmup, delta, tuple(warmups))


def search_rates(
    subject: RateSubject,
    plan: RatePlan,
    out: Path,
    budget: Budget | None = None,
    *,
    resume: bool = False,
    audience: SearchAudience | None = None,
    workers: RateWorkers | None = None,
    jobs: int = 1,
) -> RateAnswer:
    """Search the rates of ``plan`` in the folder ``out``, write the answer there, and return it.

    ``budget``: None for no limit. ``resume``: True to continue a search in ``out``. ``workers``: ``jobs`` processes
    that run the trials; None: this process runs them. ``audience``: the receiver of the search's progress.

    A first Ctrl-C or SIGTERM ends the search after the present update, a second Ctrl-C at once.
    """
    audience, budget = audience or Silence(), budget or Budget()
    facts = {"model": subject.name, "rates": list(subject.rates)}
    folder = SearchFolder(out, plan, facts, resume, subject.config)
    scores = "held-out loss" if subject.held_out is not None else "smoothed training loss"
    began = time.monotonic()
    for note in subject.notes:
        audience.said(note)
    budget.seconds = seconds_of(subject, plan.seeds[0])
    audience.said(beforehand(plan, budget, jobs, folder.cost))
    audience.planned(plan.rungs, scores)
    with listening(at_once=True) as requests:

        def asked() -> str:
            return "" if requests.signal is None else signal.Signals(requests.signal).name

        trials = FolderTrials(subject, plan, folder, budget, audience, asked, workers, jobs)
        if workers is not None:
            workers.moved, workers.stopped = audience.moved, trials.take_part
        record = halve(plan, trials)
    found = answer(
        record,
        cost=folder.cost,
        seconds=time.monotonic() - began,
        name=subject.name,
        scores=scores,
        rates=subject.rates if len(subject.rates) > 1 else (),
        out=str(out),
        signal=requests.signal,
    )
    folder.write_answer(found.as_dict())
    if not found.stopped:
        folder.discard_checkpoints()
    return found


def check_numbers(horizon: Any, seeds: Sequence[Any], updates: Any, minutes: Any) -> None:
    """Raise UsageError for a horizon, seeds or a budget that are not numbers of the right kind."""
    for name, value in (("horizon", horizon), ("updates", updates)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UsageError(f"{name} = {value!r} must be a number of updates, 1 or more.")
    if minutes is not None and (isinstance(minutes, bool) or not isinstance(minutes, int | float) or not minutes > 0):
        raise UsageError(f"minutes = {minutes!r} must be a number above 0.")
    if any(isinstance(seed, bool) or not isinstance(seed, int) or seed < 0 for seed in seeds):
        raise UsageError(f"seeds = {list(seeds)} must be whole numbers from 0 on.")
