"""What initialisation and one tiny update tell, in float64, as an ordinary run directory of kind "onestep"."""

from .measuring import measure
from .workers import measure_all

__all__ = ["measure", "measure_all"]
