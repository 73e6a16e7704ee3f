"""Rows of a made-up run for the alarm: three places of gradients, two of updates."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stabilitylab.schema import Cells, Row, Table

GRADIENTS = Table(
    "grad_norm",
    ("value",),
    (Row("embedding", "decoder", 0, "embedding"), Row("one", "decoder", 1, "ffn"), Row("two", "decoder", 2, "ffn")),
    phase="backward",
)
UPDATES = Table(
    "update_ratio",
    ("value", "rms"),
    (Row("one", "decoder", 1, "ffn"), Row("two", "decoder", 2, "ffn")),
    phase="update",
)
TABLES = (GRADIENTS, UPDATES)
Made = tuple[int, dict[str, float | None], dict[str, Cells]]


def cells(values: np.ndarray) -> Cells:
    """Of one column, or several."""
    values = np.asarray(values, dtype=float)
    values = values[:, None] if values.ndim == 1 else values
    return Cells(values, np.zeros(len(values), dtype=bool))


def run(rows: int = 60, seed: int = 0, jump: int | None = None, factor: float = 100.0) -> Iterator[Made]:
    """Noise of 10 % around 1; at row ``jump`` the gradient of the second layer is ``factor`` times as large, then the
    loss three times."""
    random = np.random.default_rng(seed)
    for step in range(rows):
        noise = np.exp(0.1 * random.standard_normal(6))
        gradients, updates = noise[:3], np.stack([noise[3:5] * 1e-3] * 2, axis=1)
        loss = noise[5] * (3.0 if jump is not None and step > jump else 1.0)
        if step == jump:
            gradients[2] *= factor
        metrics: dict[str, float | None] = {"loss": loss, "grad_norm_total": float(np.linalg.norm(gradients))}
        yield step, metrics, {"grad_norm": cells(gradients), "update_ratio": cells(updates)}
