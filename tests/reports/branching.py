"""Runs of which every sub-layer's branch has a known share of the stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from making import Made, make_run, sublayer_rows

from stabilitylab.schema import Row

Shares = Callable[[int, int], float]  # of a step and a sub-layer, counted from 1


def share_table(layers: int, share: Shares, steps: tuple[int, ...] = (0,), shortcut: float = 0.0) -> Made:
    """Var(sum) = 4 everywhere; the decoder's rows hold numbers that nobody may read."""
    rows = sublayer_rows(layers)
    inside = [row for row in rows if row.stack == "encoder"]

    def value(step: int, row: Row) -> tuple[float, float, float]:
        if row.stack == "decoder":
            return 1.0, 1e9, 1e9
        own = share(step, inside.index(row) + 1)
        return 4.0, 4 * own, 4 * (1 - own) + shortcut

    return Made(rows, ("total", "branch", "shortcut"), value, steps, total="mean", unit="variance over d")


def run(folder: Path, arch: str, share: Shares, *, layers: int = 3, seed: int = 3, **how: object) -> None:
    kind = str(how.pop("kind", "onestep"))
    steps: tuple[int, ...] = (0,) if kind == "onestep" else (0, 80, 160)
    table = share_table(layers, share, steps, float(how.pop("shortcut", 0.0)))  # type: ignore[arg-type]
    name = f"{arch}-{layers}-{seed}-{kind}"
    make_run(
        folder, name, arch=arch, seed=seed, layers=layers, tables={"branch_variance": table}, kind=kind,
        **how,  # type: ignore[arg-type]
    )  # fmt: skip
