"""The shares of groups of parameters in the squared gradient norm, as lines over the steps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...diagnose.attribution import TABLE, shares_of
from ...diagnose.order import describe
from ..base import Panel, Series
from ..collection import Record
from ..pooling import thin
from ..style import GREY, PARTS

LINES = 5  # groups that have a line of their own; the darkest of PARTS would be taken for INK


def gradient_shares(record: Record, columns: int, colours: Mapping[str, str] | None = None) -> Panel | None:
    """Draw the share of each sub-layer, and of each module outside the layers, in the squared gradient norm: the groups
    that have the largest share in any row, and all others together. None where ``grad_norm`` was not recorded, or a
    single group has all parameters. ``colours``: those of names that other panels have drawn."""
    if TABLE not in record.run.tables:
        return None
    rows = record.run.table(TABLE).rows
    data = record.frame(TABLE, ["value"])
    if data.empty or len(rows) < 2:
        return None
    steps = np.unique(data["step"].to_numpy())
    norms, absent = (data[name].to_numpy().reshape(len(steps), len(rows)) for name in ("value", "absent"))
    shares = shares_of(np.where(absent.astype(bool), 0.0, norms.astype(float)))
    known = np.isfinite(shares).all(1)
    if not known.any():
        return None
    order = np.argsort(-shares[known].max(0), kind="stable")
    lines = []
    for at, colour in zip(order[:LINES].tolist(), PARTS[1:], strict=False):
        x, y = thin(steps, shares[:, at], columns)
        name = describe(rows[at])
        own = (colours or {}).get(name, colour)
        lines.append(Series(name, x.tolist(), y.tolist(), colour=own, dash="solid", marker="none"))
    if rest := len(rows) - len(lines):
        x, y = thin(steps, shares[:, order[LINES:]].sum(1), columns)
        name = f"{rest} other{'s' * (rest > 1)}"
        lines.append(Series(name, x.tolist(), y.tolist(), colour=GREY, dash="dashed", marker="none"))
    return Panel("Shares of the squared gradient norm", "step", "share", lines)
