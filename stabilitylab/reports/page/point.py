"""A check that a picture can show the subject of its figure: a single depth cannot show growth with depth."""

from __future__ import annotations

import numpy as np

from ...errors import UsageError
from ...experiments import experiments
from ...labels import label
from .. import style
from ..base import Panel, Picture


def pointless(id: str, picture: Picture) -> str:
    """Say why the picture cannot show the subject of its figure; "" if it can, or if the figure has no sweep.

    The runs of the sweep tell what the figure compares; the first panel tells what is drawn.
    """
    try:
        models = [run.config.model for run in experiments(id)]
    except UsageError:
        return ""
    first = picture.panels[0]
    if len({max(model.encoder_layers, model.decoder_layers) for model in models}) > 1 and _places(first) == 1:
        return f"these runs have one place on its axis ({first.x}), and it is about several"
    archs = {one.arch for one in first.series if one.arch}
    if len({label(model) for model in models}) > 1 and len(first.series) == len(archs) == 1 and first.map is None:
        return f"of the architectures that it compares these runs have one, {style.title(archs.pop())}"
    return ""


def _places(panel: Panel) -> int:
    """Count the different numbers on the x axis."""
    drawn = panel.map.x if panel.map is not None else [x for one in panel.series for x in one.x]
    return len(np.unique(np.asarray(drawn, float)))
