"""The audit names each planted fault by kind, place and update, and accuses no healthy loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import faults
import numpy as np
import pytest
import torch
from faults import FIRST
from loops import LENGTH, Batch, Loop, Tiny, batch, loss_fn, recorder, train
from rest_slow import rest_slow, slow
from torch import Tensor

import stabilitylab as sl
from stabilitylab.explain import black_box
from stabilitylab.explain.audit import Auditor, AuditResult, differing_state, moments_of
from stabilitylab.explain.derivatives import derivative_findings, derivatives
from stabilitylab.explain.facts import fact_findings
from stabilitylab.explain.findings import KINDS, REMEDIES, AuditFinding
from stabilitylab.explain.flight import Flight
from stabilitylab.explain.judge import Judge, Scores
from stabilitylab.explain.recorder import Recorder
from stabilitylab.explain.replay import DeclaredLoop, UpdateReplay
from stabilitylab.explain.states import captured
from stabilitylab.store.identity import Identity


def recorded(
    kind: type[Loop], path: Path, given: Recorder | None = None, steps: int = 28
) -> tuple[Flight, DeclaredLoop]:
    """The flight of a run with a fault, and a fresh loop that does what is declared."""
    given = given or recorder()
    train(kind(), path / "run", steps, given)
    fresh = kind() if kind is faults.WrongBackward else Loop()  # a loop with its hooks and patches would do the same
    assert given.flight is not None
    return given.flight, DeclaredLoop.of(given.flight, fresh.model, fresh.optimizer, given.loss_fn, given)


def audited(kind: type[Loop], path: Path, given: Recorder | None = None) -> AuditResult:
    flight, loop = recorded(kind, path, given)
    return Auditor(flight, loop).run()


@pytest.mark.parametrize(
    ("kind", "found", "place", "steps"),
    [
        (faults.DoubledRate, "rate", "optimizer 0 group 0", {FIRST}),
        slow(faults.ChangedBeta, "setting", "optimizer 0 group 0 betas", {FIRST}),
        (faults.ResetMoments, "optimizer reset", "optimizer 0 group 0", {FIRST}),
        (faults.FlippedGradient, "gradient sign", "blocks.1.up.weight", {FIRST}),
        (faults.NoZeroGrad, "gradients added", "the whole model", {FIRST + 1}),
        slow(faults.FrozenLayer, "frozen", "blocks.0", {FIRST}),
        (faults.WrittenWeight, "state written", "blocks.0.out.weight", {FIRST}),
        slow(faults.DropoutInEval, "mode", "blocks", {FIRST}),
        (faults.OtherForward, "forward", "blocks.1.down", {FIRST}),
        (faults.DoubledUpdate, "update scale", "the whole model", {FIRST}),
    ],
)
def test_a_planted_fault_is_named(kind: type[Loop], found: str, place: str, steps: set[int], tmp_path: Path) -> None:
    """The faults begin at FIRST = 22; a snapshot is taken at 24, and sketches at each fourth update."""
    result = audited(kind, tmp_path)
    assert result.accused, "nothing was found"
    kinds = [(one.kind, one.place) for one in result.accused]
    assert (found, place) in kinds, [str(one) for one in result.findings]
    one = next(one for one in result.accused if (one.kind, one.place) == (found, place))
    assert one.step in steps
    assert {kind for kind, _ in kinds} <= {found}, [str(one) for one in result.findings]


@pytest.mark.parametrize(
    ("at", "when"),
    [
        (24, "in update 24, after its backward pass and before its optimizer step"),  # with a snapshot and sketches
        (20, "in update 20, after its backward pass and before its optimizer step"),  # with sketches
        (22, "after the forward pass of update 22 and before its optimizer step"),  # its loss alone is recorded
    ],
)
def test_a_write_behind_the_backward_is_one_finding_that_says_when(at: int, when: str, tmp_path: Path) -> None:
    class WrittenLate(Loop):
        def gradients(self, t: int) -> None:
            if t == at:
                self.model.blocks[0].out.weight.detach().mul_(30)

    (one,) = audited(WrittenLate, tmp_path).findings
    assert (one.kind, one.place, one.step) == ("state written", "blocks.0.out.weight", at)
    assert one.sentence.startswith(f"1 tensor changed {when}, which no optimizer did")


@pytest.mark.parametrize("at", [24, 22])
def test_a_write_before_the_forward_keeps_its_general_time(at: int, tmp_path: Path) -> None:
    class WrittenEarly(Loop):
        def between(self, t: int) -> None:
            if t == at:
                self.model.blocks[0].out.weight.detach().mul_(30)

    (one,) = audited(WrittenEarly, tmp_path).findings
    assert (one.kind, one.step) == ("state written", at)
    assert f"between the optimizer's steps of the updates {at - 1} and {at}" in one.sentence


def test_moments_that_are_written_before_the_step_are_one_finding(tmp_path: Path) -> None:
    class WrittenMoments(Loop):
        def handed(self, t: int) -> None:
            if t == 24:
                self.optimizer.state[self.model.blocks[0].out.weight]["exp_avg"].mul_(30)

    (one,) = audited(WrittenMoments, tmp_path).findings
    assert (one.kind, one.step) == ("state written", 24)
    assert "between the optimizer's steps of the updates 23 and 24" in one.sentence


def test_a_clipping_that_was_not_declared_is_said_and_not_accused(tmp_path: Path) -> None:
    result = audited(faults.HiddenClipping, tmp_path)
    assert [one.kind for one in result.findings if one.kind != "unexplained"] == ["clipping"]
    assert not [one for one in result.accused if one.kind != "unexplained"]
    declared = recorder(clip=0.1)
    flight, loop = recorded(faults.HiddenClipping, tmp_path / "declared", declared, steps=40)
    replay = UpdateReplay(flight, loop)
    with loop.kept():
        losses = replay.losses(24, 32)
    assert losses == [flight.updates[step].loss for step in range(24, 32)], "the declared clipping is replayed"


def test_one_update_without_a_sketch_is_named_by_hypothesis(tmp_path: Path) -> None:
    found = audited(faults.FlippedOnce, tmp_path).accused
    assert [(one.kind, one.step) for one in found] == [("gradient sign", FIRST + 3)]


def test_without_a_recorded_loss_no_hypothesis_is_confirmed(tmp_path: Path) -> None:
    """Gradients of one update without a sketch were 7 times as large, which no hypothesis says."""

    class SevenTimes(Loop):
        def handed(self, t: int) -> None:
            if t == 11:
                for parameter in self.model.parameters():
                    parameter.grad.mul_(7)

    flight, loop = recorded(SevenTimes, tmp_path, recorder(every=100), steps=16)
    for update in flight.updates.values():
        update.loss = None
    (found,) = Auditor(flight, loop).run().findings
    assert (found.kind, found.place) == ("unexplained", "the whole model"), str(found)


@pytest.mark.parametrize("kind", rest_slow([faults.Healthy, faults.Warmed, faults.Evaluates], [faults.Evaluates]))
def test_a_healthy_loop_is_equal_in_every_bit_and_has_no_finding(kind: type[Loop], tmp_path: Path) -> None:
    flight, loop = recorded(kind, tmp_path, steps=36)
    result = Auditor(flight, loop).run()
    assert result.findings == []
    assert (result.replayed, result.equal) == (len(flight.updates), len(flight.updates))
    assert result.full == 9
    assert Judge(flight, loop).findings() == ([], [])
    assert derivative_findings(flight, loop) == ([], [])


def test_a_declared_schedule_is_replayed_and_a_second_writer_of_the_rate_is_found(tmp_path: Path) -> None:
    class Scheduled(Loop):
        def __init__(self) -> None:
            super().__init__()
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, 9)

        def after(self, t: int) -> None:
            self.scheduler.step()

    class Twice(Scheduled):
        def between(self, t: int) -> None:
            if t == FIRST:
                self.optimizer.param_groups[0]["lr"] *= 3

    for kind, expected in ((Scheduled, []), (Twice, [("schedule", FIRST)])):
        loop, fresh = kind(), Scheduled()
        given = recorder(scheduler=loop.scheduler)
        train(loop, tmp_path / kind.__name__, 40, given)
        own = DeclaredLoop.of(given.flight, fresh.model, fresh.optimizer, given.loss_fn, scheduler=fresh.scheduler)
        found = Auditor(given.flight, own).run().accused
        assert [(one.kind, one.step) for one in found] == expected, [str(one) for one in found]


def data_findings(kind: type[Loop], path: Path) -> list[AuditFinding]:
    _, loop = recorded(kind, path, steps=60)
    found, unjudged = Judge(black_box.chosen(path / "run", Identity()), loop).findings()
    assert unjudged == []
    return found


def test_rolled_labels_are_named_with_their_first_and_last_update(tmp_path: Path) -> None:
    (one,) = data_findings(faults.RolledLabels, tmp_path)
    assert (one.kind, one.step, one.until, one.factor) == ("labels", FIRST, FIRST + 5, 1)


def test_a_bad_batch_is_named_with_its_update(tmp_path: Path) -> None:
    (one,) = data_findings(faults.BadBatch, tmp_path)
    assert (one.kind, one.step, one.until) == ("bad batch", FIRST, FIRST)


def test_a_backward_that_is_wrong_from_the_start_is_found_without_a_past(tmp_path: Path) -> None:
    flight, loop = recorded(faults.WrongBackward, tmp_path)
    assert Auditor(flight, loop).run().findings == [], "a replay does the same"
    (one,), unchecked = derivative_findings(flight, loop)
    assert (one.kind, one.place, unchecked) == ("derivative", "blocks.0", [])


def test_a_backward_that_is_declared_to_differ_is_not_accused(tmp_path: Path) -> None:
    flight, loop = recorded(faults.WrongBackward, tmp_path)
    loop.model.blocks[0].exact_gradient = False
    said = "derivatives were not checked: backward differs from the gradient by design in blocks.0"
    assert derivative_findings(flight, loop) == ([], [said])


def test_labels_that_a_roll_makes_fit_better_in_every_batch_are_not_accused(tmp_path: Path) -> None:
    """As of a model that predicts its input: the ratios of the scores lie together, and one of them is below .85."""

    class InputPredicted(Judge):
        def scores(self) -> Scores:
            own = super().scores()
            ratios = np.linspace(0.86, 0.855, len(own.numbers))
            ratios[-3] = 0.8485
            return replace(own, rolled={-1: own.rolled[0], 0: own.rolled[0], 1: [*(ratios * own.rolled[0])]})

    assert InputPredicted(*recorded(faults.Healthy, tmp_path)).findings() == ([], [])


def test_derivatives_agree_with_a_quadratic(tmp_path: Path) -> None:
    """L = ||W x||^2 / 2 has the gradient W x x^T: along d its derivative is <W x x^T, d>."""
    flight, loop = recorded(faults.Healthy, tmp_path, steps=9)
    found = derivatives(flight, loop)
    assert {one.group for one in found} >= {"embed", "places", "blocks.0", "blocks.1", "norm", "head"}
    assert all(one.backward == pytest.approx(one.difference, rel=1e-5, abs=1e-9) for one in found)
    along = [one for one in found if one.direction == "gradient"]
    assert all(one.backward > 0 for one in along), "along itself a gradient has its own norm"


def test_derivatives_of_lost_weights_are_not_checked_and_the_reason_is_said(tmp_path: Path) -> None:
    flight, loop = recorded(faults.Healthy, tmp_path, steps=9)
    flight.snapshots[max(flight.snapshots)]["tensors"]["head.weight"][0, 0] = torch.nan
    said = "derivatives were not checked in float64: the loss of the recorded weights is not finite"
    assert derivative_findings(flight, loop) == ([], [said])


def test_objects_that_were_given_are_left_as_they_were(tmp_path: Path) -> None:
    flight, loop = recorded(faults.DoubledRate, tmp_path)
    before = [parameter.clone() for parameter in loop.model.parameters()]
    rng = torch.get_rng_state()
    Auditor(flight, loop).run()
    Judge(flight, loop).findings()
    derivative_findings(flight, loop)
    assert all(torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))
    assert torch.equal(rng, torch.get_rng_state())
    assert loop.optimizers[0].state == {}


class Stateful(Tiny):
    """Its blocks share a buffer; it draws from a generator of numpy, and keeps its last output and its length."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        shared = torch.ones(LENGTH, 1)
        for block in self.blocks:
            block.register_buffer("rope", shared)
        self.random, self.last, self.seen = np.random.default_rng(0), None, []

    def forward(self, tokens: Tensor) -> Tensor:
        self.random.random()
        self.last = super().forward(tokens) * self.blocks[1].rope
        self.seen.append(len(tokens))
        return self.last


