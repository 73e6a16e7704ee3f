"""Explanations: a cause after an intervention alone, decoys, remedies, harmless trouble; controls and repeats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faults
import pytest
import torch
from edited_runs import edit
from faults import FIRST
from loops import Loop, loss_fn, recorder, train
from made_verdict import made_verdict

import stabilitylab as sl
from stabilitylab.errors import InputError, UsageError
from stabilitylab.explain import Explanation, black_box
from stabilitylab.explain.findings import AuditFinding
from stabilitylab.explain.harm import Bench, Window, window_of
from stabilitylab.explain.interventions import combined, controls, interventions, noise, swap
from stabilitylab.explain.replay import DeclaredLoop, UpdateReplay
from stabilitylab.store.identity import Identity


def explained(kind: type[Loop], path: Path, steps: int = 44, **options: Any) -> Explanation:
    """Train with a fault, and explain the run from its black box with a fresh loop."""
    train(kind(), path / "run", steps, recorder())
    fresh = Loop()
    return sl.explain(path / "run", fresh.model, loss_fn, fresh.optimizer, **options)


@pytest.mark.slow
def test_a_rate_that_was_raised_is_a_cause(tmp_path: Path) -> None:
    found = explained(faults.LargeRate, tmp_path)
    assert found.verdict == "cause", str(found)
    assert found.cause == f"learning rate at step {FIRST} (x40)"
    text = str(found)
    assert f"with the learning rate of step {FIRST - 1} the score" in text
    assert "6 of 6 repeats" in text
    assert "no control heals (0 of 4)" in text
    tried = found.experiment
    assert tried is not None
    (first,) = [one for one in tried.trials if one.intervention.name == "learning rate as before"]
    assert (len(first.repeats), len(first.confirmed), first.healed) == (3, 3, True)
    assert len(tried.controls) == 4
    assert all(tried.healthy.is_harmed(score) for _, score in tried.controls)
    assert found.exit_code == 1


@pytest.mark.slow
def test_what_is_outside_the_declared_update_is_healed_by_declaration_alone(tmp_path: Path) -> None:
    found = explained(faults.FlippedForGood, tmp_path)
    assert found.verdict == "cause", str(found)
    assert found.experiment is not None
    assert found.experiment.declared_heals
    assert found.experiment.trials == [], "the declared update alone heals: there it stops"
    assert f"the gradients of update {FIRST} were negated" in found.sentences[-1]
    assert "6 of 6 repeats with noise" in found.sentences[-1]


def test_a_nan_that_was_written_is_the_cause_though_all_updates_are_equal(tmp_path: Path) -> None:
    said: list[str] = []
    found = explained(faults.LostWeight, tmp_path, progress=said.append)
    assert found.audit is not None
    assert found.audit.equal == found.audit.replayed > 20
    assert found.audit.between == [24], "the snapshot that the write came before"
    assert found.verdict == "cause", str(found)
    assert "Cause: 1 tensor changed between the optimizer's steps of the updates 23 and 24" in found.sentences[-1]
    assert "not finite afterwards: blocks.1.up.weight" in str(found)
    assert "the state before step 24 is not the one that they lead to" in str(found)
    assert f"replaying the {found.audit.replayed} recorded updates" in said[0]
    assert said[1].startswith("trying interventions: each, and each repeat")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [faults.ShiftedForGood, faults.ShiftedWithDecoy])
def test_shifted_labels_are_the_cause_and_a_decoy_is_not(kind: type[Loop], tmp_path: Path) -> None:
    found = explained(kind, tmp_path)
    assert found.verdict == "cause", str(found)
    assert found.cause.startswith("shifted labels in updates 22 to"), str(found)
    assert found.experiment is not None
    decoys = [one for one in found.experiment.trials if one.intervention.name == "learning rate as before"]
    assert [one.healed for one in decoys] == ([False] if kind is faults.ShiftedWithDecoy else [])


@pytest.mark.slow
def test_a_bad_batch_that_the_run_forgets_has_no_lasting_harm(tmp_path: Path) -> None:
    found = explained(faults.BadBatch, tmp_path)
    assert found.verdict == "no lasting harm", str(found)
    assert found.exit_code == 1, "the batch is a finding"
    assert [(one.kind, one.step) for one in found.findings] == [("bad batch", FIRST)]
    assert found.experiment is None


def test_a_healthy_run_has_no_trouble_and_an_equal_audit(tmp_path: Path) -> None:
    found = explained(Loop, tmp_path, steps=20)
    assert (found.verdict, found.exit_code, found.findings) == ("no trouble", 0, [])
    assert "all 20 replayed updates are equal" in found.sentences[0]


@pytest.mark.parametrize(
    ("after", "audited", "alone", "code"),
    [([9.0, 9.0, 9.0], "no cause found", "not replayed", 1), ([9.0, 1.0, 1.0], *["no lasting harm"] * 2, 0)],
)
def test_a_trouble_without_a_finding_is_not_called_none(
    tmp_path: Path, after: list[float], audited: str, alone: str, code: int
) -> None:
    given = recorder()
    train(Loop(), tmp_path / "run", 10, given)
    assert given.flight is not None
    given.flight.losses = [*enumerate([1.0] * 10), *enumerate(after, 10)]
    given.flight.trouble = {"step": 10, "why": "the loss is 9, and was 1", "level": 1.0}
    fresh = Loop()
    found = sl.explain(given, fresh.model, loss_fn, fresh.optimizer, audit=True)
    assert (found.verdict, found.exit_code, found.findings) == (audited, code, [])
    assert "all 10 replayed updates are equal" in found.sentences[0]
    assert "interventions: leave --audit out to try them" in found.unchecked
    found = sl.explain(given)
    assert (found.verdict, found.exit_code) == (alone, code)


def diverged(path: Path, losses: list[float], trouble: int | None, step: int) -> Explanation:
    """Explain a run of these losses, whose own verdict is that it diverged at ``step``. ``trouble``: of its
    recorder."""
    given = recorder()
    train(Loop(), path, 12, given)
    assert given.flight is not None
    given.flight.losses = [*enumerate(losses)]
    given.flight.trouble = None if trouble is None else {"step": trouble, "why": "the loss is high", "level": 1.0}
    run_id = sl.Run.open(path).manifest["run_id"]
    for box in black_box.found(path):
        box.unlink()
    black_box.save(path, given.flight.last if trouble is None else trouble, given.flight, run_id)
    judged = made_verdict("diverged", step=step, reason=f"the loss rose at step {step}")
    edit(path / "status.json", facts={"verdict": judged})
    fresh = Loop()
    return sl.explain(path, fresh.model, loss_fn, fresh.optimizer)


def test_a_run_that_diverged_before_there_was_a_level_is_not_without_trouble(tmp_path: Path) -> None:
    found = diverged(tmp_path / "run", [5.0, *[30.0] * 11], None, step=1)
    assert (found.verdict, found.exit_code, found.trouble) == ("no cause found", 1, None)
    assert found.sentences[0].startswith(
        "The run's verdict is `diverged`: the loss rose at step 1. The recorder did not see the divergence: no level "
        "of the loss was known before step 8. The loop does what it declares"
    )
    assert found.sentences[1].startswith("No cause found: no intervention was tried, since each needs a trouble")
    assert f"`stabilitylab diagnose {tmp_path / 'run'}` lists the events" in found.sentences[1]
    alone = sl.explain(tmp_path / "run")
    assert (alone.verdict, alone.exit_code) == ("no cause found", 1)
    for each in (found, alone):
        assert "No trouble" not in str(each)


def test_a_level_of_losses_after_a_divergence_is_no_healthy_one(tmp_path: Path) -> None:
    found = diverged(tmp_path / "run", [5.0, *[30.0] * 8, 50.0, *[30.0] * 5], 9, step=1)
    assert (found.verdict, found.exit_code) == ("no cause found", 1)
    assert "no level of the loss was known before step 8. Trouble at step 9" in found.sentences[0]
    assert "These results are about step 9. They do not explain the divergence at step 1" in found.sentences[-1]


def test_a_spike_without_lasting_harm_does_not_acquit_a_run_that_diverged(tmp_path: Path) -> None:
    found = diverged(tmp_path / "run", [*[1.0] * 9, 9.0, *[1.0] * 5], 9, step=40)
    assert (found.verdict, found.exit_code) == ("no cause found", 1)
    assert found.sentences[0].startswith("Trouble at step 9: the loss is high.")
    assert "But the run's verdict is `diverged`: the loss rose at step 40." in found.sentences[-1]


def test_a_loss_that_is_not_finite_needs_no_level(tmp_path: Path) -> None:
    """The gradient is not finite in the row before, which is the step of the verdict."""
    found = diverged(tmp_path / "run", [5.0, 4.0, float("nan"), *[float("nan")] * 3], 2, step=1)
    assert found.sentences[0].startswith("Trouble at step 2: the loss is high.")
    assert "did not see" not in str(found)
    assert "do not explain" not in str(found)


def test_a_loss_that_rose_before_there_was_a_level_is_said(tmp_path: Path) -> None:
    """A loop of one's own has no verdict."""
    given = recorder()
    train(Loop(), tmp_path / "run", 4, given)
    assert given.flight is not None
    given.flight.losses = [(0, 5.0), *enumerate([30.0] * 11, 1)]
    found = sl.explain(given)
    assert found.sentences[0].startswith(
        "No trouble was recorded up to step 3, but no level of the loss was known before step 8. "
        "The loss rose from 5 at step 0 to 30, the median of the last 5."
    )
    assert (found.verdict, found.exit_code) == ("no trouble", 0)
    given.flight.losses = [(0, 5.0), *enumerate([float("nan")] * 3, 1)]
    assert "but no level of the loss was known (it takes 8 finite losses)" in sl.explain(given).sentences[0]
    for healthy in ([5.0, 5.3, 5.2], [5.0, *[4.0] * 11], [5.0] * 12):
        given.flight.losses = [*enumerate(healthy)]
        assert "No trouble was recorded up to step 3. " in sl.explain(given).sentences[0]


