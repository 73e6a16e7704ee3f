"""Data as fixed-shape batches of a corpus, which a data source makes.

Batches load on first use, so that whoever only looks into the registry of sources needs no torch.
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
