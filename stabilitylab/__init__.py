"""stabilitylab: will a deep Transformer train, which layer breaks first, and why.

The public names load on first use, so that ``import stabilitylab`` costs nothing and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._version import __version__
from .late_names import late_names
from .tapping import tap

if TYPE_CHECKING:
    from .api import sites, watch
    from .bisect.find import bisect
    from .check import check_ranks, preflight, verify_neutral
    from .explain import Recorder
    from .explain.explanation import explain
    from .lr_find.find import lr_find
    from .models import build_model
    from .probes import Probe, probe
    from .store import Run, load_runs

_HOME = {
    "Probe": "probes",
    "Recorder": "explain",
    "Run": "store",
    "bisect": "",  # the package itself, which can be called
    "build_model": "models",
    "check_ranks": "check",
    "explain": "",  # the package itself, which can be called
    "load_runs": "store",
    "lr_find": "",  # the package itself, which can be called
    "preflight": "check",
    "probe": "probes",
    "sites": "api",
    "verify_neutral": "check",
    "watch": "api",
}

__all__ = [
    "Probe",
    "Recorder",
    "Run",
    "__version__",
    "bisect",
    "build_model",
    "check_ranks",
    "explain",
    "load_runs",
    "lr_find",
    "preflight",
    "probe",
    "sites",
    "tap",
    "verify_neutral",
    "watch",
]


__getattr__ = late_names(__name__, _HOME)


def __dir__() -> list[str]:
    return list(__all__)