@pytest.mark.slow
def test_an_audit_makes_no_intervention(tmp_path: Path) -> None:
    found = explained(faults.LargeRate, tmp_path, audit=True)
    assert (found.verdict, found.experiment) == ("finding", None)
    assert [one.kind for one in found.findings] == ["rate"]
    assert any("--audit" in why for why in found.unchecked)


@pytest.mark.slow
def test_without_a_model_the_ledger_speaks(tmp_path: Path) -> None:
    train(faults.LargeRate(), tmp_path / "run", 44, recorder())
    found = sl.explain(tmp_path / "run")
    assert [(one.kind, one.step) for one in found.findings] == [("rate", FIRST)]
    assert "nothing was replayed" in found.unchecked[0]
    with pytest.raises(UsageError, match="together"):
        sl.explain(tmp_path / "run", Loop().model)


def test_a_run_without_a_black_box_is_refused_with_its_reason(tmp_path: Path) -> None:
    loop = Loop()
    with sl.watch(loop.model, out=tmp_path / "run", optimizer=loop.optimizer, reference=None, record=recorder()) as w:
        w.step(loss=1.0)
    with pytest.raises(InputError, match="cannot be replayed: no batch was given"):
        sl.explain(tmp_path / "run")
    train(Loop(), tmp_path / "other", 2)
    with pytest.raises(InputError, match="has no black box"):
        sl.explain(tmp_path / "other")
    with sl.store.RunWriter.create(tmp_path / "probed", {"config": {"model": {}, "train": {}}}):
        pass
    with pytest.raises(InputError, match="has no black box: make the run again with 'stabilitylab probe --record'"):
        sl.explain(tmp_path / "probed")
    with pytest.raises(InputError, match="has recorded nothing"):
        sl.explain(recorder())


