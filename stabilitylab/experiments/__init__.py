"""The runs of figures: configurations by scale, their names, and the runs that several figures share.

Scale ``tiny`` is the 64-128-2 model on one CPU core; ``h200`` what one GPU makes in half an hour; ``paper`` the papers'
sizes, for GPUs and data that the user names. Seeds 0, 1 and 2 were pilots at width 64, and thresholds of claims were
set close to their results, so sweeps begin with seed 3. Each figure's file defines its runs (:func:`sweep`).
"""

from . import one_gpu, one_step, protocol
from .lookup import asked, command, experiments, folder, minutes, on_device
from .recipe import CONTROLS, SEEDS, Experiment, Kind, Recipe, name_of, probing, slug
from .sweeps import SWEEPS, Sweep, sweep
from .table import SCHEMES, table_runs

__all__ = [
    "CONTROLS",
    "SCHEMES",
    "SEEDS",
    "SWEEPS",
    "Experiment",
    "Kind",
    "Recipe",
    "Sweep",
    "asked",
    "command",
    "experiments",
    "folder",
    "minutes",
    "name_of",
    "on_device",
    "one_gpu",
    "one_step",
    "probing",
    "protocol",
    "slug",
    "sweep",
    "table_runs",
]
