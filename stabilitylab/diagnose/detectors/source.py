"""An encoder-decoder whose source does not reach its loss: a constant encoder, an ignored source, alike tokens.

The trainer measures three numbers with every held-out pass: ``source_worth``, by how much the loss grows with another
sentence's source, and the mean of 1 - cosine between the encoder's outputs at tokens of one sentence and of different
sentences. An encoder may leave the tokens of a sentence alike and still tell sentences apart: then its decoder reads.
Where sentences are alike as well, the encoder is a constant function. Dong et al. 2021 (2103.03404) and Noci et al.
2022 (2206.03126) are about the first kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ...verdict import LEVEL_NATS, READS_NATS
from ..events import Event, detector
from ..evidence import Evidence, Grid
from .losses import last_stretch
from .rank import MAY_PASS

# 1 - cosine below which outputs are alike. Set beforehand, for the map of collapse: constant encoders of 18 layers had
# 3e-6 between sentences, and Post-LN had 1e-10 within sentences while its source was worth .44 nats.
ALIKE_OUTPUTS = 1e-4  # 1 - cosine between the encoder's outputs, below which they are alike
NEEDS = "stabilitylab probe, of an encoder-decoder"
CONSTANT, IGNORED, TOKENS = "constant encoder", "ignored source", "alike tokens"


def _single_stack(evidence: Evidence) -> str:
    """Return why a reference model of one stack cannot show these kinds; "" for all others."""
    model = evidence.run.config.get("model") if evidence.run.kind != "watched" else None
    stack = model.get("stack") if isinstance(model, Mapping) else None
    said = {"encoder": "an encoder alone has no source", "decoder": "a decoder alone has no source"}
    return said.get(stack, "") if isinstance(stack, str) else ""


@detector(
    "constant_encoder",
    CONSTANT,
    reads={"encoder_distance_between": NEEDS},
    nothing_to_check=_single_stack,
    role="outcome",
    rule=(
        "Reads `encoder_distance_between` and `source_worth` (of the reference trainer): 1 - cosine between "
        "sentences is below `ALIKE_OUTPUTS`, and a wrong source changes the loss by less than 0.1 nats a token. It "
        "is a note that leaves the run open for `MAY_PASS` updates, or at the unigram baseline"
    ),
    remedy="Lower `lr`, or shorten the ramp (`model.T`).",
)
def constant_encoder(evidence: Evidence) -> Iterator[Event]:
    """Find an encoder whose outputs are alike, within and between sentences, to the end of the run. It is a note as
    long as the outputs may become different again."""
    between, within = evidence.metric("encoder_distance_between"), evidence.metric("encoder_distance_within")
    worth = _last(evidence.metric("source_worth"))
    if between is None or (since := _alike_since(between)) is None or worth >= READS_NATS:
        return
    late = _is_below_baseline(evidence) and _lasted(between, since) >= MAY_PASS
    yield Event(
        "constant_encoder",
        CONSTANT,
        **between.first_seen(since),
        evidence=f"the encoder's output is the same for every sentence (1 - cosine {_last(between):.1g} between "
        f"sentences, {_last(within):.1g} within), so the decoder is a language model",
        severity="warning" if late else "note",
        numbers=_finite(between=_last(between), within=_last(within), source_worth=worth),
        open="" if late else "the encoder may recover from a constant function",
    )


@detector(
    "ignored_source",
    IGNORED,
    reads={"source_worth": NEEDS},
    nothing_to_check=_single_stack,
    role="outcome",
    rule=(
        "Reads `source_worth`: the loss is below the unigram baseline, and a wrong source changes it by less than "
        "0.1 nats a token, though the encoder is not constant. It is a note for `MAY_PASS` updates"
    ),
    remedy="Lower `lr`, or train on: so far the decoder is a language model.",
)
def ignored_source(evidence: Evidence) -> Iterator[Event]:
    """Find a loss below the unigram baseline that does not change with another sentence's source, if the encoder is not
    constant. It is a note as long as the decoder may begin to read."""
    worth, between = evidence.metric("source_worth"), evidence.metric("encoder_distance_between")
    if worth is None or not _last(worth) < READS_NATS or not _is_below_baseline(evidence):
        return
    if between is not None and _alike_since(between) is not None:
        return  # the detector constant_encoder reports this case
    since = last_stretch(worth.values[:, 0] < READS_NATS)
    late = _lasted(worth, since) >= MAY_PASS
    yield Event(
        "ignored_source",
        IGNORED,
        **worth.first_seen(since),
        evidence=f"the decoder ignores its input: a wrong source changes the validation loss by {_last(worth):.2g} "
        f"nats a token (a decoder that reads its source: {READS_NATS:g} or more)",
        severity="warning" if late else "note",
        numbers=_finite(source_worth=_last(worth)),
        open="" if late else "the decoder may begin to read its source",
    )


@detector(
    "alike_tokens",
    TOKENS,
    reads={"encoder_distance_within": NEEDS},
    nothing_to_check=_single_stack,
    rule=(
        "Reads `encoder_distance_within` and `source_worth`: 1 - cosine within sentences is below `ALIKE_OUTPUTS`, "
        "and a wrong source changes the loss by 0.1 nats a token or more. It is always a note"
    ),
    remedy="Do nothing: the encoder still tells sentences apart.",
)
def alike_tokens(evidence: Evidence) -> Iterator[Event]:
    """Find an encoder whose outputs are alike within sentences and differ between sentences, if the source is read."""
    within, worth = evidence.metric("encoder_distance_within"), _last(evidence.metric("source_worth"))
    if within is None or (since := _alike_since(within)) is None or not worth >= READS_NATS:
        return
    yield Event(
        "alike_tokens",
        TOKENS,
        **within.first_seen(since),
        evidence=f"the encoder's output is the same at all tokens of a sentence (1 - cosine {_last(within):.1g}); the "
        f"decoder still reads its source (a wrong one costs {worth:.2g} nats a token)",
        severity="note",
        numbers=_finite(within=_last(within), source_worth=worth),
    )


def _last(grid: Grid | None) -> float:
    """Return the last value; NaN if nothing was measured."""
    return math.nan if grid is None else float(grid.values[-1, 0])


def _alike_since(grid: Grid) -> int | None:
    """Return the row from which the distance is below ``ALIKE_OUTPUTS`` to the end; None if its last value is not."""
    low = grid.values[:, 0] < ALIKE_OUTPUTS
    return last_stretch(low) if low[-1] else None


def _lasted(grid: Grid, since: int) -> int:
    """Return the number of updates from row ``since`` to the last row."""
    return int(grid.steps[-1] - grid.steps[since])


def _is_below_baseline(evidence: Evidence) -> bool:
    """True if the last held-out loss lies below the unigram baseline by more than rounding and drift (.05 nats)."""
    held_out, unigram = evidence.metric("held_out_nll"), evidence.unigram
    return unigram is not None and _last(held_out) < float(unigram["cross_entropy"]) - LEVEL_NATS


def _finite(**numbers: float) -> dict[str, float]:
    """Return the numbers that were measured, since JSON has no NaN."""
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
