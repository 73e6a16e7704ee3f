"""The function ``stabilitylab.bisect``, which finds the first sub-layer where two models or two stored rows differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ..errors import UsageError
from ..probes import Mask, random_states_kept
from .judging import LIMIT, PlaceGap, coarser_ulp, control_of, judged
from .matching import matched
from .model_pass import LossFunction
from .prints import Fingerprint
from .result import Bisection
from .sides import BisectSubject, FirstSide, Side, fed_side, first_side, here, look
from .stored import answer, check_limit

Work = Callable[..., Any]


def bisect(
    a: nn.Module | Callable[[], nn.Module],
    b: nn.Module | Callable[[], nn.Module],
    batch: Any,
    loss_fn: LossFunction | tuple[LossFunction, LossFunction],
    *,
    b_batch: Any = None,
    maps: Sequence[str] = (),
    limit: float = LIMIT,
    controls: int = 3,
    mask: Mask | None = None,
    feed: bool = True,
    seed: int = 0,
) -> Bisection:
    """Find the first sub-layer in which model ``b`` computes something other than model ``a`` on one batch.

    Both models run forward and backward once, in evaluation mode and with the random states of ``seed``. Neither model
    is changed, and neither are the random states of the caller.

    - ``a``, ``b``: modules, or functions that make one. With functions, only one model exists at a time.
    - ``loss_fn(model, batch)``: returns the loss. Give a pair of functions if the two models are called differently.
    - ``b_batch``: the batch for ``b``, if it needs another layout of the same data.
    - ``maps``: rules 'REGEX=REPLACEMENT' that turn names of ``b`` into names of ``a``.
    - ``limit``: a place counts as different if its added error is above ``limit`` times the control.
    - ``controls``: the number of control runs.
    - ``mask``: True on real tokens, as in :func:`stabilitylab.watch`.
    - ``feed``: True to confirm the place by feeding each module of ``b`` with the input of the same module of ``a``.
      This keeps the values of all sub-layers on the host.

    The control is ``a`` with the roundings of the coarser dtype drawn anew. The added error of a place is sqrt(max(0,
    e_out^2 - (g e_in)^2)), where e_in and e_out are the errors at the input and the output of its module, and the gain
    g = c_out / c_in comes from the control.

    Raises UsageError if the models have no place in common, InputError if ``loss_fn`` fails.

    >>> found = bisect(reference, candidate, batch, loss_fn)  # doctest: +SKIP
    >>> found.verdict, found.where  # doctest: +SKIP
    ('different', 'transformer.h.1.attn.c_proj')
    """
    losses = loss_fn if isinstance(loss_fn, tuple) else (loss_fn, loss_fn)

    def side(model: Any, own: Any, loss: LossFunction) -> BisectSubject:
        return BisectSubject(model if isinstance(model, nn.Module) else model(), own, loss, mask)

    sides = partial(side, a, batch, losses[0]), partial(side, b, batch if b_batch is None else b_batch, losses[1])
    names = ("the first model", "the second model")
    with random_states_kept():  # functions that make models draw from the states of ``seed``
        return of_sides(*sides, names, maps=maps, limit=limit, controls=controls, feed=feed, seed=seed)


def of_sides(
    a: Side,
    b: Side,
    labels: tuple[str, str],
    *,
    maps: Sequence[str] = (),
    limit: float = LIMIT,
    controls: int = 3,
    feed: bool = True,
    seed: int = 0,
    do: Work = here,
) -> Bisection:
    """Bisect two sides, one after the other; ``do`` calls the work, here or in a process of its own."""
    if controls < 1:
        raise UsageError(f"controls = {controls}: give 1 or more.")
    check_limit(limit)
    second: Fingerprint = do(look, b, labels[1], seed)
    ulps = coarser_ulp(second), coarser_ulp(second, phase="gradients")
    first: FirstSide = do(first_side, a, labels[0], seed, *ulps, controls, feed)
    pairs = matched(first.print_, second, maps)
    ulp = coarser_ulp(first.print_, second)
    told = f"{labels[0]} with its roundings drawn anew at {ulp:.2g} relative, {controls} times"
    places = judged(pairs, [matched(first.print_, control) for control in first.controls], made=True)
    fed: tuple[PlaceGap, ...] = ()
    if feed:
        forward = {place.name: place.other for place in places if place.phase == "forward"}
        errors: Mapping[str, float] = do(fed_side, b, seed, forward, first.values)
        fed = _fed(places, errors, first.fed, ulp)
    found = answer(labels, 0, pairs, places, fed, limit, told, ())
    return replace(found, other_batch=first.print_.facts.get("batch") != second.facts.get("batch"))


def _fed(
    places: Sequence[PlaceGap], errors: Mapping[str, float], controls: Sequence[Mapping[str, float]], ulp: float
) -> tuple[PlaceGap, ...]:
    """Return the places of the forward pass with their own errors: nothing is inherited where each input is given."""
    found = []
    for place in places:
        if place.phase != "forward" or math.isnan(error := errors.get(place.name, math.nan)):
            continue
        control = control_of((each.get(place.name, math.nan) for each in controls), ulp)
        found.append(
            replace(place, error=error, standard_error=0.0, control=control, inherited=0.0, added=error, judged=True)
        )
    return tuple(found)
