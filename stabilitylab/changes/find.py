"""All changes of a run, from the facts of its ledger."""

from __future__ import annotations

from collections.abc import Sequence

from .change import Fact, LoopChange
from .flags import accumulation_changes, attribute_changes, flag_changes
from .optimizers import optimizer_changes
from .settings import setting_changes
from .state import counted_writes, replaced_changes, reset_changes, write_changes


def changes_of(facts: Sequence[Fact], parameters: int = 0, scheduled: bool = False) -> list[LoopChange]:
    """Return the changes that the facts of a ledger show, kind by kind.

    ``parameters``: the number of the model's parameters, which says if a place is the whole model; 0 if not known.
    ``scheduled``: the loop has declared the scheduler that moves its rate.
    """
    resets = [*reset_changes(facts)]
    reset_steps = {one.step for one in resets}
    return [
        *setting_changes(facts, scheduled),
        *resets,
        *replaced_changes(facts, reset_steps),
        *flag_changes(facts, parameters),
        *attribute_changes(facts),
        *accumulation_changes(facts),
        *optimizer_changes(facts),
        *write_changes(facts, parameters, reset_steps),
        *counted_writes(facts, parameters),
    ]
