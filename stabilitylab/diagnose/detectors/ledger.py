"""Changes of the loop that the ledger of updates names exactly: settings, the optimizer's state, flags, writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...changes import Kind, LoopChange
from ..changed import ALWAYS, BETWEEN, SETTING, change_events
from ..events import LEDGER, Event, detector
from ..evidence import Evidence

READS = {LEDGER: ALWAYS}
STATE: tuple[Kind, ...] = ("reset", "replaced", "write")


def is_rare(change: LoopChange) -> bool:
    """Return False for what changes again and again: it is a schedule, or a counter."""
    return change.is_rare


@detector(
    "schedule_restart",
    "schedule restart",
    reads=READS,
    role="setting",
    explains=("update_jump",),
    rule=(
        "The learning rate of a group jumps to a former value and continues as it did from there, or jumps back to "
        "its first value. It is a note if restarts come at even intervals, or at intervals that grow by a constant "
        "factor"
    ),
    remedy="Restore the scheduler's state at a resume (`scheduler.load_state_dict`), or set its `last_epoch`.",
    names_cause=True,
    in_steps=True,
)
def schedule_restart(evidence: Evidence) -> Iterator[Event]:
    yield from change_events(evidence, "schedule_restart", "schedule restart", SETTING, ("restart",))


@detector(
    "optimizer_setting",
    "change of an optimizer setting",
    reads=READS,
    role="setting",
    explains=("update_jump",),
    rule=(
        "A setting of a group other than the learning rate changes: betas, eps, weight decay, momentum or another. "
        "Three or more changes do not count, since a schedule makes them. Change of optimizer: one that was given to "
        "`watch` steps no more, while its parameters move, by autograd's count of writes"
    ),
    remedy="Set it back, or change it by a schedule.",
    names_cause=True,
    in_steps=True,
)
def optimizer_setting(evidence: Evidence) -> Iterator[Event]:
    """Yield changes of settings, and optimizers in whose place another one steps. An optimizer that has never stepped
    is no change: it was the wrong one from the start."""

    def counts(change: LoopChange) -> bool:
        return change.is_rare and not change.from_start

    title = "change of an optimizer setting"
    yield from change_events(evidence, "optimizer_setting", title, SETTING, ("optimizer", "setting"), counts)


@detector(
    "optimizer_state",
    "optimizer state",
    reads=READS,
    role="setting",
    explains=("update_jump",),
    rule=(
        "Parameters lose their state; the step count falls, or rises by more than one; more than 90 % of the "
        "moments are zeros where less than half were before; or moments are written between two steps of the optimizer"
    ),
    remedy="Keep the optimizer, or load its state from the same step as the weights, and warm `lr` up again.",
    names_cause=True,
    in_steps=True,
)
def optimizer_state(evidence: Evidence) -> Iterator[Event]:
    """Yield losses and replacements of the state. A state that was dropped and comes back with a count from 0 is one
    event."""

    def is_state(change: LoopChange) -> bool:
        return change.kind != "write" or change.of_moments

    yield from change_events(evidence, "optimizer_state", "optimizer state replaced", SETTING, STATE, is_state)


@detector(
    "frozen_parameters",
    "frozen parameters",
    reads=READS,
    role="setting",
    explains=("dead_layer",),
    rule=("`requires_grad` of parameters changes from True to False. It is a note if it changes from False to True"),
    remedy="Call `requires_grad_(True)` on them, or leave them out of the optimizer on purpose.",
    names_cause=True,
)
def frozen_parameters(evidence: Evidence) -> Iterator[Event]:
    yield from change_events(evidence, "frozen_parameters", "frozen parameters", BETWEEN, ("frozen",))
    yield from change_events(evidence, "frozen_parameters", "unfrozen parameters", BETWEEN, ("thawed",))


@detector(
    "foreign_write",
    "weights written by something else",
    reads=READS,
    role="setting",
    explains=("weight_jump", "update_jump", "ln_growth"),
    rule=(
        "A parameter is written between two steps of the optimizer, by autograd's count, and no optimizer did it. It "
        "is a note if it is written more than twice, as by an evaluation with averaged weights"
    ),
    remedy="Find the code that writes to the weights between two updates, such as `load_state_dict`.",
    names_cause=True,
    in_steps=True,
)
def foreign_write(evidence: Evidence) -> Iterator[Event]:
    def is_weights(change: LoopChange) -> bool:
        return not change.of_moments

    title = "weights written by something else"
    yield from change_events(evidence, "foreign_write", title, BETWEEN, ("write",), is_weights)


@detector(
    "eval_mode",
    "eval mode while training",
    reads=READS,
    role="setting",
    rule=(
        "`training` of the model or of a module changes to False and is False at an update. It is a note if it was "
        "False from the start"
    ),
    remedy="Call `model.train()` after each evaluation, before the next forward pass.",
    names_cause=True,
)
def eval_mode(evidence: Evidence) -> Iterator[Event]:
    yield from change_events(evidence, "eval_mode", "eval mode while training", BETWEEN, ("mode",))


@detector(
    "dtype_change",
    "change of dtype",
    reads=READS,
    role="setting",
    rule="The dtype of parameters changes between two updates",
    remedy="Keep weights in their dtype, and use `torch.autocast` for a lower precision.",
    names_cause=True,
)
def dtype_change(evidence: Evidence) -> Iterator[Event]:
    yield from change_events(evidence, "dtype_change", "change of dtype", BETWEEN, ("dtype",))


@detector(
    "accumulation_change",
    "change of accumulation",
    reads=READS,
    role="setting",
    explains=("exploding_gradient", "update_jump"),
    rule=(
        "An update is made of another number of forward passes than in the probed row before. It is a note if the "
        "loss goes on falling, as with a larger batch"
    ),
    remedy="Accumulate as many micro-batches as before, or divide each loss by their number.",
    names_cause=True,
)
def accumulation_change(evidence: Evidence) -> Iterator[Event]:
    """Yield changes of the number of micro-batches. The number is known in probed rows only, so a change lies between
    two probed rows. A larger batch is no trouble by itself: the loss decides."""
    for event in change_events(evidence, "accumulation_change", "change of accumulation", BETWEEN, ("accumulation",)):
        yield replace(event, after=_probed_before(evidence, event.step), usual=True)


@detector(
    "module_setting",
    "change of a number of a module",
    reads=READS,
    role="setting",
    rule=(
        "A number among the attributes of a module, such as `p` of a dropout, changes at most twice. It is always a "
        "note"
    ),
    remedy="Look for what sets it during training.",
    names_cause=True,
)
def module_setting(evidence: Evidence) -> Iterator[Event]:
    title = "change of a number of a module"
    yield from change_events(evidence, "module_setting", title, BETWEEN, ("attribute",), is_rare)


def _probed_before(evidence: Evidence, step: int) -> int | None:
    tables = (evidence.grid(name) for name in evidence.run.tables if evidence.run.table(name).phase == "forward")
    steps = [int(at) for grid in tables if grid is not None for at in grid.steps if at < step]
    return max(steps, default=None)