def test_buffers_attributes_and_generators_of_the_model_are_left_as_they_were(tmp_path: Path) -> None:
    flight, _ = recorded(faults.Healthy, tmp_path, steps=9)
    model = Stateful()
    own = DeclaredLoop(model, loss_fn, (torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),))
    first, weight = model.random.bit_generator.state, model.head.weight.data_ptr()
    Auditor(flight, own).run()
    Judge(flight, own).findings()
    assert derivatives(flight, own)
    one, other = (block.rope for block in model.blocks)
    assert one is other
    assert one.dtype == model.head.weight.dtype == torch.float32
    assert model.head.weight.data_ptr() == weight
    assert model.random.bit_generator.state == first
    assert (model.last, model.seen) == (None, [])


class Remembering(Tiny):
    """Adds a little of the last pass's mean to its output: an attribute of another shape after each batch."""

    last: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        found = super().forward(tokens)
        if self.last is not None:
            found = found + 0.01 * self.last.mean()
        self.last = found.detach()
        return found


def test_an_attribute_that_has_another_shape_after_each_batch_is_replayed(tmp_path: Path) -> None:
    class Uneven(Loop):
        def __init__(self) -> None:
            super().__init__()
            self.model = Remembering()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

        def batch(self, t: int) -> Batch:
            return {name: tensor[: 3 + t % 2] for name, tensor in batch(t).items()}

    given = recorder(keep=(1,), every=7)
    train(Uneven(), tmp_path / "run", 24, given)
    fresh, flight = Uneven(), given.flight
    assert flight is not None
    assert sorted(flight.snapshots) == [14, 21]
    result = Auditor(flight, DeclaredLoop.of(flight, fresh.model, fresh.optimizer, loss_fn, given)).run()
    assert (result.findings, result.replayed, result.equal, result.parted) == ([], 10, 10, [])
    assert fresh.model.last is None


