"""Edges that were looked for, run by run (results/forecast): where one is known nothing needs to be forecast."""

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
RAMP = {"growth", "T", "t0"}  # count where the architecture has one
SAME_TEXT = 0.01  # nats between the entropies of the labels of two texts that count as one


@dataclass(frozen=True)
class Known:
    """Of one ``design`` and ``warmup``: runs trained at ``low`` and below, and failed at ``high``; over ``seeds`` the
    least and the largest. 0 and inf: none did, of the rates from 4.3e-5 to 0.32 (60 layers: 4.9e-5 to 0.37)."""

    design: str
    warmup: int
    low: float
    high: float
    seeds: int

    def word(self, rate: float) -> str:
        """Is what became of runs at ``rate``; between the two nothing is known."""
        return "trains" if rate <= self.low else "fails" if rate >= self.high else "near the edge"

    def as_dict(self) -> dict[str, Any]:
        """Rates that were not seen are null."""
        own = asdict(self)
        return {**own, "low": self.low or None, "high": self.high if math.isfinite(self.high) else None}

    def sentence(self) -> str:
        runs = "1 seed" if self.seeds == 1 else f"{self.seeds} seeds"
        below = f"trained up to a rate of {self.low:.2g}" if self.low else "trained at no rate"
        above = f"failed from {self.high:.2g} on" if math.isfinite(self.high) else "failed at none"
        return f"{below}, {above} ({runs}, results/forecast)"


@dataclass(frozen=True)
class KnownEdges:
    """``entropy``: of the labels of the text that the runs were trained on [nats]."""

    text: str
    entropy: float
    edges: Sequence[Known]

    def of(self, facts: Mapping[str, Any], warmup: int) -> Known | None:
        """The edge of the design that ``facts`` describe, as :func:`.candidate.reference` gives them, on whatever text;
        None where none is known."""
        design = facts.get("design")
        return next((one for one in self.edges if (one.design, one.warmup) == (design, warmup)), None)

    def same_text(self, facts: Mapping[str, Any]) -> bool:
        """Whether the design of ``facts`` is to be trained on the text of the runs."""
        return abs(facts.get("entropy", math.inf) - self.entropy) <= SAME_TEXT

    def write(self, path: Path) -> None:
        lines = ",\n  ".join(json.dumps(one.as_dict()) for one in self.edges)
        head = json.dumps({"text": self.text, "entropy": self.entropy})[1:-1]
        path.write_text(f'{{{head}, "edges": [\n  {lines}\n]}}\n', encoding="utf-8")


def design(config: Config) -> str:
    """A digest of all that an edge depends on but text, seed, learning rate, schedule and warm-up: the model with its
    depth, the shape of batches, the optimizer and the loss."""
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
    """What comes with the package; None where nothing does. Raises InputError for a file that is none of ours."""
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
