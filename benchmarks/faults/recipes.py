"""Which runs the corpus has: of each subject and seed a twin, a hard case of health, three ways to fail, one fault."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from families import FAMILIES
from pilot import middles, strength
from subjects import SUBJECTS
from training import Recipe

SEEDS = (0, 2, 4, 1, 3, 5, 7)  # those that choose come first
FAILING = 3  # ways to fail from within, of each subject and seed


def half(seed: int) -> str:
    """Even seeds choose thresholds, odd ones test them; a twin and what is compared with it share a seed."""
    return "test" if seed % 2 else "train"


def recipes() -> Iterator[Recipe]:
    """All runs, seed by seed, so that a corpus that is cut short has whole seeds; a twin before what needs it.

    Families take turns: with the seed, with the subject; of ways to fail, those that the pilot found to fail in the
    architecture, and not at once. A seed and the next odd one have the same families at other strengths. An
    architecture whose pilot is not whole has no runs yet.
    """
    kinds = {kind: [name for name, own in FAMILIES.items() if own.kind == kind] for kind in ("healthy", "exogenous")}
    hard, outside = [name for name in kinds["healthy"] if name != "twin"], kinds["exogenous"]
    middle = middles()
    for seed in SEEDS:
        for place, (name, subject) in enumerate(SUBJECTS.items()):
            turn = seed // 2 + place
            random = np.random.default_rng([seed, place])
            inside = [own for arch, own in middle if arch == subject.arch]
            if not inside:
                continue
            yield Recipe(name, seed, "twin")
            yield Recipe(name, seed, hard[turn % len(hard)], 5.0)
            for more in range(min(FAILING, len(inside))):
                family = inside[(FAILING * (seed // 2) + place + more) % len(inside)]
                yield Recipe(name, seed, family, strength(middle[subject.arch, family], random))
            family = outside[turn % len(outside)]
            levels = FAMILIES[family].levels
            yield Recipe(name, seed, family, levels[(seed // 2) % len(levels)])
