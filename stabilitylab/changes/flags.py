"""Changes of flags: parameters that are frozen or thawed, eval mode, dtypes, numbers of modules, micro-batches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import listed
from .change import FORWARDS, Fact, LoopChange, counted, is_first, place_of

FEW = 2  # a number of a module that changes more often is a schedule, or a counter


def flag_changes(facts: Sequence[Fact], parameters: int) -> Iterator[LoopChange]:
    """Yield changes of flags; ``parameters``: how many the model has, 0 if that is not known."""
    flags: dict[str, list[Fact]] = defaultdict(list)
    for fact in facts:
        if fact["kind"] == "flag":
            flags[fact["name"]].append(fact)
    frozen, thawed, silent, typed = (_by_step(facts, *asked) for asked in (
        ("requires_grad", False), ("requires_grad", True), ("training", False), ("dtype", None),
    ))  # fmt: skip
    for step, names in frozen.items():
        told = listed(names)
        yield LoopChange(
            "frozen",
            place_of(names, parameters),
            step,
            f"{counted(names, 'parameter')} stopped requiring gradients at step {step}: {told}",
            remedy=f"Call `requires_grad_(True)` on {told}, or leave them out of the optimizer on purpose.",
            until=_undone(flags, "requires_grad", names, step),
            lasts=True,
        )
    for step, names in thawed.items():
        told = f"{counted(names, 'parameter')} began to require gradients at step {step}: {listed(names)}"
        advice = "Do nothing if layers are meant to be unfrozen here; else call `requires_grad_(False)` on them."
        yield LoopChange("thawed", place_of(names, parameters), step, told, remedy=advice, accused=False)
    for step, names in silent.items():
        whole = "the model" in names
        were = "was" if whole or len(names) == 1 else "were"
        said = f"{'the model' if whole else counted(names, 'module')} {were} in eval mode from step {step} on"
        yield LoopChange(
            "mode",
            "the model" if whole else place_of(names, 0),
            step,
            said + ("" if whole else f": {listed(names)}"),
            remedy="Call `model.train()` after each evaluation, before the next forward pass.",
            until=_undone(flags, "training", names, step),
            lasts=True,
        )
    yield from _from_the_start(facts)
    for step, names in typed.items():
        before, after = next((f["before"], f["after"]) for f in flags[f"dtype of {names[0]}"] if f["step"] == step)
        yield LoopChange(
            "dtype",
            place_of(names, parameters),
            step,
            f"{counted(names, 'parameter')} changed from {before} to {after} at step {step}: {listed(names)}",
            remedy=f"Keep weights in `{before}`, and use `torch.autocast` for a lower precision.",
            until=_undone(flags, "dtype", names, step, before),
            lasts=True,
        )


def _from_the_start(facts: Sequence[Fact]) -> Iterator[LoopChange]:
    """Yield the eval mode of a model whose first recorded update had it already."""
    for fact in facts:
        if fact["name"] == "training of the model" and is_first(fact) and fact["after"] is False:
            said = f"the model is in eval mode at its first recorded update, step {fact['step']}: it has no dropout"
            advice = "Call `model.train()` before the loop, unless you leave dropout out on purpose."
            yield LoopChange("mode", "the model", fact["step"], said, remedy=advice, accused=False, from_start=True)


def attribute_changes(facts: Sequence[Fact]) -> Iterator[LoopChange]:
    """Yield changes of numbers of modules, each a note. A name with a leading underscore is the module's own affair,
    such as a value that it keeps."""
    found = [fact for fact in facts if fact["kind"] == "attribute"]
    times = Counter(fact["name"] for fact in found)
    for fact in found:
        name = fact["name"]
        if not is_first(fact) and not name.rpartition(".")[2].startswith("_"):
            said = f"{name} changed from {fact['before']} to {fact['after']} at step {fact['step']}"
            advice, rare = f"Look for what sets `{name}` during training.", times[name] <= FEW
            yield LoopChange("attribute", name, fact["step"], said, remedy=advice, accused=False, is_rare=rare)


def accumulation_changes(facts: Sequence[Fact]) -> Iterator[LoopChange]:
    """Yield changes of the number of forward passes that make an update: micro-batches, where each has one."""
    found = [fact for fact in facts if fact["kind"] == "loop" and fact["name"] == FORWARDS and not is_first(fact)]
    for fact in found:
        step, before, after = fact["step"], fact["before"], fact["after"]
        later = (f["step"] for f in found if f["step"] > step and f["after"] == before)
        yield LoopChange(
            "accumulation",
            "the loop",
            step,
            f"{after} forward passes make the update at step {step}, and {before} made the one recorded before",
            remedy=f"Accumulate {before} micro-batches again, or divide each loss by their present number, {after}.",
            until=next(later, None),
            lasts=True,
        )


def _by_step(facts: Sequence[Fact], flag: str, wanted: Any) -> dict[int, list[str]]:
    """Map each step to the names whose flag changed there, to ``wanted`` if that is not None."""
    found: dict[int, list[str]] = defaultdict(list)
    for fact in facts:
        what, _, whose = fact["name"].partition(" of ")
        if fact["kind"] == "flag" and what == flag and not is_first(fact) and wanted in (None, fact["after"]):
            found[fact["step"]].append(whose)
    return found


def _undone(flags: dict[str, list[Fact]], what: str, names: Sequence[str], step: int, usual: Any = True) -> int | None:
    """Return the step at which all of these flags are ``usual`` again; None if one of them never is."""
    ends = []
    for name in names:
        later = [f["step"] for f in flags[f"{what} of {name}"] if f["step"] > step and f["after"] == usual]
        if not later:
            return None
        ends.append(later[0])
    return max(ends)
