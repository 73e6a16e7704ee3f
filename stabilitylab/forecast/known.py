"""Measured critical rates, run by run (results/forecast): where one is known, no forecast is needed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import InputError
from ..labels import may_follow_ramp
from ..models import canonical

FILE = Path(__file__).parent / "known.json"
DATA = ("vocab_size", "sentences", "shapes", "length_multiple", "max_length", "fraction")
TRAIN = (
    *("optimizer", "beta1", "beta2", "eps", "weight_decay", "label_smoothing", "clip_norm", "accumulate"),
    "precision",
)
RAMP = {"growth", "T", "t0"}  # part of a design only if its architecture has a ramp
SAME_TEXT = 0.01  # nats: the largest difference between the entropies of labels of what counts as one text


@dataclass(frozen=True)
class Known:
    """The known critical rate of one ``design`` and ``warmup``: runs trained at ``low`` and below, and failed at
    ``high``.

    ``low`` is the least and ``high`` the largest over ``seeds``. 0 and inf: no run trained, or none failed, at rates
    from 4.3e-5 to 0.32 (60 layers: 4.9e-5 to 0.37).
    """

    design: str
    warmup: int
    low: float
    high: float
    seeds: int

    def word(self, rate: float) -> str:
        """Return the outcome of runs at ``rate`` in one word; between ``low`` and ``high`` nothing is known."""
        return "trains" if rate <= self.low else "fails" if rate >= self.high else "near the edge"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict, with null for rates that were not seen."""
        own = asdict(self)
        return {**own, "low": self.low or None, "high": self.high if math.isfinite(self.high) else None}

    def sentence(self) -> str:
        runs = "1 seed" if self.seeds == 1 else f"{self.seeds} seeds"
        below = f"trained up to a rate of {self.low:.2g}" if self.low else "trained at no rate"
        above = f"failed from {self.high:.2g} on" if math.isfinite(self.high) else "failed at none"
        return f"{below}, {above} ({runs}, results/forecast)"


@dataclass(frozen=True)
class KnownEdges:
    """All known critical rates, of runs on the text ``text``. ``entropy``: the entropy of the labels of that text
    [nats]."""

    text: str
    entropy: float
    edges: Sequence[Known]

    def of(self, facts: Mapping[str, Any], warmup: int) -> Known | None:
        """Return the known critical rate of the design in ``facts`` (:func:`.candidate.reference`), on any text; None
        if none is known."""
        design = facts.get("design")
        return next((one for one in self.edges if (one.design, one.warmup) == (design, warmup)), None)

    def same_text(self, facts: Mapping[str, Any]) -> bool:
        """True if the text of ``facts`` is that of the runs, by the entropy of its labels."""
        return abs(facts.get("entropy", math.inf) - self.entropy) <= SAME_TEXT

    def write(self, path: Path) -> None:
        lines = ",\n  ".join(json.dumps(one.as_dict()) for one in self.edges)
        head = json.dumps({"text": self.text, "entropy": self.entropy})[1:-1]
        path.write_text(f'{{{head}, "edges": [\n  {lines}\n]}}\n', encoding="utf-8")


def design(config: Config) -> str:
    """Return a digest of everything that a critical rate depends on except text, seed, learning rate, schedule and
    warm-up: the model with its depth, the shape of batches, the optimizer and the loss."""
    data, train, own = config.data.model_dump(), config.train.model_dump(), canonical(config.model)
    ramps = any(may_follow_ramp(arch) for arch in (own.arch, own.decoder_arch) if arch)
    told = {
        "model": own.model_dump(exclude=set() if ramps else RAMP),
        "data": {name: data[name] for name in DATA},
        "train": {name: train[name] for name in TRAIN},
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


@cache
def known_edges(path: Path = FILE) -> KnownEdges | None:
    """Return the known critical rates of the package; None if it has none. Raises InputError for a file that is none of
    ours."""
    if not path.exists():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        missing = {"low": 0.0, "high": math.inf}
        edges = [
            Known(**{**one, **{name: none for name, none in missing.items() if one[name] is None}})
            for one in told["edges"]
        ]
        return KnownEdges(str(told["text"]), float(told["entropy"]), edges)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} holds no edges that can be read: install the package anew.") from error