class Counting(torch.optim.SGD):
    """Divides its rate by the number of its steps, which is an entry of its state that belongs to no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        count = self.state.setdefault("all", {"steps": 0})
        count["steps"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] / count["steps"])


def test_state_of_an_optimizer_that_belongs_to_no_parameter_is_replayed(tmp_path: Path) -> None:
    class Counted(Loop):
        def __init__(self) -> None:
            super().__init__()
            self.optimizer = Counting(self.model.parameters(), lr=0.1)

    given = recorder()
    train(Counted(), tmp_path / "run", 12, given)
    fresh = Counted()
    flight = black_box.load(*black_box.found(tmp_path / "run"), sl.Run.open(tmp_path / "run").identity)
    result = Auditor(flight, DeclaredLoop.of(flight, fresh.model, fresh.optimizer, loss_fn, given)).run()
    assert (result.findings, result.equal, result.parted) == ([], 12, [])
    assert dict(fresh.optimizer.state) == {}


def test_a_rate_is_accused_above_all_that_it_was_and_else_a_note() -> None:
    """Rates of 60 updates: a ramp, a jump up by 2, a fall by 10, a return, a jump above all before."""

    def found(rates: list[float]) -> list[tuple[int, bool]]:
        flight = Flight([], {"scheduler": None})
        for step in range(1, len(rates)):
            if rates[step] != rates[step - 1]:
                fact = {"step": step, "kind": "setting", "name": "optimizer 0 group 0 lr"}
                flight.facts.append({**fact, "before": rates[step - 1], "after": rates[step]})
        return [(one.step, one.accused) for one in fact_findings(flight)]

    ramp = [0.1 * (t + 1) for t in range(10)]
    assert found(ramp + [1.0] * 5) == []
    assert found([*ramp, *[1.0] * 5, *[2.0] * 5, *[0.2] * 5, *[2.0] * 5, *[4.0] * 5]) == [
        (15, True), (20, False), (25, False), (30, True),
    ]  # fmt: skip
    assert found([1.0] * 5 + [1.49] * 5) == []
    assert found([0.9**t for t in range(30)]) == []
    assert found([2.0**t for t in range(9)]) == [], "an exponential ramp, as of a range test"


@pytest.mark.parametrize("declared", rest_slow([True, False], [True]))
def test_more_micro_batches_are_replayed_if_declared_and_a_note_if_not(declared: bool, tmp_path: Path) -> None:
    given = recorder(**({"accumulate": "batches"} if declared else {}))
    loop, fresh = Loop(), Loop()
    with sl.watch(
        loop.model, out=tmp_path / "run", optimizer=loop.optimizer, record=given, probes="none", reference=None
    ) as w:
        for t in range(20):
            parts = 1 if t < 10 else 2
            total = torch.zeros(())
            for part in range(parts):
                loss = loss_fn(loop.model, w.batch(batch(2 * t + part))) / parts
                loss.backward()
                total += loss.detach()
            w.step(loss=total)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert given.flight is not None
    result = Auditor(given.flight, DeclaredLoop.of(given.flight, fresh.model, fresh.optimizer, loss_fn, given)).run()
    assert result.accused == [], [str(one) for one in result.findings]
    assert result.is_equal == declared
    assert [one.kind for one in result.findings] == ([] if declared else ["gradient scale"])


def test_lists_in_an_optimizers_state_are_no_moments() -> None:
    """A list of an optimizer of somebody's own may be empty, or hold what is no tensor."""
    loop = Loop()
    train(loop, None, steps=1)
    weight = loop.model.head.weight
    names = [name for name, _ in loop.model.named_parameters()]
    loop.optimizer.state[weight] |= {"history": [], "marks": [None, 2]}
    kept = captured(loop.model, [loop.optimizer])
    loop.optimizer.state[weight]["exp_avg"].zero_()
    state = captured(loop.model, [loop.optimizer])
    assert differing_state(kept, state) == ["exp_avg of head.weight"]
    assert moments_of(state) == 2 * len(names)


