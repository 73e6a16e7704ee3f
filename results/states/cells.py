"""The runs by which the states are judged: which configurations, which seeds, and where each may come to a stop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

UPDATES, LATER = 160, 1600  # a state is given after the first, and what became of the run is looked up after the second
CHOICE, TEST = (100, 101, 102), (3, 4, 5, 6)  # seeds on which constants were chosen, and on which the rule is judged


@dataclass(frozen=True)
class Cell:
    """A configuration and why it might be stuck: depth, rate, initialisation, ramp or nothing (``none``)."""

    name: str
    cause: str
    arch: str
    layers: int  # both stacks together
    settings: tuple[str, ...]


def _cell(name: str, cause: str, arch: str, layers: int, *settings: str) -> Cell:
    return Cell(name, cause, arch, layers, settings)


CONSTANT = "train.schedule=constant"
CELLS = (
    _cell("postln-deep", "depth", "postln", 36, "train.lr=1e-3"),
    _cell("postln-deep-fast", "depth", "postln", 36, "train.lr=2e-3"),
    _cell("deepnorm-fast", "rate", "deepnorm", 12, "train.lr=3e-2"),
    _cell("deepnorm-fast-constant", "rate", "deepnorm", 12, "train.lr=3e-2", CONSTANT),
    _cell("branchnorm-fast", "rate", "branchnorm", 12, "train.lr=1e-2"),
    _cell("branchnorm-faster-constant", "rate", "branchnorm", 12, "train.lr=3e-2", CONSTANT),
    _cell("admin-fast", "rate", "admin", 12, "train.lr=1e-2"),
    _cell("admin-faster-constant", "rate", "admin", 12, "train.lr=3e-2", CONSTANT),
    _cell("postln-fast", "rate", "postln", 12, "train.lr=1e-2"),
    _cell("preln-fastest", "rate", "preln", 12, "train.lr=0.1", CONSTANT),
    _cell("postln-gain1", "initialisation", "postln", 36, "train.lr=1e-3", "model.init=arch-1"),
    _cell("branchnorm-xavier", "initialisation", "branchnorm", 36, "train.lr=1e-3", "model.init=xavier", "model.T=6"),
    _cell("postln-abrupt", "ramp", "postln", 36, "train.lr=1e-3", "train.warmup=0"),
    _cell("postln-abrupt-shallow", "ramp", "postln", 12, "train.lr=3e-3", "train.warmup=0"),
    _cell("admin-abrupt", "ramp", "admin", 12, "train.lr=1e-2", "train.warmup=0", CONSTANT),
    _cell("branchnorm-abrupt", "ramp", "branchnorm", 12, "train.lr=1e-2", "train.warmup=0", "model.T=6"),
    _cell("branchnorm-late", "ramp", "branchnorm", 12, "model.T=4000"),
    _cell("deepnorm", "none", "deepnorm", 12),
    _cell("deepnorm-deep", "none", "deepnorm", 36),
    _cell("postln", "none", "postln", 12),
    _cell("postln-deep-slow", "none", "postln", 36),
    _cell("preln-slow", "none", "preln", 12, "train.lr=1e-5"),
    _cell("preln-fast", "none", "preln", 12, "train.lr=3e-2"),
    _cell("admin", "none", "admin", 12),
    _cell("dlcl", "none", "dlcl", 12),
    _cell("deepnorm-quick", "none", "deepnorm", 12, "train.lr=1e-2"),
)


def order() -> Iterator[tuple[Cell, int]]:
    """Seed by seed, shallow cells first, so that a stopped call has whole sets; deep ones to choose on come late."""
    shallow, deep = ([cell for cell in CELLS if (cell.layers > 12) == far] for far in (False, True))
    for seed in (*CHOICE[:1], *TEST):
        yield from ((cell, seed) for cell in shallow)
        yield from ((cell, seed) for cell in deep if seed in TEST)
    yield from ((cell, CHOICE[0]) for cell in deep)
    yield from ((cell, seed) for seed in CHOICE[1:] for cell in CELLS)
