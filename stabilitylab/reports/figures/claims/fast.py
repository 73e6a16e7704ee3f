"""The runs that decide every claim on one step: ``stabilitylab claims --fast``."""

from __future__ import annotations

from collections.abc import Iterator

from ....experiments import Experiment, Recipe, one_step, sweep


@sweep("claims:fast", minutes=26, command="stabilitylab claims --fast")
def claims_of_one_step(ask: Recipe) -> Iterator[Experiment]:
    """Takes the runs of admin:4, and steps once with a Post-LN encoder and a Pre-LN decoder."""
    yield from one_step.from_initialisation(ask)
    yield from ask.runs(["postln/preln"], [18], one_step.size(ask), kind="onestep")
