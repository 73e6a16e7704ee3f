"""Explain what went wrong in a training by replaying it; calling the package is :func:`.explanation.explain`."""

from __future__ import annotations

from ..callable_package import make_callable
from .explanation import Explanation
from .findings import AuditFinding
from .flight import Flight
from .recorder import Recorder, UpdateRecorder

__all__ = ["AuditFinding", "Explanation", "Flight", "Recorder", "UpdateRecorder"]

make_callable(__name__, "explanation")
