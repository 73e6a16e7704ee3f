"""Changes of the optimizer's state and of weights that no optimizer made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from ..errors import listed
from .change import BEHIND, LEDGER, WITH_STATE, ZEROS_IN, Fact, LoopChange, counted, is_first, place_of

EMPTY, FILLED = 0.9, 0.5  # moments are set to zero if their share of zeros goes from below FILLED to above EMPTY
FEW = 2  # weights that are written more often are written as a matter of course, as by averaged weights
WARM = "and warm `lr` up again"


def reset_changes(facts: Sequence[Fact]) -> Iterator[LoopChange]:
    """Yield states that were dropped, set back to an earlier step, or set to zero."""
    kept = f"Keep the optimizer, or restore its state with `optimizer.load_state_dict` at a restart, {WARM}."
    for fact in facts:
        if fact["kind"] != "state":
            continue
        name, step, before, after = fact["name"], fact["step"], fact["before"], fact["after"]
        if name.endswith(WITH_STATE) and not is_first(fact) and after < before:
            group = name.removesuffix(f" {WITH_STATE}")
            said = f"the state of {group} was dropped at step {step}: {before - after} of {before} parameters lost it"
            yield LoopChange("reset", group, step, said, remedy=kept, title="optimizer state dropped")
        elif name.endswith(BEHIND) and not is_first(fact) and after > before + 1:
            group = name.removesuffix(f" {BEHIND}")
            if not _dropped(facts, group, step):
                said = f"the step count of {group} was set back by {after - before} at step {step}"
                advice = f"Load the optimizer's state from the same step as the weights, {WARM}."
                yield LoopChange("reset", group, step, said, remedy=advice, title="optimizer state of an earlier step")
        elif ZEROS_IN in name and after > EMPTY and _was_filled(facts, fact):
            group, _, moment = name.partition(f" {ZEROS_IN} ")
            said = f"{moment} of {group} was set to zero before step {step}"
            share = f"share of zeros {before:.0%}, then" if before is not None else "moments were written; zeros:"
            advice = f"Leave the moments as they are, {WARM} where they are reset on purpose."
            title = "moments of the optimizer set to zero"
            yield LoopChange("reset", group, step, said, f"{share} {after:.0%}", advice, title=title)


def replaced_changes(facts: Sequence[Fact], resets: Collection[int]) -> Iterator[LoopChange]:
    """Yield states that are those of a later step, and moments that were written or replaced, except at the steps
    ``resets``, where a reset says so. A shift of the count by one is a step that was skipped or made twice."""
    advice = f"Load the optimizer's state from the same step as the weights, {WARM}."
    forward: set[int] = set()
    for fact in facts:
        name = fact["name"]
        if fact["kind"] != "state" or is_first(fact) or not name.endswith(BEHIND):
            continue
        if fact["after"] < fact["before"] - 1 and fact["step"] not in resets:
            group, ahead = name.removesuffix(f" {BEHIND}"), fact["before"] - fact["after"]
            said = f"the step count of {group} went forward by {ahead} at step {fact['step']}"
            forward.add(fact["step"])
            title = "optimizer state of a later step"
            yield LoopChange("replaced", group, fact["step"], said, remedy=advice, title=title)
    for step, names in _written_at(facts, moments=True).items():
        if step in resets or step in forward:
            continue
        whose = list(dict.fromkeys(name.partition(" of ")[2] for name in names))
        said = (
            f"{counted(names, 'moment')} of {counted(whose, 'parameter')} {_were(names)} written or replaced "
            f"{between(step)}, which no optimizer did: {listed(names)}"
        )
        yield LoopChange("replaced", place_of(whose, 0), step, said, remedy=advice, title="optimizer state replaced")


def write_changes(facts: Sequence[Fact], parameters: int, resets: Collection[int]) -> Iterator[LoopChange]:
    """Yield writes to tensors between two steps of the optimizer: those of which digests differ, except at the steps
    ``resets``."""
    by_step: dict[int, list[str]] = defaultdict(list)
    for fact in facts:
        if fact["kind"] == "write" and fact["before"] is not None and fact["step"] not in resets:
            by_step[fact["step"]].append(fact["name"])
    for step, names in by_step.items():
        yield written(names, step, parameters, "digests before and after differ")


def counted_writes(facts: Sequence[Fact], parameters: int) -> Iterator[LoopChange]:
    """Yield writes to parameters that autograd counted, of which no digest was compared. Weights that are written more
    than FEW times are one change, not accused: an evaluation with averaged weights writes them and puts them back."""
    found = _written_at(facts, moments=False)
    times: dict[str, int] = defaultdict(int)
    for names in found.values():
        for name in names:
            times[name] += 1
    often = [(step, [name for name in names if times[name] > FEW]) for step, names in found.items()]
    steps = [step for step, names in often if names]
    if steps:
        names = list(dict.fromkeys(name for _, own in often for name in own))
        again = f"{counted(steps, 'update')}, first between {steps[0] - 1} and {steps[0]}"
        yield _counted_write(names, steps[0], parameters, f"before {again}", accused=False)
    for step, names in found.items():
        if rare := [name for name in names if times[name] <= FEW]:
            yield _counted_write(rare, step, parameters, between(step), accused=True)


def _counted_write(names: Sequence[str], step: int, parameters: int, when: str, accused: bool) -> LoopChange:
    said = f"{counted(names, 'parameter')} {_were(names)} written {when}, which no optimizer did: {listed(names)}"
    one = written(names, step, parameters, f"{LEDGER}, which counts writes and does not compare bits")
    return replace(one, sentence=said, accused=accused, is_compared=False)


def between(step: int) -> str:
    """Return in words the time in which the ledger looks for writes: it looks as the optimizer begins its step."""
    return f"between the optimizer's steps of the updates {step - 1} and {step}"


def written(names: Sequence[str], step: int, total: int, evidence: str) -> LoopChange:
    """Return the change that tensors were written between the optimizer's steps of the updates ``step`` - 1 and
    ``step``."""
    said = f"{counted(names, 'tensor')} changed {between(step)}, which no optimizer did: "
    told = listed(names)
    advice = f"Find the code that writes to {told} between two updates, such as `load_state_dict` or an initialisation."
    moments = all(" of " in name for name in names)
    return LoopChange("write", place_of(names, total), step, said + told, evidence, advice, of_moments=moments)


def _written_at(facts: Sequence[Fact], moments: bool) -> dict[int, list[str]]:
    """Map steps to the tensors that were written before them, by autograd's count alone."""
    found: dict[int, list[str]] = defaultdict(list)
    for fact in facts:
        if fact["kind"] == "write" and fact["before"] is None and (" of " in fact["name"]) == moments:
            found[fact["step"]].append(fact["name"])
    return found


def _was_filled(facts: Sequence[Fact], fact: Fact) -> bool:
    """Return True if the moments were filled before: by their share, or, if that was not known, as they were written at
    this step."""
    if fact["before"] is not None:
        return fact["before"] < FILLED
    return fact["step"] in _written_at(facts, moments=True)


def _dropped(facts: Sequence[Fact], group: str, step: int) -> bool:
    name = f"{group} {WITH_STATE}"
    return any(f["name"] == name and step - 1 <= f["step"] <= step and not is_first(f) for f in facts)


def _were(names: Sequence[str]) -> str:
    return "was" if len(names) == 1 else "were"
