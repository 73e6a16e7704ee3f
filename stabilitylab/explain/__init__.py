"""Explain what went wrong in a training by replaying it; calling the package is :func:`.explanation.explain`.

``stabilitylab.explain`` is the function and this package at once: Python binds a package that was imported to its name,
so that the package itself can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .explanation import Explanation
from .findings import AuditFinding
from .flight import Flight
from .recorder import FlightRecorder, UpdateRecorder

Recorder = FlightRecorder  # stabilitylab.Recorder; probes.Recorder records device work for replays of CUDA graphs

__all__ = ["AuditFinding", "Explanation", "Flight", "FlightRecorder", "Recorder", "UpdateRecorder"]


class _Function(ModuleType):
    """The package, which can be called."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from .explanation import explain

        return explain(*args, **options)

    @property
    def __signature__(self) -> Any:
        import inspect

        from .explanation import explain

        return inspect.signature(explain)


sys.modules[__name__].__class__ = _Function
