"""Gradients that vanish, explode, or are not there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from ...errors import listed
from ..events import Event, Severity, detector
from ..evidence import Evidence, Grid
from ..order import describe, gathered
from ..series import LEAST_PAST, at_the_end, felt_growth, first_above, lasting, past_largest, times, until, usual_before

# A layer's gradient beside the largest of its stack. Adam stops balancing layers where gradients reach its eps, which
# is three to four orders below usual ones. The same ratio, the other way up, is a gradient that explodes downwards.
VANISHED = 1e-4  # of the largest gradient of the stack
# In a run whose loss was judged and learns, it is a note: some layers hardly learn, the model does. (This rule was
# added after a first look: the bottom of default BranchNorm's 100 encoder layers falls to 1.5e-6, and the run trains.)
# Geometric decay that has not come that far is worth a note (DeepNet, Admin: Post-LN's decoder at 18 layers and more).
DECAYED = 0.05  # bottom over top gradient: with the next two, a note
DECAY_PER_LAYER = -0.1  # nats a layer
DECAY_FIT = 0.95  # R^2 of log gradient on the layer
# The total gradient norm, or a layer's, against its own past; factors of 2 to 5 are everyday noise of small batches.
EXPLODED = 10.0  # gradient norm over the largest before
EXPLODED_SHARE = 0.1  # of the largest layer's gradient

SOURCES = ("activation_grad_norm", "grad_norm")
UNMEANT = ", though parameters there require one,"
SKIPPED = "no gradient, since the forward pass did not call it,"
WHY_STILL = "not in the optimizer, a rate of 0, or below the rounding of its dtype"


def decay(values: np.ndarray, layers: np.ndarray) -> tuple[float, float]:
    """Return the slope in nats a layer and R^2 of log(value) on the layer, over places with a positive value."""
    usual = np.isfinite(values) & (values > 0)
    if len(np.unique(layers[usual])) < 3:
        return float("nan"), float("nan")
    x, y = layers[usual].astype(float), np.log(values[usual])
    slope, at = np.polyfit(x, y, 1)
    spread = float(((y - y.mean()) ** 2).sum())
    return float(slope), 1 - float(((y - slope * x - at) ** 2).sum()) / spread if spread else float("nan")


@detector(
    "vanishing_gradient",
    "vanishing gradient",
    reads={"activation_grad_norm": "probe activation_grad_norm", "grad_norm": "probe grad_norm"},
    mild=True,
    rule=(
        "Reads `activation_grad_norm`, `grad_norm` by layer: a layer is below `VANISHED` of the largest of its stack"
    ),
    remedy=(
        "Scale the residual branches by depth, or normalise before each branch: `stabilitylab list archs` has the ways."
    ),
)
def vanishing_gradient(evidence: Evidence) -> Iterator[Event]:
    """Compare each layer's gradient with the largest of its stack: below VANISHED, or in plain geometric decay (a
    note)."""
    for table in SOURCES:
        grid = evidence.grid(table, "value", True)
        for stack in grid.stacks() if grid is not None else ():
            event = _uneven(stack, evidence.flushed)
            if event is not None:
                yield _weighed(event, evidence.grid("update_ratio", "rms"))


def _weighed(event: Event, updates: Grid | None) -> Event:
    """Add to the event if the optimizer compensates. Adam does, until the gradient comes near its eps."""
    place = event.place
    if updates is None or place is None:
        return event
    stack = np.array([row.stack == place.stack and row.layer > 0 for row in updates.rows])
    own = np.array([row.stack == place.stack and row.layer == place.layer for row in updates.rows])
    later = (updates.steps >= event.step) & np.isfinite(updates.values[:, stack]).all(axis=1)
    if not own.any() or not later.any():
        return event
    usual = np.median(updates.values[later][:, stack], axis=1)
    share = times(np.median(updates.values[later][:, own], axis=1), usual)
    least = float(share[np.isfinite(share)].min(initial=np.inf))
    if least == np.inf:  # nothing was updated at all
        return event
    text = f"{event.evidence}; its smallest update was {least:.2g} of the median layer's"
    return replace(event, evidence=text, numbers={**event.numbers, "least_update_over_median": least})


def _uneven(grid: Grid, flushed: bool) -> Event | None:
    values = np.where(grid.absent | ~np.isfinite(grid.values), np.nan, grid.values)
    broken = (~np.isfinite(grid.values) & ~grid.absent).any(axis=1)
    values[broken] = np.nan  # a row with a NaN in it is another event
    layers = np.array([row.layer for row in grid.rows])
    if len(np.unique(layers)) < 2:
        return None
    largest = np.fmax.reduce(values, axis=1)  # (S,)
    share = times(values, np.broadcast_to(largest[:, None], values.shape))
    # Exact zeros above a layer that learns are a dead layer; below the last weak one they are an underflow.
    weak = (share < VANISHED) & ((values > 0) | _below_weak(share, layers))
    found = lasting(weak)
    if found is not None:
        return _vanished(grid, values, share, weak, layers, *found, flushed)
    return _decayed(grid, values, layers)


def _below_weak(share: np.ndarray, layers: np.ndarray) -> np.ndarray:
    """Mark the zeros below a layer whose gradient is weak but not zero."""
    weak = (share > 0) & (share < VANISHED)
    top = np.where(weak, layers, 0).max(axis=1, initial=0)[:, None]
    return (share == 0) & (layers[None, :] < top)


def _vanished(
    grid: Grid,
    values: np.ndarray,
    share: np.ndarray,
    weak: np.ndarray,
    layers: np.ndarray,
    row: int,
    kept: np.ndarray,
    flushed: bool,
) -> Event:
    weakest = int(np.flatnonzero(kept)[np.argmin(np.where(kept, share[row], np.inf)[kept])])
    top = int(np.nanargmax(values[row]))
    slope, fit = decay(values[row], layers)
    down = layers[weakest] < layers[top]
    number = int(kept.sum())
    size = f"{share[row, weakest]:.2g}" if values[row, weakest] else "0 (or below 1.2e-38)" if flushed else "0"
    text = (
        f"the gradient of {describe(grid.rows[weakest])} is {size} of the gradient of {describe(grid.rows[top])} at "
        f"step {grid.steps[row]}; {number} of {len(layers)} places {'is' if number == 1 else 'are'} below {VANISHED:g}"
    )
    if fit > DECAY_FIT:
        text += f"; from layer to layer upwards it changes {float(np.exp(slope)):.2g}-fold (R^2 {fit:.2f})"
    ratio = float(share[row, weakest])
    return Event(
        "vanishing_gradient" if down else "exploding_gradient",
        "vanishing gradient" if down else "exploding gradient",
        **grid.first_seen(row),
        evidence=text,
        until=(end := until(np.logical_or.reduce(weak, axis=1), row, grid.steps)),
        stands=end is None,
        place=grid.rows[weakest if down else top],
        places=int(kept.sum()) if down else 1,
        strength=VANISHED / max(ratio, 1e-300),
        numbers={"share_of_largest": ratio, "nats_per_layer": slope, "r_squared": fit},
    )


def _decayed(grid: Grid, values: np.ndarray, layers: np.ndarray) -> Event | None:
    """Geometric decay towards the input that holds at the start of the run: a note."""
    first = values[0]
    slope, fit = decay(first, layers)
    low, high = (float(first[layers == end].max()) for end in (layers.min(), layers.max()))
    ratio = low / high if high > 0 else float("nan")
    if not (0 < ratio < DECAYED and -slope < DECAY_PER_LAYER and fit > DECAY_FIT):
        return None
    place = int(np.flatnonzero(layers == layers.min())[0])
    return Event(
        "vanishing_gradient",
        "geometric decay of the gradient",
        **grid.first_seen(0),
        evidence=f"the gradient of {describe(grid.rows[place])} is {ratio:.2g} of the top layer's at step "
        f"{grid.steps[0]}: it changes by {-slope:.2f} nats a layer downwards (R^2 {fit:.2f}), and is not yet below "
        f"{VANISHED:g}",
        severity="note",
        place=grid.rows[place],
        strength=DECAYED / ratio,
        numbers={"first_over_last": ratio, "nats_per_layer": slope, "r_squared": fit},
    )


@detector(
    "exploding_gradient",
    "exploding gradient",
    reads={"grad_norm_total": "w.step() after backward", "grad_norm": "probe grad_norm"},
    least_rows=LEAST_PAST + 1,
    rule=(
        "Reads `grad_norm_total` and `grad_norm` by layer: more than `EXPLODED` times the largest of the rows "
        "before, and at least `EXPLODED_SHARE` of the largest of the model. Growth towards the lower layers counts "
        "too, by the rule of vanishing"
    ),
    remedy="Clip gradients with `clip_grad_norm_`, lower `lr`, and look at the layer that is named.",
)
def exploding_gradient(evidence: Evidence) -> Iterator[Event]:
    """Compare the total gradient norm, and that of each layer, with its own past."""
    total = evidence.metric("grad_norm_total")
    if total is not None:
        yield from _exploded(total, times(total.values, past_largest(total.values)))
    grid = evidence.grid("grad_norm", "value", True)
    if grid is not None:
        yield from _exploded(grid, felt_growth(grid.measured, EXPLODED_SHARE))


def _exploded(grid: Grid, ratio: np.ndarray) -> Iterator[Event]:
    found = first_above(ratio, EXPLODED)
    if found is None:
        return
    row, place, places = found
    size, factor = float(grid.values[row, place]), float(ratio[row, place])
    median, beside = usual_before(grid, row, place)
    where = f" ({describe(grid.rows[place])})" if grid.rows[place].site or grid.rows[place].layer else ""
    yield Event(
        "exploding_gradient",
        "exploding gradient",
        **grid.first_seen(row),
        evidence=f"the gradient norm is {size:.3g} at step {grid.steps[row]}{where}, {beside}",
        place=grid.rows[place] if where else None,
        places=places,
        strength=factor / EXPLODED,
        stands=at_the_end(grid.values[:, place], row) > EXPLODED * median,
        numbers={
            "value": size,
            **({"times_median_before": size / median} if median else {}),
            "times_largest_before": factor,
        },
    )


@detector(
    "dead_layer",
    "layer without gradient or update",
    reads={"grad_norm": "probe grad_norm", "update_ratio": "optimizer=optimizer, or probe update_ratio"},
    rule=(
        "Reads `grad_norm` and `update_ratio`: the number is absent or exactly 0, or there is a gradient and no "
        "update. It is a note if nothing was to be trained from the start (`places_untrained` in `run.json`), and if "
        "the forward pass skips layers in some rows and calls them again (stochastic depth)"
    ),
    remedy=(
        "Check that `requires_grad` of the layer is True, that the forward pass uses it, and that the optimizer has it."
    ),
    names_cause=True,
)
def dead_layer(evidence: Evidence) -> Iterator[Event]:
    """Find gradients that are absent (frozen or unused parameters), gradients of exactly 0 beside others that are not
    0, and parameters that are never updated."""
    grid = evidence.grid("grad_norm", "value")
    if grid is not None:
        missing = grid.absent & ~np.logical_and.reduce(grid.absent, axis=1)[:, None]
        skipped = missing & _skipped(evidence, grid) if missing.any() else missing
        missing = _carried(missing & ~skipped, skipped)
        skipped = skipped & ~missing
        by_chance = _skips_by_chance(grid, skipped)
        yield from _still(grid, skipped & by_chance, SKIPPED, meant=True, at_any_row=True)
        yield from _still(grid, skipped & ~by_chance, SKIPPED)
        for why, places in _why_missing(grid, missing, evidence.run.manifest.get("places_untrained")).items():
            yield from _still(grid, missing & places, f"no gradient{why}", meant=why != UNMEANT)
        zero = (grid.values == 0) & ~grid.absent
        some = np.logical_or.reduce(grid.values > 0, axis=1)[:, None]
        yield from _still(grid, zero & some & ~_underflow(grid), "a gradient of exactly 0")
    update = evidence.grid("update_ratio", "rms")
    if update is not None and grid is not None and update.rows == grid.rows:
        common, mine, theirs = np.intersect1d(update.steps, grid.steps, return_indices=True)
        learns = (grid.values[theirs] > 0) & np.isfinite(grid.values[theirs])  # a scaler skips what overflows
        still = (update.values[mine] == 0) & learns
        if len(common):
            known = replace(update, steps=common, values=update.values[mine], absent=update.absent[mine])
            yield from _still(known, still, f"a gradient but no update ({WHY_STILL})")


def _skipped(evidence: Evidence, grid: Grid) -> np.ndarray:
    """Mark the steps at which the forward pass did not call a layer: no table of the forward pass has a number of the
    layer, and in other steps one has."""
    found = np.zeros(grid.absent.shape, bool)
    called: dict[tuple[str, int], np.ndarray] = {}
    recorded = np.zeros(len(grid.steps), bool)
    for name in evidence.run.tables:
        other = evidence.grid(name) if evidence.run.table(name).phase == "forward" else None
        if other is None:
            continue
        _, mine, theirs = np.intersect1d(grid.steps, other.steps, return_indices=True)
        recorded[mine] |= ~np.logical_and.reduce(other.absent[theirs], axis=1)
        for place, row in enumerate(other.rows):
            if row.layer > 0:
                own = called.setdefault((row.stack, row.layer), np.zeros(len(grid.steps), bool))
                own[mine] |= ~other.absent[theirs, place]
    for place, row in enumerate(grid.rows):
        own = called.get((row.stack, row.layer))
        if own is not None and own.any():
            found[:, place] = recorded & ~own
    return found


def _carried(missing: np.ndarray, skipped: np.ndarray) -> np.ndarray:
    """Return ``missing`` with the skipped rows that follow a missing gradient: a frozen layer stays frozen in them."""
    carried = missing.copy()
    for before, now, left_out in zip(carried[:-1], carried[1:], skipped[1:], strict=True):
        now |= before & left_out
    return carried


def _skips_by_chance(grid: Grid, skipped: np.ndarray) -> np.ndarray:
    """Mark the places of a stack of which a layer was skipped and called again, as stochastic depth does."""
    again = np.logical_or.reduce(skipped[:-1] & ~grid.absent[1:], axis=0)
    stacks = {row.stack for row, came in zip(grid.rows, again, strict=True) if came}
    return np.array([row.stack in stacks for row in grid.rows], bool)


def _why_missing(grid: Grid, missing: np.ndarray, untrained: object) -> dict[str, np.ndarray]:
    """Map each reason for a missing gradient to its places (True), by what was to be trained when the run began.

    The reason stays open for a place that lost its gradient later, and for a run that did not record what was to be
    trained.
    """
    sites = [row.site for row in grid.rows]
    at_start = missing[0] if isinstance(untrained, Mapping) else np.zeros(len(sites), bool)
    reasons = [str(untrained.get(site, "")) if isinstance(untrained, Mapping) else "" for site in sites]
    found = {" (frozen, or unused)": ~at_start}
    for reason in dict.fromkeys(reasons):
        places = at_start & np.array([reason == own for own in reasons], bool)
        found[f" ({reason})" if reason else UNMEANT] = places
    return found


def _underflow(grid: Grid) -> np.ndarray:
    """Mark the zeros at the bottom of a stack whose gradient decays to 0: these gradients have vanished."""
    found = np.zeros(grid.values.shape, bool)
    for stack in dict.fromkeys(row.stack for row in grid.rows if row.layer > 0):
        inside = np.array([row.stack == stack and row.layer > 0 for row in grid.rows])
        layers = np.array([row.layer for row in grid.rows])[inside]
        values = grid.values[:, inside]
        largest = np.broadcast_to(np.fmax.reduce(values, axis=1)[:, None], values.shape)
        found[:, inside] = _below_weak(times(values, largest), layers)
    return found


def _still(grid: Grid, holds: np.ndarray, what: str, meant: bool = False, at_any_row: bool = False) -> Iterator[Event]:
    """Yield one event for all places at which it begins in the same row. ``meant``: a note if it began with the run, or
    ``at_any_row``."""
    waiting = holds.copy()
    while (found := lasting(waiting)) is not None:
        row, kept = found
        places = np.flatnonzero(kept)
        from_start = row == 0
        end = until(holds[:, places[0]], row, grid.steps)
        passing = end is not None  # it came back: stochastic depth, or layers that thaw
        severity: Severity = "note" if passing or (meant and (from_start or at_any_row)) else "warning"
        since = "from the start" if from_start else f"from step {grid.steps[row]}"
        since += f" until {end}" if passing else "" if from_start else " on"
        names = gathered(grid.rows, places.tolist())
        have = "has" if len(names) == 1 else "have"
        yield Event(
            "dead_layer",
            "layer without gradient or update",
            **grid.first_seen(row),
            evidence=f"{listed(names)} {have} {what} {since}",
            severity=severity,
            until=end,
            stands=not passing,
            place=grid.rows[places[0]],
            places=len(places),
            numbers={"places": [grid.rows[place].site for place in places]},
        )
        waiting[:, places] = False
