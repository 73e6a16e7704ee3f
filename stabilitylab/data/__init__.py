"""Data as fixed-shape batches: a synthetic translation task, local parallel text or a hub data set."""

from __future__ import annotations

from ..config import DataConfig, Stack
from ..errors import UsageError
from .batches import Batch
from .dataset import Dataset
from .unigram import Unigram

__all__ = ["Batch", "Dataset", "Unigram", "load_data"]


def load_data(config: DataConfig, *, stack: Stack) -> Dataset:
    """Load the data that ``config.source`` names: ``synthetic``, ``text:SRC,TGT`` or
    ``hf:DATASET,SRC_COLUMN,TGT_COLUMN``.

    Each source has a module of its own, which is imported only when it is needed.
    """
    scheme, _, rest = config.source.partition(":")
    if config.source == "synthetic":
        if config.valid is not None:
            raise UsageError("data.valid does not go with the synthetic task, which holds out sentences of its own.")
        from .synthetic import load_synthetic

        corpus = load_synthetic(config.vocab_size)
    elif scheme == "text":
        from .text import Bounds, load_text

        corpus = load_text(rest, config.valid, config.vocab_size, Bounds.of(config))
    elif scheme == "hf":
        from .hub import load_hub

        corpus = load_hub(rest, config.valid, config.vocab_size)
    else:
        raise UsageError(
            f"unknown data {config.source!r}; choose synthetic, text:SRC,TGT or hf:DATASET,SRC_COLUMN,TGT_COLUMN."
        )
    return Dataset(corpus, config, stack)