@pytest.mark.slow
def test_benign_changes_and_their_combination_do_what_they_say(tmp_path: Path) -> None:
    train(Loop(), tmp_path / "run", 16, recorder())
    flight = black_box.chosen(tmp_path / "run", Identity())
    fresh = Loop()
    loop = DeclaredLoop.of(flight, fresh.model, fresh.optimizer, loss_fn)
    window = Window(8, 12, 14, 16, (0, 1))
    with loop.kept():
        plain = UpdateReplay(flight, loop)
        losses = plain.losses(8, 16)
        assert losses == [flight.updates[step].loss for step in range(8, 16)]
        UpdateReplay(flight, loop, noise(3)).begin(8)
        weight, before = fresh.model.head.weight, flight.snapshots[8]["tensors"]["head.weight"]
        size = (weight - before).square().mean().sqrt() / before.square().mean().sqrt()
        assert float(size.detach()) == pytest.approx(1e-4, rel=0.15)
        swapped = UpdateReplay(flight, loop, swap(flight, 9, 10)).losses(8, 16)
        assert swapped[0] == losses[0]
        assert swapped[1] != losses[1]
        both = UpdateReplay(flight, loop, combined(noise(3), swap(flight, 9, 10))).losses(8, 16)
        assert both[0] != losses[0]
        assert both == UpdateReplay(flight, loop, combined(swap(flight, 9, 10), noise(3))).losses(8, 16)
        assert [len(UpdateReplay(flight, loop, change).losses(8, 16)) for _, change in controls(flight, window)] == [
            8
        ] * 4
        bench = Bench(flight, loop, window)
        assert bench.score_after() == bench.score_after()
        assert bench.updates == 16


