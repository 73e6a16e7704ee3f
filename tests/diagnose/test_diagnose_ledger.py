"""Changes of the loop that the ledger names: each in a tiny real loop that does it, and loops that do not."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from diagnose_cases import Copier, found, kinds, only, train
from rest_slow import rest_slow, slow

from stabilitylab.changes import LoopChange, changes_of
from stabilitylab.changes.flags import attribute_changes
from stabilitylab.diagnose import Diagnosis

AT, STEPS = 33, 44
CHANGES = {
    "schedule_restart", "optimizer_setting", "optimizer_state", "frozen_parameters", "foreign_write", "eval_mode",
    "dtype_change", "accumulation_change", "module_setting",
}  # fmt: skip
Act = Callable[[Copier, torch.optim.Optimizer], object]


def at(act: Act, *steps: int) -> Callable[[int, Copier, torch.optim.Optimizer], None]:
    def fault(t: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
        if t in (steps or (AT,)):
            act(model, optimizer)

    return fault


def diagnosed(path: Path, fault: Any = None, **given: Any) -> Diagnosis:
    settings: dict[str, Any] = {"steps": STEPS, "layers": 2, "every": 8, **given}
    return found(train(path, fault=fault, **settings))


def setting(**values: Any) -> Act:
    return lambda model, optimizer: optimizer.param_groups[0].update(values)


def zeroed(model: Copier, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def doubled(model: Copier, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg_sq"].mul_(2)


def swapped(model: Copier, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        a, b = (model.get_parameter(f"layers.{number}.linear1.weight") for number in (0, 1))
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)


class Restored:
    """Puts the optimizer's state of step ``since`` back at step ``AT``."""

    def __init__(self, since: int) -> None:
        self.since, self.kept = since, {}

    def __call__(self, t: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
        if t == self.since:
            self.kept = copy.deepcopy(optimizer.state_dict())
        if t == AT:
            optimizer.load_state_dict(self.kept)


@pytest.mark.parametrize(
    ("fault", "kind", "title", "told"),
    [
        (
            at(lambda model, optimizer: optimizer.state.clear()),
            "optimizer_state", "optimizer state dropped", "was dropped at step 33: 29 of 29 parameters lost it",
        ),
        (
            at(zeroed),
            "optimizer_state", "moments of the optimizer set to zero",
            "exp_avg of optimizer 0 group 0 was set to zero before step 33",
        ),
        (at(doubled), "optimizer_state", "optimizer state replaced", "29 moments of 29 parameters were written"),
        (
            Restored(10),
            "optimizer_state", "optimizer state of an earlier step",
            "the step count of optimizer 0 group 0 was set back by 23 at step 33",
        ),
        (
            at(setting(betas=(0.5, 0.999))),
            "optimizer_setting", "change of an optimizer setting", "from [0.9, 0.999] to [0.5, 0.999] at step 33",
        ),
        slow(
            at(setting(eps=1e-3)),
            "optimizer_setting", "change of an optimizer setting", "from 1e-08 to 0.001",
        ),
        slow(
            at(setting(weight_decay=1.0)),
            "optimizer_setting", "change of an optimizer setting", "from 0.01 to 1.0",
        ),
        (
            at(lambda model, optimizer: model.layers[1].requires_grad_(False)),
            "frozen_parameters", "frozen parameters", "12 parameters stopped requiring gradients at step 33",
        ),
        (at(swapped), "foreign_write", "weights written by something else", "2 parameters were written between"),
        (
            at(lambda model, optimizer: model.eval()),
            "eval_mode", "eval mode while training", "the model was in eval mode from step 33 on",
        ),
        slow(
            at(lambda model, optimizer: model.get_submodule("layers.0.attn").eval()),
            "eval_mode", "eval mode while training", "2 modules were in eval mode from step 33 on: layers.0.attn",
        ),
    ],
)  # fmt: skip
def test_a_change_of_the_loop_is_named_with_its_step(
    fault: Any, kind: str, title: str, told: str, tmp_path: Path
) -> None:
    diagnosis = diagnosed(tmp_path / "run", fault)
    event = only(diagnosis, kind)
    assert (event.step, event.after, event.title) == (AT, AT - 1, title)
    assert told in event.evidence, event.evidence
    # these loops heal: what happens once is a note then, and a condition that stands is a warning
    assert event.severity == ("warning" if event.stands else "note"), event.consequence
    assert event.stands == (kind not in ("optimizer_state", "foreign_write"))
    if event.stands:
        assert diagnosis.cause.first is not None
        assert diagnosis.cause.first.kind == kind, "the change comes before what it does"
    assert kinds(diagnosis) & CHANGES == {kind}, "and no other change of the loop is named"


def test_a_dtype_that_changes_is_named(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path / "run", at(lambda model, optimizer: model.to(torch.float64)), sgd=True)
    event = only(diagnosis, "dtype_change")
    assert (event.step, event.severity) == (AT, "warning")
    assert "29 parameters changed from torch.float32 to torch.float64 at step 33" in event.evidence
    assert "`torch.float32`" in event.remedy


def test_another_number_of_micro_batches_is_named_after_the_probed_row_before(tmp_path: Path) -> None:
    event = only(diagnosed(tmp_path / "run", parts=lambda t: 4 if t < AT else 1), "accumulation_change")
    assert (event.step, event.after, event.stands) == (40, 32, True)
    assert "1 forward passes make the update at step 40, and 4 made the one recorded before" in event.evidence
    assert "Accumulate 4 micro-batches" in event.remedy


@pytest.mark.parametrize(
    "rate",
    [
        lambda t: 3e-3 * 0.5 * (1 + math.cos(math.pi * (t % 40) / 40)),  # cosine
        slow(lambda t: 3e-3 * min(1, (t % 40 + 1) / 10)),  # warm-up, then constant
    ],
)
def test_a_schedule_that_begins_again_is_named(rate: Callable[[int], float], tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path / "run", rate=rate, steps=64)
    event = only(diagnosis, "schedule_restart")
    assert (event.step, event.after) == (40, 39)
    assert "which it was at step 0: its schedule began again" in event.evidence
    assert "`last_epoch` to 39" in event.remedy


def test_a_jump_of_the_rate_is_named_without_the_metric(tmp_path: Path) -> None:
    fault = at(lambda model, optimizer: setting(lr=3e-2)(model, optimizer), *range(AT, STEPS))
    diagnosis = diagnosed(tmp_path / "run", fault)
    event = only(diagnosis, "lr_jump")
    assert (event.step, event.stands) == (AT, True)
    assert "changed from 0.003 to 0.03 at step 33 (x10)" in event.evidence
    assert event.remedy == "Set `lr` back from 0.03 to 0.003, or warm it up from there."


def thaw(model: Copier, optimizer: torch.optim.Optimizer) -> None:
    model.layers[0].requires_grad_(True)


def evaluated(t: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
    """Evaluate between updates, with averaged weights, as healthy loops do."""
    if t % 10 == 0:
        model.eval()
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
            for parameter, before in zip(model.parameters(), kept, strict=True):
                parameter.copy_(before)
        model.train()


def frozen_from_the_start(t: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
    if t == 0:
        model.embedding.requires_grad_(False)
        model.get_submodule("layers.0.attn").eval()


@pytest.mark.parametrize(
    ("fault", "given"),
    [
        (None, {}),
        slow(None, {"sgd": True}),
        (evaluated, {}),
        slow(frozen_from_the_start, {}),
        slow(None, {"rate": lambda t: 3e-3 * min(1, (t + 1) / 20)}),
        (None, {"rate": lambda t: 3e-3 * 0.5 * (1 - math.cos(math.pi * min(t, 20) / 20))}),
        slow(None, {"rate": lambda t: 3e-3 / (2 if t > 20 else 1) / (2 if t > 30 else 1)}),
        (None, {"parts": lambda t: 2}),
    ],
    ids=["adamw", "sgd", "evaluated", "frozen at start", "warm-up", "cosine warm-up", "steps down", "two parts"],
)
def test_healthy_loops_have_no_warning(fault: Any, given: Mapping[str, Any], tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path / "run", fault, **given)
    accused = [(event.kind, event.evidence) for event in diagnosis.events if event.severity != "note"]
    assert accused == []


def test_layers_that_are_thawed_are_a_note(tmp_path: Path) -> None:
    def fault(t: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
        if t in (0, AT):
            model.layers[0].requires_grad_(t == AT)

    event = only(diagnosed(tmp_path / "run", fault), "frozen_parameters")
    assert (event.step, event.severity, event.title) == (AT, "note", "unfrozen parameters")


def test_without_a_ledger_changes_are_listed_as_not_checked(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path / "run", steps=20, record="off")
    assert diagnosis.unchecked.keys() >= CHANGES
    assert diagnosis.unchecked["optimizer_state"] == "not recorded: ledger (watch(optimizer=optimizer))"
    assert "lr_jump" in diagnosis.checked, "the metric is enough for it"


READ_IN_STEPS = {"schedule_restart", "optimizer_setting", "optimizer_state", "foreign_write"}


@pytest.mark.parametrize("lr_given", [True, False])
def test_another_optimizer_that_steps_is_the_first_sign(lr_given: bool, tmp_path: Path) -> None:
    """Made anew with 50 times the rate, which no ledger of the given one and no metric shows."""
    diagnosis = diagnosed(tmp_path / "run", anew=lambda t: None if t < AT else 0.15, lr_given=lr_given, every=1)
    event = only(diagnosis, "optimizer_setting")
    assert (event.title, event.step, event.after, event.stands) == ("change of optimizer", AT, AT - 1, True)
    assert event.severity == "warning"
    assert diagnosis.cause.first is event
    assert not diagnosis.unknown, "an optimizer in whose place another one steps is a cause"
    assert "optimizer 0 has not stepped since step 33, while its parameters move" in event.evidence
    assert any(f"since row {AT}" in doubt for doubt in diagnosis.doubts)
    why = "not recorded from step 33 on (optimizer 0 did not step, while its parameters moved)"
    unread = READ_IN_STEPS | ({"lr_jump"} if not lr_given else set())
    assert {kind: diagnosis.unchecked.get(kind) for kind in unread} == dict.fromkeys(unread, why)
    assert not unread & diagnosis.checked.keys()
    assert CHANGES - unread <= diagnosis.checked.keys(), "flags are read in each row, whatever steps"
    assert diagnosis.checked.get("lr_jump") == (["lr"] if lr_given else None)


def test_an_optimizer_that_never_stepped_is_no_change_and_checks_nothing(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path / "run", anew=lambda t: 3e-3, every=1)
    assert not kinds(diagnosis) & CHANGES
    assert diagnosis.verdict == "open"
    for kind in READ_IN_STEPS:
        assert diagnosis.unchecked[kind].startswith("not recorded from step 0 on (optimizer 0 did not step"), kind


def test_an_optimizer_that_steps_again_leaves_the_steps_between_unchecked(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path / "run", anew=lambda t: 3e-3 if 10 <= t < 20 else None, every=1)
    event = only(diagnosis, "optimizer_setting")
    assert (event.step, event.until, event.stands) == (10, 20, False)
    assert "did not step from step 10 to 19, while its parameters moved" in event.evidence
    assert "at steps 10 to 19 (optimizer 0" in diagnosis.unchecked["optimizer_state"]
    assert "foreign_write" not in kinds(diagnosis), "what the other optimizer wrote"


def test_the_command_does_not_list_what_was_not_read_as_checked(run: Any, tmp_path: Path) -> None:
    path = train(tmp_path / "run", steps=STEPS, layers=2, anew=lambda t: None if t < AT else 3e-3)
    lines = run("diagnose", str(path))[1].splitlines()
    (checked,) = [line for line in lines if line.startswith("checked: ")]
    assert "optimizer state" not in checked
    assert (
        "not checked: schedule restart, change of an optimizer setting, optimizer state, weights written by something "
        "else; not recorded from step 33 on (optimizer 0 did not step, while its parameters moved)"
    ) in lines


def test_a_silence_that_a_resumed_run_told_again_is_one() -> None:
    def fact(step: int, before: bool | None, after: bool) -> dict[str, Any]:
        return {"step": step, "kind": "loop", "name": "optimizer 1 steps", "before": before, "after": after}

    told = [fact(5, True, False), fact(6, True, False), fact(9, False, True), fact(12, True, False)]
    found = [(one.place, one.step, one.until, one.from_start) for one in changes_of(told)]
    assert found == [("optimizer 1", 5, 9, False), ("optimizer 1", 12, None, False)]
    (first,) = changes_of([fact(0, None, False)])
    assert (first.kind, first.step, first.from_start) == ("optimizer", 0, True)


def test_weights_that_are_written_again_and_again_and_settings_of_a_schedule_are_one_note_or_none(
    tmp_path: Path,
) -> None:
    def fault(t: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
        evaluated(t, model, optimizer)
        optimizer.param_groups[0]["weight_decay"] = 1e-2 * (1 + t // 10)

    diagnosis = diagnosed(tmp_path / "run", fault)
    (write,) = [event for event in diagnosis.events if event.kind in CHANGES]
    assert (write.kind, write.severity, write.step) == ("foreign_write", "note", 10)
    assert "29 parameters were written before 4 updates, first between 9 and 10" in write.evidence


@pytest.mark.parametrize("act", rest_slow([zeroed, swapped, doubled], [zeroed]))
def test_digests_name_the_same_changes_and_compare_bits(act: Act, tmp_path: Path) -> None:
    kind = "foreign_write" if act is swapped else "optimizer_state"
    event = only(diagnosed(tmp_path / "run", at(act, 30), record="ledger"), kind)  # digests are made at update 30
    assert event.step == 30
    assert ("digests before and after differ" in event.evidence) == (act is not zeroed)


def rates(values: list[float]) -> list[LoopChange]:
    """The changes of a group with these rates, as a ledger has them."""
    name = {"kind": "setting", "name": "optimizer 0 group 0 lr"}
    steps = [{"step": t, **name, "before": a, "after": b} for t, (a, b) in enumerate(pairwise([None, *values]))]
    return changes_of([fact for fact in steps if fact["before"] != fact["after"]])


def restarted(values: list[float]) -> list[tuple[int, bool]]:
    return [(one.step, one.accused) for one in rates(values) if one.kind == "restart"]


def cosine(length: int) -> list[float]:
    return [0.5 * (1 + math.cos(math.pi * t / length)) for t in range(length)]


def test_a_restart_is_accused_once_and_warm_restarts_are_planned() -> None:
    assert restarted(cosine(50) + cosine(30)) == [(50, True)]
    assert restarted(cosine(50) * 3) == [(50, False), (100, False)], "even intervals"
    assert restarted(cosine(20) + cosine(40) + cosine(80)) == [(20, False), (60, False)], "intervals that double"
    assert restarted(cosine(50)) == []
    assert restarted([1.0] * 20 + [0.1] * 20) == [], "a fall"
    assert restarted(cosine(100)[:60] + cosine(100)[30:60]) == [(60, True)], "a scheduler of step 30 was loaded"


def test_a_rate_that_was_taken_back_does_not_stand() -> None:
    (jump,) = [one for one in rates([1.0] * 5 + [30.0] * 3 + [1.0] * 5) if one.kind == "rate"]
    assert (jump.step, jump.until, jump.stands, jump.factor) == (5, 8, False, 30.0)
    (lasting,) = [one for one in rates([1.0] * 5 + [30.0] * 8) if one.kind == "rate"]
    assert lasting.stands
    assert lasting.remedy == "Set `lr` back from 30 to 1, or warm it up from there."


@pytest.mark.parametrize(("told", "size"), [("nan", ""), ("inf", " (xinf)")])
def test_a_rate_that_is_not_finite_is_accused(told: str, size: str) -> None:
    """A ledger writes it as text. The rate of before is a note."""
    name = "optimizer 0 group 0 lr"
    pairs = {0: (None, 1e-3), 20: (1e-3, told), 24: (told, 1e-3)}
    facts = [
        {"step": step, "kind": "setting", "name": name, "before": before, "after": after}
        for step, (before, after) in pairs.items()
    ]
    there, back = changes_of(facts)
    assert (there.kind, there.step, there.accused, there.until) == ("rate", 20, True, 24)
    assert there.sentence == f"the learning rate of optimizer 0 group 0 changed from 0.001 to {told} at step 20{size}"
    assert (back.kind, back.step, back.accused) == ("fall", 24, False)


def test_a_number_of_a_module_is_a_note_unless_it_is_its_own_affair() -> None:
    facts = [
        {"step": step, "kind": "attribute", "name": name, "before": before, "after": after}
        for name in ("layers.0.dropout.p", "schedule._value")
        for step, before, after in ((0, None, 0.5), (7, 0.5, 0.1))
    ]
    [change] = attribute_changes(facts)
    assert change.sentence == "layers.0.dropout.p changed from 0.5 to 0.1 at step 7"
    assert not change.accused
