"""The explanation of a failed training by replaying it. Calling the package calls :func:`.explanation.explain`."""

from __future__ import annotations

from ..callable_package import make_callable
from .explanation import Explanation
from .findings import AuditFinding
from .flight import Flight
from .recorder import Recorder, UpdateRecorder

__all__ = ["AuditFinding", "Explanation", "Flight", "Recorder", "UpdateRecorder"]

make_callable(__name__, "explanation")