@pytest.mark.slow
def test_remedies_come_last_and_the_window_begins_before_the_onset(tmp_path: Path) -> None:
    train(faults.LargeRate(), tmp_path / "run", 44, recorder())
    flight = black_box.chosen(tmp_path / "run", Identity())
    window = window_of(flight, [FIRST])
    assert window is not None
    assert (window.start, window.onset) == (16, FIRST)
    assert window.trouble >= FIRST
    roles = [one.role for one in interventions(flight, window, [])]
    assert roles == sorted(roles), "causes before remedies"
    assert roles.count("remedy") == 3
    flight.trouble = None
    assert window_of(flight, []) is None


@pytest.mark.slow
def test_bad_batches_around_an_update_without_a_batch_are_replaced(tmp_path: Path) -> None:
    train(Loop(), tmp_path / "run", 16, recorder())
    flight = black_box.chosen(tmp_path / "run", Identity())
    del flight.updates[13]  # it came without w.batch()
    finding = AuditFinding("bad batch", "batches of updates 11 to 14", 11, "", until=14)
    window = Window(8, 11, 11, 13, (0, 1))
    one = next(one for one in interventions(flight, window, [finding]) if one.finding is finding)
    for step in (11, 12, 14):
        (number,) = flight.updates[step].batches
        taken = one.change.batch(step, number, flight.batches[number])
        assert any(taken is flight.batches[earlier] for earlier in range(number)), f"the batch of {step} stays"


@pytest.mark.slow
def test_a_level_that_a_control_reaches_lets_no_intervention_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard can fail: here each benign control is one that heals."""
    from stabilitylab.explain import interventions as module

    def healing(flight: Any, window: Window) -> Any:
        one = next(one for one in interventions(flight, window, fact) if one.name == "learning rate as before")
        yield "a benign change", one.change

    train(faults.LargeRate(), tmp_path / "run", 44, recorder())
    fact = sl.explain(tmp_path / "run").findings
    monkeypatch.setattr(module, "controls", healing)
    fresh = Loop()
    found = sl.explain(tmp_path / "run", fresh.model, loss_fn, fresh.optimizer)
    assert found.verdict == "no cause found"
    assert "a benign change (a benign change) heals as well" in found.sentences[-1]
    assert "learning rate as before" in found.sentences[-1]


def test_scores_that_are_not_finite_are_no_replays_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In eval mode the loss is NaN, in each of two equal replays."""
    from stabilitylab.explain import interventions as module

    for name in ("controls", "interventions"):
        monkeypatch.setattr(module, name, lambda *_: iter(()))
    monkeypatch.setattr(module, "_bisect", lambda *_: None)
    given = recorder()
    train(Loop(), tmp_path / "run", 10, given)
    assert given.flight is not None

    def lost(model: Any, batch: Any) -> torch.Tensor:
        return loss_fn(model, batch) * (1.0 if model.training else torch.nan)

    fresh = Loop()
    loop = DeclaredLoop.of(given.flight, fresh.model, fresh.optimizer, lost, given)
    found = module.intervene(given.flight, loop, Window(0, 2, 3, 4, (0, 1)), ())
    assert (found.harmed, found.repeatable) == (True, True)


@pytest.mark.slow
def test_a_killed_explanation_leaves_the_run_as_it_was_and_can_be_run_again(tmp_path: Path) -> None:
    train(faults.LargeRate(), tmp_path / "run", 44, recorder())
    before = {path: path.read_bytes() for path in black_box.found(tmp_path / "run")}
    calls = 0

    def killed(model: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise KeyboardInterrupt
        return loss_fn(model, batch)

    fresh = Loop()
    kept = [parameter.clone() for parameter in fresh.model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        sl.explain(tmp_path / "run", fresh.model, killed, fresh.optimizer)
    assert all(torch.equal(a, b) for a, b in zip(kept, fresh.model.parameters(), strict=True))
    assert {path: path.read_bytes() for path in black_box.found(tmp_path / "run")} == before
    assert sl.explain(tmp_path / "run", fresh.model, loss_fn, fresh.optimizer, audit=True).verdict == "finding"