@pytest.mark.parametrize("several", [False, True])
def test_a_moment_is_named_by_its_parameter_in_any_order_of_groups(several: bool) -> None:
    """Vectors before matrices, in two groups of one optimizer or in two optimizers: not the order of the model."""
    loop = Loop()
    groups = [{"params": [p for p in loop.model.parameters() if (p.dim() > 1) == many]} for many in (False, True)]
    made = [torch.optim.AdamW([group], lr=1e-3) for group in groups] if several else [torch.optim.AdamW(groups)]
    loss_fn(loop.model, batch(0)).backward()
    for one in made:
        one.step()
    kept = captured(loop.model, made)
    made[0].state[loop.model.head.bias]["exp_avg"].fill_(7.0)
    made[-1].state[loop.model.head.weight]["exp_avg_sq"].fill_(7.0)
    found = differing_state(kept, captured(loop.model, made))
    assert found == ["exp_avg of head.bias", "exp_avg_sq of head.weight"]


def test_each_kind_of_finding_has_a_remedy() -> None:
    assert set(REMEDIES) == set(KINDS)
    one = AuditFinding("rate", "optimizer 0 group 0", 3, "the rate changed", "the ledger")
    assert str(one) == f"Finding: the rate changed. Evidence: the ledger. To do: {REMEDIES['rate']}."
    assert str(AuditFinding("attribute", "x", 3, "x changed", accused=False)) == "Note: x changed."
