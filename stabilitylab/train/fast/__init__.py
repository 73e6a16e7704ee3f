"""Faster ways to make the same update: CUDA graphs, compiled layers, AdamW in one pass, working weights in bfloat16.

Each is off by default, as no GPU has run it; docs/speed.md says what was checked. The trainer asks for them here.
"""

from .compiling import as_written, compile_layers, explained, is_compiled
from .graph_replays import Directly, Replays, are_apart, recorder_for, shapes_of, some_run_directly
from .micro_replays import ReplaysApart
from .one_pass import OnePassAdamW
from .working_weights import WorkingWeights

__all__ = [
    "Directly",
    "OnePassAdamW",
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
