"""The recorder: training does not notice it; what it holds; the black box; loops that cannot be replayed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Loop, Tiny, batch, loss_fn, recorder, train
from rest_slow import rest_slow

import stabilitylab as sl
from stabilitylab.errors import InputError, UsageError
from stabilitylab.explain import black_box
from stabilitylab.explain.batches import changed, kept, restored, tensors
from stabilitylab.explain.flight import HELD_LOSSES, LEAST, Flight, Level
from stabilitylab.explain.states import bytes_of, captured, restore
from stabilitylab.store.verify import verify


@pytest.mark.parametrize("strict", rest_slow([True, False], [True]))
def test_a_recorded_run_is_the_unrecorded_one_bit_for_bit(tmp_path: Path, strict: bool) -> None:
    plain = train(Loop(), None, steps=12)
    recorded = train(Loop(), tmp_path / "run", 12, recorder(every=3, digests=1), strict=strict)
    for name in plain:
        pairs = zip(plain[name], recorded[name], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), f"{name} differ under the recorder"


def test_snapshots_are_spaced_by_their_age(tmp_path: Path) -> None:
    flight, kept_ = Flight([], {}), []
    for step in range(0, 400, 10):
        flight.snapshots[step] = {}
        flight.prune((1, 2, 4, 8), 10, 10**9)
        kept_.append([(step - at) // 10 for at in sorted(flight.snapshots, reverse=True)])
    assert all(len(ages) <= 5 for ages in kept_), "more snapshots than ages"
    assert all(ages[0] == 0 and ages[1] == 1 and 5 <= ages[-1] <= 8 for ages in kept_[8:]), kept_[8:]


def test_a_flight_has_batches_losses_and_sketches_since_the_oldest_snapshot(tmp_path: Path) -> None:
    given = recorder(keep=(1,))
    train(Loop(), tmp_path / "run", 40, given)
    flight = given.flight
    assert flight is not None
    assert sorted(flight.snapshots) == [24, 32]
    assert sorted(flight.updates) == [*range(24, 40)]
    assert [u.step for u in flight.updates.values() if u.full] == [24, 28, 32, 36]
    assert [u.step for u in flight.replayable(32)] == [*range(32, 40)]
    held = flight.batches[flight.updates[30].batches[0]]
    assert torch.equal(restored(held, torch.device("cpu"))["tokens"], batch(30)["tokens"])
    assert len(flight.losses) == 40


def test_a_state_comes_back_bit_for_bit() -> None:
    loop = Loop()
    train(loop, None, steps=3)
    state = captured(loop.model, [loop.optimizer])
    first = train(loop, None, steps=2)["losses"]
    loop.model.blocks[0].dropout.p, loop.model.blocks[1].dropout.training = 0.5, False
    restore(state, loop.model, [loop.optimizer])
    assert loop.model.blocks[0].dropout.p == 0.1
    again = train(loop, None, steps=2)["losses"]
    assert [float(x) for x in first] == [float(x) for x in again]


def test_another_model_or_optimizer_is_refused() -> None:
    loop, other = Loop(), Loop(layers=1)
    state = captured(loop.model, [loop.optimizer])
    with pytest.raises(UsageError, match=r"no tensor 'blocks\.1"):
        restore(state, other.model, [other.optimizer])
    with pytest.raises(UsageError, match="the optimizer is SGD"):
        restore(state, loop.model, [torch.optim.SGD(loop.model.parameters(), lr=1)])


def test_a_black_box_is_read_without_pickles_and_refused_if_damaged(tmp_path: Path) -> None:
    given = recorder()
    train(Loop(), tmp_path / "run", 20, given)
    (path,) = black_box.found(tmp_path / "run")
    torch.load(path, weights_only=True)
    identity = sl.Run.open(tmp_path / "run").identity
    flight = black_box.load(path, identity)
    assert flight.as_dict().keys() == given.flight.as_dict().keys()
    assert torch.equal(
        flight.snapshots[16]["tensors"]["head.weight"], given.flight.snapshots[16]["tensors"]["head.weight"]
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="its digest is another"):
        black_box.load(path, identity)
    (said,) = verify(tmp_path / "run").findings
    assert "its digest is another" in said


@pytest.mark.slow
def test_a_trouble_keeps_its_own_box(tmp_path: Path) -> None:
    class Jumps(Loop):
        def between(self, t: int) -> None:
            if t == 30:
                self.optimizer.param_groups[0]["lr"] *= 100

    train(Jumps(), tmp_path / "run", 80, recorder())
    first, *_ = black_box.found(tmp_path / "run")
    flight = black_box.load(first)
    assert flight.trouble is not None
    assert 30 < flight.trouble["step"] <= 34
    assert min(flight.snapshots) < 30 < flight.last
    assert flight.lasting()
    assert black_box.chosen(tmp_path / "run", sl.Run.open(tmp_path / "run").identity).trouble == flight.trouble


def test_the_level_and_what_leaves_it() -> None:
    losses = [2.0, 2.1, 1.9, 2.0, 2.0, 1.9, 2.1, 2.0]  # the same from both ends: no slope
    level = Level.of(losses)
    assert level is not None
    assert (level.median, level.spread) == (2.0, pytest.approx(1.4826 * 0.05))
    limit = 2.0 + 6 * 1.4826 * 0.05
    assert not level.left_by(limit - 1e-6)
    assert level.left_by(limit + 1e-6)
    assert level.left_by(float("nan"))
    assert Level.of(losses[:7]) is None
    assert not Level(2.0, 0.0).left_by(2.19), "a tenth of the level is no trouble"
    falling = Level.of([4.0 - 0.1 * t for t in range(20)])
    assert falling is not None
    assert (falling.median, falling.spread) == (pytest.approx(2.1), pytest.approx(0, abs=1e-12))
    rising = Level.of([2.0 + 0.1 * t for t in range(20)])
    assert rising is not None
    assert rising.median == pytest.approx(2.95), "a loss that creeps up has no line"


def test_the_first_row_with_a_level() -> None:
    flight = Flight([], {})
    assert flight.levelled == float("inf")
    flight.losses = [*enumerate([1.0] * (LEAST - 1), 3)]
    assert flight.levelled == float("inf")
    flight.losses += [(3 + LEAST, float("nan")), (4 + LEAST, 1.0)]
    assert flight.levelled == 5 + LEAST, "a loss that is not finite makes no level"
    assert Level.of([loss for _, loss in flight.losses]) is not None
    flight.losses = [*enumerate([1.0] * HELD_LOSSES, 100)]
    assert flight.levelled == 0, "earlier losses are not held any more"


def test_batches_of_many_kinds_and_those_that_cannot_be_kept() -> None:
    given = {"x": torch.ones(2, 3), "more": [torch.zeros(1), ("a", 3)]}
    held = kept(given)
    given["x"].zero_()
    assert torch.equal(restored(held, torch.device("cpu"))["x"], torch.ones(2, 3))
    assert list(tensors(held)) == ["x", "more.0"]
    assert bytes_of(held["content"]) == 28
    twice = changed(held, lambda name, tensor: 2 * tensor if name == "x" else tensor)
    assert restored(twice, torch.device("cpu"))["x"].sum() == 12
    with pytest.raises(UsageError, match=r"batch\['y'\] is object"):
        kept({"y": object()})


def test_a_loop_without_batches_is_told_in_one_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    with (
        caplog.at_level(logging.WARNING, "stabilitylab"),
        sl.watch(
            loop.model, out=tmp_path / "run", optimizer=loop.optimizer, reference=None, probes="none", record=recorder()
        ) as w,
    ):
        loss = loss_fn(loop.model, batch(0))
        loss.backward()
        w.step(loss=loss)
        loop.optimizer.step()
    said = [one for one in caplog.messages if "replayed" in one]
    assert said == [
        "this loop cannot be replayed: no batch was given before row 0: loop over w.batches(loader), or call "
        "w.batch(batch). Its ledger is recorded."
    ]
    assert black_box.found(tmp_path / "run") == []
    assert "no batch was given" in sl.Run.open(tmp_path / "run").manifest["not_replayable"]
    assert sl.Run.open(tmp_path / "run").ledger


def test_batches_yields_what_it_shows(tmp_path: Path) -> None:
    model = Tiny()
    given = recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.watch(model, out=tmp_path / "run", optimizer=optimizer, reference=None, probes="none", record=given) as w:
        for one in w.batches([batch(0), batch(1)]):
            loss = loss_fn(model, one)
            loss.backward()
            w.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    assert given.flight is not None
    assert sorted(given.flight.batches) == [0, 1]
    with sl.watch(model, out=tmp_path / "other", reference=None) as w:
        assert w.batch(3) == 3, "without a recorder a batch comes back as it is"


def test_the_announced_size_of_batches_is_called_a_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stabilitylab"):
        train(Loop(), tmp_path / "run", 1, recorder())
    assert any("as many batches as fit into 1.07e+03 MB (cap=)" in one for one in caplog.messages)


def test_batches_over_the_cap_cost_snapshots_and_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = recorder(cap=20 * bytes_of(kept(batch(0))["content"]))
    with caplog.at_level(logging.WARNING, "stabilitylab"):
        train(Loop(), tmp_path / "run", 40, given)
    assert given.flight is not None
    assert 8 <= len(given.flight.batches) <= 20 + 1, "the cap holds but for the batch that exceeds it"
    assert any("size cap" in one for one in caplog.messages)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"every": 0}, r"Recorder\(every=0\)"),
        ({"keep": (2, 1)}, "ages that grow"),
        ({"clip": -1.0}, r"Recorder\(clip=-1.0\)"),
        ({"scheduler": object()}, "give an object with state_dict"),
    ],
)
def test_wrong_settings_are_said(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        recorder(**settings)


def test_a_setting_that_is_a_tensor_is_held_on_the_host(tmp_path: Path) -> None:
    class Tensors(Loop):
        def between(self, t: int) -> None:
            self.optimizer.param_groups[0]["lr"] = torch.tensor(0.01 * (t + 1))

    given = recorder()
    train(Tensors(), tmp_path / "run", 4, given)
    rates = [update.settings[0][0]["lr"] for update in given.flight.updates.values()]
    assert [float(one) for one in rates] == [pytest.approx(0.01 * (t + 1)) for t in range(4)]
    facts = [one["after"] for one in sl.Run.open(tmp_path / "run").ledger if one["name"].endswith(" lr")]
    assert facts == [float(one) for one in rates]


def test_an_optimizer_with_other_groups_gets_the_recorded_ones() -> None:
    loop, other = Loop(), Loop()
    parameters = list(loop.model.parameters())
    loop.optimizer = torch.optim.AdamW([{"params": parameters[2:], "lr": 0.1}, {"params": parameters[:2]}], lr=0.2)
    train(loop, None, steps=2)
    restore(captured(loop.model, [loop.optimizer]), other.model, [other.optimizer])
    mine, theirs = (one.optimizer.param_groups for one in (loop, other))
    assert [len(group["params"]) for group in theirs] == [len(parameters) - 2, 2]
    assert [group["lr"] for group in theirs] == [0.1, 0.2]
    for one, two in zip(mine, theirs, strict=True):
        for p, q in zip(one["params"], two["params"], strict=True):
            state, restored_ = loop.optimizer.state[p], other.optimizer.state[q]
            assert torch.equal(p, q)
            assert torch.equal(state["exp_avg_sq"], restored_["exp_avg_sq"])


def test_an_update_without_its_batch_ends_the_replay_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop, given = Loop(), recorder()
    with sl.watch(
        loop.model, out=tmp_path / "run", optimizer=loop.optimizer, reference=None, probes="none", record=given
    ) as w:
        for t in range(9):
            one = batch(t) if t in (4, 6) else w.batch(batch(t))
            loss = loss_fn(loop.model, one)
            loss.backward()
            w.step(loss=loss)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert given.flight is not None
    assert [update.step for update in given.flight.replayable(0)] == [0, 1, 2, 3]
    assert [one for one in given.flight.notes if "without w.batch()" in one] == [
        "updates came without w.batch(), update 4 first: a replay ends before it"
    ]


@pytest.mark.slow
def test_an_event_has_a_snapshot_of_its_own_that_is_kept_with_the_others(tmp_path: Path) -> None:
    class Freezes(Loop):
        def between(self, t: int) -> None:
            if t == 21:
                self.model.head.requires_grad_(False)

    given = recorder(every=10, keep=(1, 2))
    train(Freezes(), tmp_path / "run", 35, given)
    assert given.flight is not None
    assert given.flight.event == 22
    assert 22 in given.flight.snapshots
    train(Freezes(), tmp_path / "later", 60, given)
    assert 22 not in given.flight.snapshots, "it is older than all that are kept"
    assert min(given.flight.snapshots) >= 30


def test_an_alarm_is_an_event_and_writes_the_black_box(tmp_path: Path) -> None:
    spoken: list[int] = []

    def on_alarm(alert: sl.alarm.Alert) -> None:
        spoken.append(alert.step)
        boxes.append(len(black_box.found(tmp_path / "run")))

    boxes: list[int] = []
    always = sl.alarm.AlarmRule("always", {"grad_norm.z": 1.0}, -1e9)
    alarm = sl.alarm.Alarm([always], on_alarm=on_alarm, refractory=100)
    given = recorder(every=16, keep=(1, 2))
    train(Loop(), tmp_path / "run", 35, given, probes="grad_norm", every=1, alarm=alarm)
    assert len(spoken) == 1, "the rule speaks once"
    assert boxes == [0], "nothing was written before the alert"
    assert given.flight is not None
    assert given.flight.event == spoken[0] + 2, "a row is read as the next update is under way"
    assert given.flight.trouble is None
    assert [*map(int, (path.stem[5:] for path in black_box.found(tmp_path / "run")))] == [spoken[0], 34]


def test_a_declared_scaler_is_replayed_bit_for_bit_with_its_skipped_updates(tmp_path: Path) -> None:
    loop, fresh = Loop(), Loop()
    for one in (loop, fresh):  # a fused optimizer skips inside its step
        one.optimizer = torch.optim.AdamW(one.model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=4)  # the first updates overflow

    def summed(model: Any, one: Any) -> torch.Tensor:
        return 64 * loss_fn(model, one)

    given = sl.Recorder(summed, every=6, digests=1, scaler=scaler)
    with sl.watch(
        loop.model, out=tmp_path / "run", optimizer=loop.optimizer, reference=None, probes="none", record=given,
        scaler=scaler,
    ) as w:  # fmt: skip
        for t in range(16):
            loss = summed(loop.model, w.batch(batch(t)))
            scaler.scale(loss).backward()
            scaler.unscale_(loop.optimizer)
            w.step(loss=loss)
            scaler.step(loop.optimizer)
            scaler.update()
            loop.optimizer.zero_grad()
    assert given.flight is not None
    skipped = [step for step, update in given.flight.updates.items() if not update.stepped]
    assert skipped, "no update was skipped"
    assert len(skipped) < 16, "all updates were skipped"
    own = torch.amp.GradScaler("cpu")
    found = sl.explain(tmp_path / "run", fresh.model, summed, fresh.optimizer, scaler=own)
    assert found.audit is not None
    assert found.audit.equal == found.audit.replayed == 16, str(found)
    with pytest.raises(UsageError, match="recorded with scaler="):
        sl.explain(tmp_path / "run", fresh.model, summed, fresh.optimizer)
