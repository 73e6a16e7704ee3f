"""A seeded sequence of fixed-shape batches of a corpus, one fixed held-out batch and a validation set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from ..config import DataConfig, Stack
from ..errors import InputError, UsageError
from .batches import Batch, make_batch
from .buckets import choose_buckets
from .corpus import BOS, EOS, PAD, Corpus, Rows
from .passage import Passage
from .running import RunningText
from .source import named
from .sources.text import Bounds, read_pair
from .split import HELD_OUT, MASKING, ORDER, VALIDATION, split, stream
from .unigram import Unigram
from .unknown import check, share

VALIDATION_ROWS = 64  # sentences of a batch of the validation set


def load_data(config: DataConfig, *, stack: Stack) -> Dataset:
    """Load the data that ``config.source`` names, as ``stabilitylab list sources`` writes it.

    Raises UsageError for an unknown source, and whatever the source raises.
    """
    found, spec = named(config.source)
    return Dataset(found.load(spec, config), config, stack)


class Dataset:
    """Batches of one corpus for one kind of stack; all randomness comes from ``config.seed`` and a position."""

    def __init__(self, corpus: Corpus, config: DataConfig, stack: Stack) -> None:
        self.source_vocab, self.target_vocab, self.joint = corpus.source_vocab, corpus.target_vocab, corpus.joint
        self._corpus, self._config = corpus, config
        self._stack: Stack = stack

        if isinstance(corpus.train, RunningText) and stack == "encoder-decoder":
            raise UsageError(
                f"{config.source} is one text without translations, and model.stack = 'encoder-decoder' translates: "
                "give --stack decoder (or --model gpt2) for a language model, or --data text:SRC,TGT."
            )
        self._split = split(corpus, config)
        train, held_out = self._split.train, self._split.held_out
        if len(train.source) < config.sentences:
            raise InputError(
                f"{config.source} leaves too few {corpus.rows} for training beside {config.held_out} held out: "
                f"{len(train.source)}, and one batch needs {config.sentences}; give more text, or lower data.sentences."
            )
        self._rows = train
        self._lengths = train.lengths()
        sides = self._lengths if stack == "encoder-decoder" else self._lengths[:, 1:]
        self.buckets = choose_buckets(sides, config.sentences, config.shapes, config.length_multiple)
        self.batches_per_epoch = sum(bucket.batches for bucket in self.buckets)
        self._plan = lru_cache(maxsize=2)(self._shuffled)

        self._held_rows = held_out
        sets = {"train": train, "held_out": held_out, "validation": self._split.validation}
        # the shares of unknown symbols by set, of the labels and of the source side if the model reads it
        self.unknown = {name: share(self._labels(rows.target)) for name, rows in sets.items()}
        self.unknown_source = None
        if stack == "encoder-decoder":
            self.unknown_source = {name: share(rows.source) for name, rows in sets.items()}
        check(self.unknown, self.unknown_source, config)
        self.held_out = make_batch(held_out, stack, self.target_vocab, stream(0, HELD_OUT))
        self.unigram = self._unigram([self.held_out])
        validation = [*self.validation()]
        self.validation_unigram = self._unigram(validation) if validation else None
        self.validation_sentences = len(self._split.validation.source)
        ideal = corpus.ideal_nll if stack == "encoder-decoder" else None
        self.best_nll = ideal(held_out.target) if ideal else None

    def micro_batch(self, step: int, index: int = 0, count: int = 1) -> Batch:
        """Make micro-batch ``index`` of the ``count`` of an update: position ``step * count + index`` of an endless
        order.

        Every epoch is a new permutation in which each pair occurs once. If the last batch of a bucket lacks pairs, the
        first pairs of the same permutation fill it up.
        """
        if step < 0 or not 0 <= index < count:
            raise ValueError(f"micro-batch {index} of {count} at step {step} does not exist.")
        position = step * count + index
        epoch, place = divmod(position, self.batches_per_epoch)
        members, lengths = self._plan(epoch)[place]
        source, target = self._rows.take(members)
        rows = Rows(_fitted(source, lengths[0]), _fitted(target, lengths[-1]))
        return make_batch(rows, self._stack, self.target_vocab, stream(self._config.seed, MASKING, position))

    def validation(self) -> Iterator[Batch]:
        """Yield batches of the validation set, sorted by length; nothing if there is no validation set."""
        rows = self._split.validation
        order = np.argsort(rows.lengths().sum(axis=1), kind="stable")
        for start in range(0, len(order), VALIDATION_ROWS):
            some = rows.take(order[start : start + VALIDATION_ROWS]).trimmed()
            yield make_batch(some, self._stack, self.target_vocab, stream(0, VALIDATION, start))

    def _unigram(self, batches: Iterable[Batch]) -> Unigram:
        """Score the training set's label frequencies on the labels of ``batches``."""
        labels = np.concatenate([batch.labels.numpy()[batch.weight.numpy() > 0] for batch in batches])
        return Unigram.of(self._labels(self._rows.target), labels, self.target_vocab)

    def _labels(self, target: np.ndarray) -> np.ndarray:
        """Return the target side with PAD in place of what is no label: EOS, in an encoder alone."""
        return target if self._stack != "encoder" else np.where(target == EOS, PAD, target)

    def _shuffled(self, epoch: int) -> list[tuple[np.ndarray, tuple[int, ...]]]:
        random = stream(self._config.seed, ORDER, epoch)
        batches = []
        for bucket in self.buckets:
            members = np.resize(random.permutation(bucket.members), (bucket.batches, bucket.rows))
            batches += [(row, bucket.lengths) for row in members]
        return [batches[place] for place in random.permutation(len(batches))]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of target ids, up to EOS."""
        words: list[int] = []
        for token in ids:
            if token == EOS:
                break
            if token not in (PAD, BOS):
                words.append(int(token))
        return self._corpus.decode(words)

    def passage(self, data: str | None = None, longest: int | None = None) -> Passage:
        """Return text to translate: ``data`` = "text:SRC,TGT", in this vocabulary; None: the text that was held out.

        The held-out text is all of the validation text. Without a validation text, it is the pairs that were cut out of
        the training text. No sentence is left out: a source side of over ``longest`` tokens (EOS included; None:
        data.max_length) is cut to that length and marked as truncated.
        """
        corpus, longest = self._corpus, longest or self._config.max_length
        if data is None:
            name, split = (self._config.valid, "valid") if corpus.valid else (self._config.source, "train")
            pairs = corpus.valid or corpus.train
            index = np.arange(len(pairs)) if corpus.valid else self._split.cut_out
            name, tokens = f"{name} (held out)", pairs.source.pick(index)
            sides = [[side[i] for i in index] for side in corpus.lines(split)]
        else:
            if corpus.encode is None:
                raise UsageError(f"{self._config.source} data have no vocabulary for other text: leave out {data!r}.")
            scheme, _, files = data.partition(":")
            if scheme != "text":
                raise UsageError(f"cannot translate {data!r}: the form is text:SRC,TGT.")
            name, sides = data, list(read_pair(files, "text:SRC,TGT", Bounds.of(self._config)))
            encoded = corpus.encode(sides[0])
            tokens = encoded.pick(np.arange(len(encoded.lengths)))
        return Passage.of(name, tokens, *sides, longest=longest)

    def padding(self, multiple: int = 1) -> float:
        """Return the share of padding in the batches of an epoch, if their lengths are padded to multiples."""
        used = sum(b.batches * b.rows * sum(-(-n // multiple) * multiple for n in b.lengths) for b in self.buckets)
        sides = self._lengths[:, -len(self.buckets[0].lengths) :]
        return 1 - float(sides.sum()) / used

    def describe(self) -> dict[str, Any]:
        """Return the facts that a run records about its data: sizes, shapes, content hashes, the baselines."""
        return {
            "source": self._config.source,
            "stack": self._stack,
            **self._corpus.description,
            "source_vocab": self.source_vocab,
            "target_vocab": self.target_vocab,
            "joint": self.joint,
            "pairs": len(self._corpus.train),
            "rows": self._corpus.rows,
            "left_out": self._split.left_out,
            "train": len(self._rows.source),
            "held_out": len(self._held_rows.source),
            "validation": self.validation_sentences,
            "validation_left_out": self._split.validation_left_out,
            "in_training": self._split.in_training,
            "unknown": self.unknown,
            "unknown_source": self.unknown_source,
            "tokens_per_sentence": dict(zip(("source", "target"), self._lengths.mean(axis=0).tolist(), strict=True)),
            "buckets": [{"rows": b.rows, "lengths": b.lengths, "pairs": len(b.members)} for b in self.buckets],
            "batches_per_epoch": self.batches_per_epoch,
            "padding": self.padding(),
            "unigram": vars(self.unigram),
            "validation_unigram": self.validation_unigram and vars(self.validation_unigram),
            "best_nll": self.best_nll,
            "train_sha256": _sha256(self._rows),
            "held_out_sha256": _sha256(self._held_rows),
            "validation_sha256": _sha256(self._split.validation),
        }


def _fitted(side: np.ndarray, length: int) -> np.ndarray:
    """Cut or pad a side to ``length``, which no sentence in it exceeds."""
    return np.pad(side[:, :length], ((0, 0), (0, max(0, length - side.shape[1]))), constant_values=PAD)


def _sha256(rows: Rows) -> str:
    digest = hashlib.sha256(json.dumps([side.shape for side in rows]).encode())
    for side in rows:
        digest.update(side.astype("<u4").tobytes())
    return digest.hexdigest()
