"""Whether a picture can show what its figure is about: one depth cannot show what grows with depth."""

from __future__ import annotations

import numpy as np

from ...errors import UsageError
from ...experiments import experiments
from ...labels import label
from .. import style
from ..base import Panel, Picture


def pointless(id: str, picture: Picture) -> str:
    """Why not, with these runs; "" where it can. What a figure compares is read off the runs that its sweep makes, and
    what is drawn off its first panel; of a figure without a sweep nothing is known."""
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
    """Different numbers on the x axis."""
    drawn = panel.map.x if panel.map is not None else [x for one in panel.series for x in one.x]
    return len(np.unique(np.asarray(drawn, float)))
