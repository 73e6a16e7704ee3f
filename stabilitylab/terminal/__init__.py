"""Output on a terminal: the live panel of a run, tables that fit its width, numbers in few letters."""

from .live import LiveDisplay, worst_ln_input
from .strips import Strip, strips
from .summary import summary
from .tables import Field, fitted, print_table
from .words import duration, number, signed, sparkline, state_style

__all__ = [
    "Field",
    "LiveDisplay",
    "Strip",
    "duration",
    "fitted",
    "number",
    "print_table",
    "signed",
    "sparkline",
    "state_style",
    "strips",
    "summary",
    "worst_ln_input",
]
