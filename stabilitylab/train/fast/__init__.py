"""Faster ways to make the same update: CUDA graphs, compiled layers, AdamW in one pass, working weights in bfloat16.

CUDA graphs are on by default on a GPU, the others off; docs/speed.md says what was checked. The trainer asks for them
here.
"""

from .compiling import as_written, compile_layers, explained, is_compiled
from .graph_replays import Directly, Replays, are_apart, recorder_for, shapes_of, some_run_directly
from .micro_replays import ReplaysApart
from .one_pass import OnePassAdamW
from .pass_replays import ReplayedPass
from .working_weights import WorkingWeights

__all__ = [
    "Directly",
    "OnePassAdamW",
    "ReplayedPass",
    "Replays",
    "ReplaysApart",
    "WorkingWeights",
    "are_apart",
    "as_written",
    "compile_layers",
    "explained",
    "is_compiled",
    "recorder_for",
    "shapes_of",
    "some_run_directly",
]
