"""Runs of one step from the initialisation, which the claims of DeepNet and Admin share."""

from __future__ import annotations

from collections.abc import Iterator

from .recipe import Experiment, Recipe, Settings

GAIN_1 = ("postln gain=1", "postln-init gain=1")  # DeepNet's own definition of the two
ARCHS = (
    *GAIN_1,
    "postln",
    "preln",
    "postln-init",
    "postln+beta",
    "deepnorm",
    "branchnorm",
    "branchnorm T=1",
    "admin",
)
TINY: Settings = {"model": {"T": 4000}}
BASE: Settings = {"preset": "base", "data": {"sentences": 16}}


def size(ask: Recipe) -> Settings:
    """Return the settings of the model and the batch at the scale of the recipe."""
    return TINY if ask.tiny else BASE


def from_initialisation(ask: Recipe) -> Iterator[Experiment]:
    """Yield runs of one step of every architecture: 3 to 50 layers a side, and at the base size up to 100 (Admin's
    figure)."""
    depths = (3, 6, 12, 18, 25, 50) if ask.tiny else (3, 6, 12, 18, 25, 50, 100)
    yield from ask.runs(ARCHS, depths, size(ask), kind="onestep")
    yield from ask.runs(["branchnorm alpha=0"], [18], size(ask), kind="onestep")
