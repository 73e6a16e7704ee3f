"""From a corpus to a seeded sequence of fixed-shape batches and one fixed held-out batch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from ..config import DataConfig, Stack
from ..errors import InputError, UsageError
from .batches import Batch, make_batch
from .buckets import choose_buckets
from .corpus import BOS, EOS, PAD, Corpus, Pairs, Rows
from .passage import Passage
from .text import read_pair
from .unigram import Unigram

ORDER, MASKING, FRACTION, HELD_OUT = range(4)  # one independent stream of random numbers each


class Dataset:
    """Batches of one corpus for one kind of stack; all randomness comes from ``config.seed`` and a position."""

    def __init__(self, corpus: Corpus, config: DataConfig, stack: Stack) -> None:
        self.source_vocab, self.target_vocab, self.joint = corpus.source_vocab, corpus.target_vocab, corpus.joint
        self._corpus, self._config = corpus, config
        self._stack: Stack = stack

        train, held_out, self._left_out, self._cut_out = _split(corpus, config)
        if len(train.source) < config.sentences:
            raise InputError(
                f"{config.source} leaves {len(train.source)} sentence pairs for training beside {config.held_out} "
                f"held out, and one batch needs {config.sentences}: give more text, or lower data.sentences."
            )
        self._rows = train
        self._lengths = train.lengths()
        sides = self._lengths if stack == "encoder-decoder" else self._lengths[:, 1:]
        self.buckets = choose_buckets(sides, config.sentences)
        self.batches_per_epoch = sum(bucket.batches for bucket in self.buckets)
        self._plan = lru_cache(maxsize=2)(self._shuffled)

        self._held_rows = held_out
        self.held_out = make_batch(held_out, stack, self.target_vocab, _random(0, HELD_OUT))
        labels = self.held_out.labels.numpy()[self.held_out.weight.numpy() > 0]
        counted = train.target if stack != "encoder" else np.where(train.target == EOS, PAD, train.target)
        self.unigram = Unigram.of(counted, labels, self.target_vocab)
        ideal = corpus.ideal_nll if stack == "encoder-decoder" else None
        self.best_nll = ideal(held_out.target) if ideal else None

    def micro_batch(self, step: int, index: int = 0, count: int = 1) -> Batch:
        """Micro-batch ``index`` of the ``count`` of an update: position ``step * count + index`` of an endless order.

        Every epoch is a new permutation in which each pair stands once; what the last batch of a bucket lacks is
        taken from the beginning of the same permutation.
        """
        if step < 0 or not 0 <= index < count:
            raise ValueError(f"micro-batch {index} of {count} at step {step} does not exist.")
        position = step * count + index
        epoch, place = divmod(position, self.batches_per_epoch)
        members, lengths = self._plan(epoch)[place]
        source, target = self._rows.take(members)
        rows = Rows(source[:, : lengths[0]], target[:, : lengths[-1]])
        return make_batch(rows, self._stack, self.target_vocab, _random(self._config.seed, MASKING, position))

    def _shuffled(self, epoch: int) -> list[tuple[np.ndarray, tuple[int, ...]]]:
        random = _random(self._config.seed, ORDER, epoch)
        batches = []
        for bucket in self.buckets:
            members = np.resize(random.permutation(bucket.members), (bucket.batches, bucket.rows))
            batches += [(row, bucket.lengths) for row in members]
        return [batches[place] for place in random.permutation(len(batches))]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of target ids, up to EOS."""
        words: list[int] = []
        for token in ids:
            if token == EOS:
                break
            if token not in (PAD, BOS):
                words.append(int(token))
        return self._corpus.decode(words)

    def passage(self, data: str | None = None, longest: int | None = None) -> Passage:
        """Whole sentences to translate: ``data`` = "text:SRC,TGT", in this vocabulary; or what was held out.

        That is all of the validation text, or without one the pairs that were cut out of the training text. Nothing is
        left out: a source side of over ``longest`` tokens, EOS included, is cut to that length and counted; None: those
        that the model was trained on, data.max_length.
        """
        corpus, longest = self._corpus, longest or self._config.max_length
        if data is None:
            name, split = (self._config.valid, "valid") if corpus.valid else (self._config.source, "train")
            pairs = corpus.valid or corpus.train
            index = np.arange(len(pairs)) if corpus.valid else self._cut_out
            name, tokens = f"{name} (held out)", pairs.source.pick(index)
            sides = [[side[i] for i in index] for side in corpus.lines(split)]
        else:
            if corpus.encode is None:
                raise UsageError(f"{self._config.source} data have no vocabulary for other text: leave out {data!r}.")
            scheme, _, files = data.partition(":")
            if scheme != "text":
                raise UsageError(f"cannot translate {data!r}: the form is text:SRC,TGT.")
            name, sides = data, list(read_pair(files, "text:SRC,TGT"))
            encoded = corpus.encode(sides[0])
            tokens = encoded.pick(np.arange(len(encoded.lengths)))
        return Passage.of(name, tokens, *sides, longest=longest)

    def describe(self) -> dict[str, Any]:
        """What a run records about its data: sizes, shapes, content hashes, the baselines."""
        used = sum(bucket.batches * bucket.rows * sum(bucket.lengths) for bucket in self.buckets)
        sides = self._lengths[:, -len(self.buckets[0].lengths) :]
        return {
            "source": self._config.source,
            "stack": self._stack,
            **self._corpus.description,
            "source_vocab": self.source_vocab,
            "target_vocab": self.target_vocab,
            "joint": self.joint,
            "pairs": len(self._corpus.train),
            "left_out": self._left_out,
            "train": len(self._rows.source),
            "held_out": len(self._held_rows.source),
            "tokens_per_sentence": dict(zip(("source", "target"), self._lengths.mean(axis=0).tolist(), strict=True)),
            "buckets": [{"rows": b.rows, "lengths": b.lengths, "pairs": len(b.members)} for b in self.buckets],
            "batches_per_epoch": self.batches_per_epoch,
            "padding": 1 - float(sides.sum()) / used,
            "unigram": vars(self.unigram),
            "best_nll": self.best_nll,
            "train_sha256": _sha256(self._rows),
            "held_out_sha256": _sha256(self._held_rows),
        }


