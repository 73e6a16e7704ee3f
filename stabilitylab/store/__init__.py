"""Run directories: written while training runs, readable at any moment and after any crash."""

from .absent import AbsentRun
from .folders import load_runs
from .layout import SCHEMA_VERSION
from .reader import Run, Status
from .thinned import thinned
from .writer import RunWriter

__all__ = ["SCHEMA_VERSION", "AbsentRun", "Run", "RunWriter", "Status", "load_runs", "thinned"]
