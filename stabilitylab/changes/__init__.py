"""Changes of a training loop that the ledger of its updates shows: each with a name, a sentence and a remedy. Needs no
torch."""

from .change import LEDGER, Kind, LoopChange, counted, place_of
from .find import changes_of
from .state import between, written

__all__ = ["LEDGER", "Kind", "LoopChange", "between", "changes_of", "counted", "place_of", "written"]