def _split(corpus: Corpus, config: DataConfig) -> tuple[Rows, Rows, dict[str, int], np.ndarray]:
    """Training rows, held-out rows (never equal to a training row), how many pairs were left out, and why.

    And which pairs of the training text were held out, where there is no validation text.
    """
    empty, long = corpus.train.empty(), corpus.train.longer_than(config.max_length)
    train = _rows(corpus.train, config, config.source)
    hashes = train.hashes()
    cut_out = np.empty(0, np.int64)
    if corpus.valid is None:
        # the smallest hashes: a choice by content, which neither the seed nor the order of the lines changes
        first = np.unique(hashes, return_index=True)[1][: config.held_out]
        held_out = train.take(first)
        cut_out = np.flatnonzero(~empty & ~long)[first]
    else:
        held_out = _rows(corpus.valid, config, f"the validation text {config.valid}").take(slice(config.held_out))
    if len(held_out.source) < config.held_out:
        raise InputError(
            f"{config.valid or config.source} has {len(held_out.source)} usable sentence pairs to hold out, and "
            f"data.held_out asks for {config.held_out}: lower it, or give more text."
        )
    equal = np.isin(hashes, held_out.hashes())
    train = train.take(~equal)
    unused = 0
    if config.fraction < 1:  # a prefix of one permutation, so that a smaller share lies inside a larger one
        order = _random(config.seed, FRACTION).permutation(len(train.source))
        kept = max(1, round(config.fraction * len(order)))
        train, unused = train.take(np.sort(order[:kept])), len(order) - kept
    left_out = {"empty": empty, "too_long": long & ~empty, "held_out": equal}
    return (
        train,
        held_out.trimmed(),
        {**{why: int(which.sum()) for why, which in left_out.items()}, "beyond_fraction": unused},
        cut_out,
    )


def _rows(pairs: Pairs, config: DataConfig, name: str) -> Rows:
    keep = ~pairs.empty() & ~pairs.longer_than(config.max_length)
    if not keep.any():
        reason = (
            "have an empty side: check that the right files were given"
            if pairs.empty().all()
            else f"are empty or longer than data.max_length = {config.max_length} tokens: raise it"
        )
        raise InputError(f"all {len(pairs)} sentence pairs of {name} {reason}.")
    return pairs.rows(keep)


def _random(seed: int, *stream: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream))


def _sha256(rows: Rows) -> str:
    digest = hashlib.sha256(json.dumps([side.shape for side in rows]).encode())
    for side in rows:
        digest.update(side.astype("<u4").tobytes())
    return digest.hexdigest()
