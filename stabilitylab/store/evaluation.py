"""``evaluation.json``: how well a run translates, as ``stabilitylab evaluate`` found."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import DamagedError
from .files import replace_file
from .layout import plain, read_json

FILE = "evaluation.json"


def write_evaluation(run: Path, result: Mapping[str, Any]) -> None:
    replace_file(run / FILE, (json.dumps(plain(result), indent=2, ensure_ascii=False) + "\n").encode())


def read_evaluation(run: Path) -> dict[str, Any] | None:
    """What :func:`stabilitylab.decode.evaluate` returned; None for a run that was not evaluated."""
    if not os.path.lexists(run / FILE):
        return None
    found = read_json(run, FILE)
    bleu = found.get("bleu", "")
    if bleu is not None and (type(bleu) not in (int, float) or not 0 <= bleu <= 101):  # of rounding: in percent
        raise DamagedError(f"{run / FILE} is damaged (no BLEU): run stabilitylab evaluate {run} again.", run)
    return found
