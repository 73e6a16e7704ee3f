"""``evaluation.json``: the quality of a run's translations, as ``stabilitylab evaluate`` measured it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import DamagedError
from .documents import read_document, write_document
from .identity import Identity, identity_of
from .layout import read_run_json

FILE = "evaluation.json"


def write_evaluation(run: Path, result: Mapping[str, Any]) -> None:
    write_document(run, FILE, result, identity_of(read_run_json(run)), escaped=False)


def read_evaluation(run: Path, identity: Identity) -> dict[str, Any] | None:
    """Return the result of :func:`stabilitylab.decode.evaluate`; None for a run that was not evaluated."""
    if not os.path.lexists(run / FILE):
        return None
    found = read_document(run, FILE, identity)
    bleu = found.get("bleu", "")
    if bleu is not None and (type(bleu) not in (int, float) or not 0 <= bleu <= 101):  # percent, rounded
        raise DamagedError(f"{run / FILE} is damaged (no BLEU): run stabilitylab evaluate {run} again.", run)
    return found
