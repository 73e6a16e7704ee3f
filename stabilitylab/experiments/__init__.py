"""Which runs a figure needs: one function per figure, each a list of configurations.

Scale ``tiny`` is the 64-128-2 model on one CPU core; ``h200`` what one GPU makes in half an hour; ``paper`` the papers'
sizes, for GPUs and data that the user names. Seeds 0, 1 and 2 were pilots at width 64 (thresholds of claims stood next
to them), so sweeps begin with 3.
"""

from . import admin, branchnorm, deepnet, protocol, table  # registers the figures
from .lookup import asked, command, experiments, folder, minutes, on_device
from .one_gpu import ONE_GPU
from .recipe import CONTROLS, FIGURES, SEEDS, Experiment, Kind, Recipe, name_of, slug
from .table import SCHEMES, table_runs

__all__ = [
    "CONTROLS",
    "FIGURES",
    "ONE_GPU",
    "SCHEMES",
    "SEEDS",
    "Experiment",
    "Kind",
    "Recipe",
    "admin",
    "asked",
    "branchnorm",
    "command",
    "deepnet",
    "experiments",
    "folder",
    "minutes",
    "name_of",
    "on_device",
    "protocol",
    "slug",
    "table",
    "table_runs",
]
