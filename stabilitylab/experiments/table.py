"""The runs of the stability table: every architecture at every depth, with any other settings of the user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..arch_notes import built_in
from ..config import depth_layers, merge, stack_of
from ..errors import UsageError
from .recipe import BRANCHNORM, SEEDS, Experiment, Recipe, Settings, control, figure_config, name_of, probing

# In the order of their ranks: first the architectures of the papers' tables, then newer ones for the same purpose.
SCHEMES = tuple(note.name for note in built_in())
DEPTHS = (12, 36, 100)  # encoder and decoder layers together
ITS_AXES = ("model.arch", "model.encoder_layers", "model.decoder_layers", "train.seed", "data.seed")


def table_settings(ask: Recipe, full: Settings = BRANCHNORM) -> dict[str, Any]:
    """Return the common settings of all runs of the table: the user's settings over the preset's recipe, or a paper's.

    Raises UsageError if the user's settings name an axis of the table.
    """
    for key in ITS_AXES:
        section, _, name = key.partition(".")
        if name in ask.settings.get(section, {}):
            raise UsageError(f"the table sets {key} itself: give --archs, --depths and --seeds.")
    return merge({} if ask.tiny else full, probing(), ask.settings)


def table_runs(
    ask: Recipe, archs: Sequence[str] = SCHEMES, depths: Sequence[int] = (), full: Settings = BRANCHNORM
) -> Iterator[Experiment]:
    """Yield the runs of every architecture (or control, such as ``branchnorm T=1``) at every depth and seed.

    ``depths`` count encoder and decoder layers together, or the layers of a single stack. T-Fixup trains without
    warm-up, as its paper insists, unless the settings name one. Raises UsageError for an impossible depth.
    """
    common = table_settings(ask, full)
    for arch in archs:
        for depth in depths or (DEPTHS if ask.tiny else (*DEPTHS, 200)):
            encoder, decoder = depth_layers(depth, stack_of(common.get("model", {})))
            layers = {"encoder_layers": encoder, "decoder_layers": decoder}
            for seed in ask.seeds or SEEDS[:3]:
                own = {
                    "model": {**control(arch), **layers},
                    "data": {"seed": seed},
                    "train": {"seed": seed},
                }
                config = figure_config(common, own)
                yield Experiment(name_of(config), config)
