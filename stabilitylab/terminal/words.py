"""Numbers, times and series in few letters, and the colours of states."""

from __future__ import annotations

import math
from collections.abc import Iterable

BARS = "▁▂▃▄▅▆▇█"
STYLES = {  # of the states of runs, of diagnoses and of events
    **dict.fromkeys(("trained", "learning", "finished", "healthy"), "green"),
    **dict.fromkeys(
        ("ignores its source", "descending", "stuck", "cannot tell", "interrupted", "open", "warning"), "yellow"
    ),
    **dict.fromkeys(("diverged", "failed", "unreadable", "failure", "not finite"), "bold red"),
    "running": "cyan",
}


def state_style(state: str) -> str:
    """Return rich's style of a state; "" if it has none."""
    return STYLES.get(state, "")


def sparkline(values: Iterable[float], width: int = 32) -> str:
    """Draw the last ``width`` values as block characters between their minimum and maximum; ``x``: not finite."""
    shown = list(values)[-width:] if width > 0 else []
    finite = [value for value in shown if math.isfinite(value)]
    low, span = (min(finite), max(finite) - min(finite)) if finite else (0.0, 0.0)
    return "".join(
        "x" if not math.isfinite(value) else BARS[int((value - low) / span * (len(BARS) - 1) + 0.5) if span else 0]
        for value in shown
    )


def number(value: float | None) -> str:
    """Write a number with three decimals, or in whole numbers or scientific notation if it needs them; zero is "0"."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if not math.isfinite(value) or 0.1 <= abs(value) < 1000:
        return f"{value:.3f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e5 else f"{value:.2e}"


def signed(gap: float) -> str:
    """Write a difference with its sign and three decimals; "nan" if it is none."""
    return "nan" if math.isnan(gap) else f"{gap:+.3f}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
