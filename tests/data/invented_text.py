"""Parallel text of invented words, for tests that must run without a corpus."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

Writer = Callable[..., tuple[Path, Path]]


def invented(lines: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Sentences of 2 to 9 invented words and a word-by-word "translation" of them, all different."""
    draw = random.Random(seed)
    syllables = ["ba", "de", "fü", "gro", "ki", "lo", "mé", "nu", "ßa", "tri"]
    lexicon = ["".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(60)]
    sentences = [[draw.randrange(60) for _ in range(draw.randint(2, 9))] for _ in range(lines)]
    source = [f"{' '.join(lexicon[w] for w in s)}, {i}." for i, s in enumerate(sentences)]
    target = [f"{' '.join(lexicon[w][::-1] for w in s[::-1])} {i}!" for i, s in enumerate(sentences)]
    return source, target
