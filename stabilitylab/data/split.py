"""The split of a corpus into training pairs, the held-out batch and the validation set."""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np

from ..config import DataConfig
from ..errors import InputError
from .corpus import EOS, PAD, Corpus, Pairs, Rows
from .overlap import shared
from .running import RunningText

ORDER, MASKING, FRACTION, HELD_OUT, VALIDATION = range(5)  # one independent stream of random numbers each
LARGEST_SHARE = 10  # at most one in ten pairs of a text without a validation text becomes the validation set
REPEATED = 0.03  # a larger share of a validation text in the training text brings a warning; clean texts share less

log = logging.getLogger(__name__)


def stream(seed: int, *place: int) -> np.random.Generator:
    """Return the random generator of one purpose and position, independent of all others."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=place))


class Split(NamedTuple):
    """The rows of a corpus by their use. No row of ``held_out`` or ``validation`` equals a training row.

    ``left_out`` and ``validation_left_out`` count the pairs that have no use, by reason. ``cut_out`` are the pairs of
    the training text that were held out, where there is no validation text. ``in_training``: the share of tokens of
    ``held_out`` and ``validation`` that also stand in the training text, at any offset; None if they are sentence
    pairs, or if there is no validation text.
    """

    train: Rows
    held_out: Rows
    validation: Rows
    left_out: dict[str, int]
    validation_left_out: dict[str, int]
    cut_out: np.ndarray
    in_training: dict[str, float | None] | None = None


def split(corpus: Corpus, config: DataConfig) -> Split:
    """Sort the rows of ``corpus`` by their use.

    The held-out batch is the first ``config.held_out`` pairs of the validation text. The validation set is all pairs of
    that text that are not in the training set. Without a validation text, both are chosen from the training text by
    content, or the source makes fresh pairs for the validation set. ``config.validation`` = 0: no validation set.
    """
    empty, long = corpus.train.empty(), corpus.train.longer_than(config.max_length)
    train = _rows(corpus.train, config, config.source, corpus.rows)
    hashes = train.hashes()
    cut_out = np.empty(0, np.int64)
    more: Pairs | None = corpus.valid
    validation, outside = train.take(slice(0)), {"empty": 0, "too_long": 0}
    if corpus.valid is None:
        more = corpus.fresh(2 * config.validation) if corpus.fresh and config.validation else None  # less doubles
        spare = max(0, len(hashes) - config.held_out - config.sentences)
        cut = 0 if corpus.fresh else min(config.validation, len(hashes) // LARGEST_SHARE, spare)
        # the smallest hashes: a choice by content, which neither the seed nor the order of the lines changes
        first = np.unique(hashes, return_index=True)[1][: config.held_out + cut]
        held_out, validation = train.take(first[: config.held_out]), train.take(first[config.held_out :])
        cut_out = np.flatnonzero(~empty & ~long)[first]
    else:
        held_out = _rows(corpus.valid, config, f"the validation text {config.valid}", corpus.rows)
        held_out = held_out.take(slice(config.held_out))
    if len(held_out.source) < config.held_out:
        raise InputError(
            f"{config.valid or config.source} has too few usable {corpus.rows} to hold out: {len(held_out.source)}, "
            f"and data.held_out asks for {config.held_out}; lower it, or give more text."
        )
    equal = np.isin(hashes, held_out.hashes())
    if more is None:
        equal |= np.isin(hashes, validation.hashes())
    train = train.take(~equal)
    seen = np.empty(0, bool)
    if more is not None and config.validation:
        nothing, beyond = more.empty(), more.longer_than(config.max_length)
        validation = more.rows(~nothing & ~beyond)
        seen = np.isin(validation.hashes(), train.hashes())
        validation = validation.take(~seen).take(slice(None if corpus.valid else config.validation))
        outside = {
            "empty": int(nothing.sum()),
            "too_long": int((beyond & ~nothing).sum()),
            "equal_block" if isinstance(more, RunningText) else "in_training": int(seen.sum()),
        }
    in_training = None
    if isinstance(corpus.train, RunningText) and isinstance(corpus.valid, RunningText):
        usable = np.flatnonzero(~corpus.valid.empty() & ~corpus.valid.longer_than(config.max_length))
        kept = usable[~seen] if config.validation else usable[:0]
        trained = np.flatnonzero(~empty & ~long)[~equal]
        in_training = _in_training(corpus.train, trained, corpus.valid, usable[: config.held_out], kept)
        _warn(in_training, int(seen.sum()), len(usable), config)
    unused = 0
    if config.fraction < 1:  # a prefix of one permutation, so that a smaller share lies inside a larger one
        order = stream(config.seed, FRACTION).permutation(len(train.source))
        kept = max(1, round(config.fraction * len(order)))
        train, unused = train.take(np.sort(order[:kept])), len(order) - kept
    left_out = {"empty": empty, "too_long": long & ~empty, "held_out": equal}
    return Split(
        train,
        held_out.trimmed(),
        validation,
        {**{why: int(which.sum()) for why, which in left_out.items()}, "beyond_fraction": unused},
        outside,
        cut_out,
        in_training,
    )


def _in_training(
    training: RunningText, trained: np.ndarray, valid: RunningText, held_out: np.ndarray, kept: np.ndarray
) -> dict[str, float | None]:
    """Return the share of tokens of the held-out batch and of the validation set that also stand in the training text.

    ``trained``: the blocks of the training text that are not left out, with those beyond ``data.fraction``.
    ``held_out`` and ``kept``: the blocks of the validation text that make the held-out batch and the validation set.
    """
    ids, lengths = training.target.ids, valid.target.lengths
    used = np.zeros(len(training), bool)
    used[trained] = True
    ids = np.where(np.repeat(used, training.target.lengths) | (ids == EOS), ids, PAD)  # PAD is in no text
    found, starts = shared(valid.target.ids, ids), lengths.cumsum() - lengths
    counts = np.add.reduceat(found.astype(np.int64), starts)  # of each block

    def share(blocks: np.ndarray) -> float | None:
        return float(counts[blocks].sum() / lengths[blocks].sum()) if len(blocks) else None

    return {"held_out": share(held_out), "validation": share(kept)}


def _warn(in_training: dict[str, float | None], left_out: int, blocks: int, config: DataConfig) -> None:
    """Log a warning if a text for validation repeats the training text. ``left_out``: the number of its ``blocks`` that
    equal training blocks."""
    text = f"the validation text {config.valid}"
    worst = max(each or 0.0 for each in in_training.values())
    if worst > REPEATED:
        part = text if worst == in_training["validation"] else f"the first {config.held_out} blocks of {text}"
        said = f"{worst:.1%} of the tokens of {part} also stand in the training text, so the loss is too low"
    elif left_out > REPEATED * blocks:
        said = f"{left_out} of the {blocks} blocks of {text} are left out, since they equal training blocks"
    else:
        return
    log.warning("%s: remove the lines that both have from one of the two files.", said)


def _rows(pairs: Pairs, config: DataConfig, name: str, noun: str) -> Rows:
    keep = ~pairs.empty() & ~pairs.longer_than(config.max_length)
    if not keep.any():
        reason = (
            "have an empty side: check that the right files were given"
            if pairs.empty().all()
            else f"are empty or longer than data.max_length = {config.max_length} tokens: raise it"
        )
        raise InputError(f"all {len(pairs)} {noun} of {name} {reason}.")
    return pairs.rows(keep)
