"""Joint byte-pair encoding, learnt from the training text; a cache keeps encoding and tokens by content."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from . import cache
from .corpus import SPECIALS, UNK, Corpus, Pairs, Sentences

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads make every later fork of the process warn
import tokenizers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VERSION = 2  # of the algorithm below: a changed algorithm must not read old cache entries
SIDES = ("source", "target")
SPACE = "▁"  # what Metaspace writes for a space, and in front of every line
logger = logging.getLogger(__name__)

Lines = tuple[list[str], list[str]]  # source, target


def encode_corpus(
    hashes: Sequence[str],
    read: Callable[[], Mapping[str, Lines]],
    vocab_size: int,
    description: dict[str, Any],
    *,
    lines: Callable[[str], Lines],
) -> Corpus:
    """Encode both sides with one vocabulary.

    ``hashes`` identify the text that ``read`` returns as "train" (and "valid"). ``lines`` returns one of these two
    texts at any later time.
    """
    identity = "\n".join([f"{VERSION} {tokenizers.__version__} {vocab_size}", *hashes])
    name = f"bpe-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
    stored = cache.load(name)
    unpacked = _unpack(stored) if stored is not None else None
    if stored is not None and unpacked is None:
        logger.warning("the cache entry %s is not what its name says; making it again.", name)
    if unpacked is None:
        text = read()
        tokenizer = train(chain(*text["train"]), vocab_size)
        splits = {split: Pairs(*(_encode(tokenizer, side) for side in sides)) for split, sides in text.items()}
        cache.save(name, _pack(tokenizer, splits))
    else:
        tokenizer, splits = unpacked
    vocab = tokenizer.get_vocab_size()
    return Corpus(
        train=splits["train"],
        valid=splits.get("valid"),
        source_vocab=vocab,
        target_vocab=vocab,
        joint=True,
        decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
        lines=lines,
        encode=lambda text: _encode(tokenizer, text),
        description={**description, "tokenizer_sha256": hashlib.sha256(tokenizer.to_str().encode()).hexdigest()},
    )


def train(lines: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn byte-pair encoding (Sennrich et al. 2016) of NFKC text, cut at spaces (kept as "▁") and around
    punctuation."""
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIALS[UNK]))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    tokenizer.decoder = decoders.Metaspace()
    text = list(lines)
    # the trainer breaks ties between equally rare characters by the order of a randomly seeded hash table
    characters = Counter(tokenizer.normalizer.normalize_str("\n".join(text)).replace(" ", SPACE))
    del characters["\n"]
    limit = (vocab_size - len(SPECIALS)) // 2
    alphabet = sorted(characters, key=lambda c: (-characters[c], c))[:limit]
    if SPACE not in alphabet:  # in a text with few spaces or none, where each line would begin with an unknown symbol
        alphabet = [*alphabet[: limit - 1], SPACE]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return _plain(tokenizer)


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.encode_special_tokens = True  # the characters "<pad>" in a text are text; not kept by to_str
    return tokenizer


def _encode(tokenizer: Tokenizer, lines: list[str]) -> Sentences:
    rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(lines, add_special_tokens=False)]
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    kind = np.min_scalar_type(tokenizer.get_vocab_size())
    return Sentences(np.fromiter(chain.from_iterable(rows), kind, int(lengths.sum())), lengths)


def _pack(tokenizer: Tokenizer, splits: Mapping[str, Pairs]) -> dict[str, np.ndarray]:
    arrays = {"tokenizer": np.frombuffer(tokenizer.to_str().encode(), np.uint8)}
    for split, pairs in splits.items():
        for side in SIDES:
            sentences: Sentences = getattr(pairs, side)
            arrays |= {f"{split}.{side}.{part}": array for part, array in sentences._asdict().items()}
    return arrays


def _unpack(arrays: Mapping[str, np.ndarray]) -> tuple[Tokenizer, dict[str, Pairs]] | None:
    try:
        tokenizer = _plain(Tokenizer.from_str(arrays["tokenizer"].tobytes().decode()))
        splits = {
            split: Pairs(
                *(Sentences(*(arrays[f"{split}.{side}.{part}"] for part in Sentences._fields)) for side in SIDES)
            )
            for split in dict.fromkeys(key.partition(".")[0] for key in arrays if "." in key)
        }
    except Exception:  # tokenizers raises a bare Exception for text that is no tokenizer
        return None
    whole = all(
        len(side.ids) == side.lengths.sum() for pairs in splits.values() for side in (pairs.source, pairs.target)
    )
    return (tokenizer, splits) if "train" in splits and whole else None
