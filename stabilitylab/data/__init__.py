"""Batches of fixed shapes, made from the corpus of a data source.

The classes of batches are imported on first use, so that the registry of sources can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..late_names import late_names
from .corpus import SPECIALS, Corpus, Pairs, Sentences
from .source import SOURCES, DataSource, Files, source

if TYPE_CHECKING:
    from .batches import Batch
    from .dataset import Dataset, load_data
    from .unigram import Unigram

_HOME = {"Batch": "batches", "Dataset": "dataset", "Unigram": "unigram", "load_data": "dataset"}

__all__ = [
    "SOURCES",
    "SPECIALS",
    "Batch",
    "Corpus",
    "DataSource",
    "Dataset",
    "Files",
    "Pairs",
    "Sentences",
    "Unigram",
    "load_data",
    "source",
]


__getattr__ = late_names(__name__, _HOME)
