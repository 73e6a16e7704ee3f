"""A change of a training loop: kind, place, step, a sentence, the evidence and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import listed

Fact = Mapping[str, Any]  # a line of the ledger: step, kind, name, before, after
Kind = Literal[
    "rate",  # the learning rate jumped above all that it was
    "return",  # ... to a former value
    "fall",  # ... down
    "restart",  # the schedule of the learning rate began again
    "setting",  # another setting of a parameter group
    "reset",  # the optimizer's state was dropped, set back or set to zero
    "replaced",  # the optimizer's state was written, or is that of a later step
    "frozen",
    "thawed",
    "mode",
    "dtype",
    "attribute",
    "write",  # a parameter was written by something else than the optimizer
    "accumulation",
    "optimizer",  # a known optimizer does not step, while its parameters move
]
LEDGER = "the ledger of updates"
# Names of facts, behind the name of their optimizer's group, as the ledger writes them.
WITH_STATE = "parameters with state"
BEHIND = "updates without a step"
ZEROS_IN = "share of zeros in"
FORWARDS = "forwards of an update"
STEPS = "steps"  # behind the name of an optimizer


@dataclass(frozen=True)
class LoopChange:
    """A fact of the ledger that means something.

    - ``step``: the update that first had it; ``until``: the update at which it was undone, None if it was not.
    - ``lasts``: True for a condition that can end, such as another setting; False for what happens once.
    - ``from_start``: True if the first recorded update had it already.
    - ``accused``: False for what schedules, evaluations and fine-tuning do as a matter of course.
    - ``factor``: of a rate that jumped, after over before.
    - ``is_compared``: False for a write that was counted, and of which no bit was compared.
    - ``is_rare``: False for a setting or a number of a module that changes again and again, by a schedule or a counter.
    - ``of_moments``: the tensors that were written are moments of the optimizer, all of them.
    """

    kind: Kind
    place: str
    step: int
    sentence: str
    evidence: str = LEDGER
    remedy: str = ""
    accused: bool = True
    factor: float | None = None
    until: int | None = None
    lasts: bool = False
    from_start: bool = False
    is_compared: bool = True
    is_rare: bool = True
    of_moments: bool = False
    title: str = ""

    @property
    def stands(self) -> bool:
        """True if the condition holds to the end of the ledger."""
        return self.lasts and self.until is None


def counted(names: Sequence[object], what: str) -> str:
    return f"{len(names)} {what}{'s' if len(names) != 1 else ''}"


def place_of(names: Sequence[str], total: int) -> str:
    """Return the place of parameters: the module that holds all of them, or the first names; ``total``: of how many."""
    if len(names) == total and total > 1:
        return "the whole model"
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    common = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return ".".join(common) or listed(names)


def group_and_key(name: str) -> tuple[str, str]:
    """Split the name of a setting: ``optimizer 0 group 1 weight_decay`` is a group and a key."""
    group, _, key = name.rpartition(" ")
    return group, key


def is_first(fact: Fact) -> bool:
    """Return True for the first value of a run, which is no change."""
    return fact["before"] is None and fact["kind"] != "write"
