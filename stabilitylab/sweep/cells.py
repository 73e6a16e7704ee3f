"""The line of a ledger for a training run that has ended: its settings, its provenance, its end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from ..config import Config, complete, depth_layers, validated
from ..store import Run
from ..store.layout import METRICS, flat
from .identity import DATA, data_of, deciding, key_of

COLUMNS = (
    "key",  # the identity of the run, see identity.key_of
    *("label", "arch", "layers", "seed", "steps", "lr", "warmup", "T", "data"),  # layers: encoder and decoder together
    "settings",  # other settings that differ from the defaults
    *("version", "git_revision", "torch", "cpu_capability", "device"),
    *("state", "verdict", "nll_gap", "accuracy_gap"),
    "evidence",  # the other numbers of the verdict by name
    "step",
    "metrics",  # all numbers of the last row by name
    "finished",  # last: a line that ends with a time was written whole
)
GAPS = ("nll_gap", "accuracy_gap")
NAMED = ("settings", "evidence", "metrics")  # columns of name=value
NUMBERS = ("layers", "seed", "steps", "lr", "warmup", "T", *GAPS, "step")
OWN = {  # settings that have a column
    "model.arch": "arch",
    "train.seed": "seed",
    "train.steps": "steps",
    "train.lr": "lr",
    "train.warmup": "warmup",
    "model.T": "T",
}

Cell = Mapping[str, str]  # a line by column


def cell_of(run: Run) -> dict[str, str]:
    """Return the line of a training run that has ended."""
    manifest, status = run.manifest, run.status
    recorded = complete(run.config)
    config = validated(recorded)
    digests = manifest.get("data", {}).get("files_sha256")
    own = {column: dict(flat(recorded))[key] for key, column in OWN.items()}
    verdict = found.recorded() if (found := run.verdict) else {}
    values: dict[str, Any] = {
        "key": key_of(config, digests),
        "label": manifest.get("label"),
        "layers": config.model.depth,
        **own,
        "data": data_of(config, digests),
        "settings": _words(dict(_others(config))),
        "version": manifest.get("stabilitylab"),
        **{key: manifest.get(key) for key in ("git_revision", "torch", "cpu_capability", "device")},
        "state": status.state,
        "verdict": verdict.get("state"),
        **{key: verdict.get(key) for key in GAPS},
        "evidence": _words({key: value for key, value in flat(verdict) if key not in GAPS and _is_number(value)}),
        "step": status.step,
        "metrics": _words(last_row(run)),
        "finished": datetime.fromisoformat(status.updated).astimezone(UTC).isoformat(timespec="seconds"),
    }
    return {column: "" if value is None else " ".join(str(value).split()) for column, value in values.items()}


def last_row(run: Run) -> dict[str, float]:
    """Return the metrics of the last row, without those that were not given there; a NaN was measured."""
    table = run.arrow(METRICS)
    rows = table.slice(max(0, table.num_rows - 1)).to_pylist()
    return {name: value for row in rows for name, value in row.items() if name != "step" and value is not None}


def _others(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield settings without a column that differ from the defaults, or from the value that the columns imply."""
    model, usual = config.model, deciding(Config().model_dump(mode="json"))
    if model.depth % 2 == 0 or model.stack != "encoder-decoder":
        layers = depth_layers(model.depth, model.stack)
        usual |= zip(("model.encoder_layers", "model.decoder_layers"), layers, strict=True)
    usual["data.seed"] = config.train.seed
    for key, value in deciding(config.model_dump(mode="json")).items():
        # an option of an architecture has no default among the settings
        if (key not in usual or value != usual[key]) and key not in (*OWN, *DATA):
            yield key, value


def _words(named: Mapping[str, Any]) -> str:
    """Return ``name=value name=value``, numbers with all their digits."""
    return " ".join(f"{name}={''.join(_text(value).split())}" for name, value in named.items())


def _text(value: Any) -> str:
    if isinstance(value, str | float):
        return str(value)
    return json.dumps(value, separators=(",", ":"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def spread(cell: Cell) -> dict[str, Any]:
    """Read a line back: numbers as numbers, and each entry of a column of name=value under its own name."""
    found: dict[str, Any] = {}
    for column, text in cell.items():
        if column in NAMED:
            words = (word.split("=", 1) for word in text.split(" ") if word)
            found |= {name if column == "settings" else f"{column}.{name}": _read(value) for name, value in words}
        else:
            found[column] = _read(text) if column in NUMBERS else text
    return found


def _read(text: str) -> Any:
    """Return a number if the text is one, else the text; None for ""."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None
