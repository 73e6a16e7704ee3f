"""Trackers get aggregates, real ones too, and cannot stop anything."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.tracking import GeneralTracker
from subjects import LR, batch, model

import stabilitylab as sl
from stabilitylab.alarm import Alarm, AlarmRule, RuleSet
from stabilitylab.errors import ResourceError, UsageError
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.trackers import aggregates
from stabilitylab.trackers.layer_map import EVERY, TALL, LayerMap

ALWAYS = RuleSet((AlarmRule("always", {"grad_norm.z": 1.0}, 0.0, "it is so"),))  # speaks as soon as it may


class Notebook(GeneralTracker):
    """A tracker that keeps what it is told, or raises at one of the calls."""

    name = "notebook"
    requires_logging_directory = False

    def __init__(self, raises: str = "") -> None:
        super().__init__()
        self.raises, self.calls, self.rows, self.config = raises, [], {}, {}

    @property
    def tracker(self) -> Any:
        if "start" not in self.calls:
            raise AttributeError("not started")
        return self

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.raises:
            raise ConnectionError("no route to host")

    def start(self) -> None:
        self._called("start")

    def store_init_configuration(self, values: dict) -> None:
        self._called("config")
        self.config = values

    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        self._called("log")
        self.rows[step] = values

    def finish(self) -> None:
        self._called("finish")


def loop(out: Path, tracker: Any, steps: int = 3, **options: Any) -> torch.nn.Module:
    subject = model()
    optimizer = torch.optim.SGD(subject.parameters(), lr=LR)
    with sl.watch(subject, out=out, every=1, tracker=tracker, **{"reference": None} | options) as w:
        for step in range(steps):
            content: Any = batch([step])
            loss = subject(**content).loss
            loss.backward()
            w.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    return subject


def test_aggregates_are_over_finite_places_of_each_stack() -> None:
    rows = tuple(Row(f"{stack}.{n}", stack, n) for stack in ("enc", "dec") for n in (1, 2, 3, 4))
    table = Table("t", ("a", "b"), rows)
    values = np.array([[1, 8], [2, 7], [np.nan, 6], [9, 5], [np.inf, 1], [np.nan, 2], [-np.inf, 3], [np.nan, 4]])
    absent = np.array([False, False, False, True, False, False, False, False])
    found = aggregates({"loss": 2.5, "lr": None}, {"t": Cells(values.astype(float), absent)}, {"t": table})
    assert found == {
        "metrics/loss": 2.5,
        "t.a/enc/min": 1, "t.a/enc/median": 1.5, "t.a/enc/max": 2,  # "no gradient" is left out, and NaN
        "t.a/enc/not_finite": 1, "t.a/dec/not_finite": 4,  # is counted
    }  # fmt: skip


def test_the_map_of_layers_comes_as_an_image_now_and_then() -> None:
    rows = tuple(Row(f"{n}.{part}", "enc", n, part) for n in (1, 2) for part in "ab")
    table, drawn = Table("grad_norm", ("value",), rows), LayerMap()

    def take(*values: float) -> bool:
        cells = Cells(np.array(values)[:, None], np.array([False, False, False, True]))
        return drawn.take({"grad_norm": cells}, {"grad_norm": table})

    due = [take(1e-3, 1e-4, 10.0 if row % 2 else math.nan, 5.0) for row in range(EVERY)]
    assert due == [False] * (EVERY - 1) + [True]
    (image,) = drawn.image()
    assert image.shape == (2 * TALL, EVERY, 3)
    assert image[0, 0].tolist() == [214, 26, 28]  # layer 2 stands on top, and is not finite
    assert image[0, 1].tolist() == [253, 231, 37]
    assert image[-1, 0].tolist() == [68, 1, 84]
    assert not LayerMap().take({"other": Cells(np.zeros((4, 1)), np.zeros(4, bool))}, {"other": table})


def test_tensorboard_takes_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stabilitylab.trackers.layer_map.EVERY", 2)
    loop(tmp_path / "run", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = (tmp_path / "run" / "trackers").rglob("events.out.*")
    read = EventAccumulator(str(events)).Reload()
    assert read.Tags()["images"][0].startswith("grad_norm/layers")


def test_a_model_without_layers_has_no_image_and_its_tracker_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stabilitylab.trackers.layer_map.EVERY", 2)
    subject, out = torch.nn.Linear(3, 2), tmp_path / "run"
    with sl.watch(subject, out=out, tracker="tensorboard", every=1, probes="grad_norm", reference=None) as w:
        for _ in range(3):
            subject(torch.ones(2, 3)).sum().backward()
            w.step()
    assert not [line for line in caplog.messages if "tracker" in line]


def test_a_tracker_gets_every_row_and_never_one_number_a_layer(tmp_path: Path) -> None:
    tracker = Notebook()
    loop(tmp_path / "run", tracker, config={"lr": LR, "betas": (0.9, 0.95)})
    run = sl.Run.open(tmp_path / "run")
    assert tracker.calls == ["start", "config", "log", "log", "log", "finish"]
    assert tracker.config == {"lr": LR, "betas": "(0.9, 0.95)"}
    assert list(tracker.rows) == [0, 1, 2]
    for step, values in tracker.rows.items():
        frame = run.frame("ln_input")
        numbers = frame[(frame["step"] == step) & (frame["stack_name"] == "transformer")]["value"]
        for name in ("min", "median", "max"):
            assert values[f"ln_input.value/transformer/{name}"] == getattr(numbers, name)()
        assert values["metrics/loss"] == run.metrics["loss"][step]
        assert not [key for key in values if not key.startswith("metrics/") and key.count("/") > 2]
        assert len(values) < 100


@pytest.mark.parametrize("raises", ["start", "log", "finish"])
def test_a_tracker_that_raises_is_warned_of_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, raises: str
) -> None:
    tracker = Notebook(raises)
    with caplog.at_level(logging.WARNING):
        watched = loop(tmp_path / "run", tracker)
    # beside what this loop cannot record, having no held-out batch
    warned = [record for record in caplog.records if ": not recorded: " not in record.message]
    assert [record.levelname for record in warned] == ["WARNING"]
    assert len(caplog.records) == 2
    assert "notebook failed" in caplog.text
    assert "no route to host" in caplog.text
    assert tracker.calls.count(raises) == 1
    assert tracker.calls[-1] == "finish"
    run = sl.Run.open(tmp_path / "run")
    assert (run.status.state, len(run.metrics)) == ("finished", 3)
    plain = loop(tmp_path / "plain", None)
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), plain.parameters(), strict=True))


def test_a_tracker_that_somebody_started_is_not_started_again(tmp_path: Path) -> None:
    tracker = Notebook()
    tracker.start()
    loop(tmp_path / "run", tracker)
    assert tracker.calls.count("start") == 1


class Pager(Notebook):
    """One that has alerts, as W&B's run does."""

    def alert(self, title: str, text: str) -> None:
        self.calls.append(f"{title}: {text}")


def test_an_alarm_is_an_alert_where_the_tracker_has_them(tmp_path: Path) -> None:
    tracker = Pager()
    loop(tmp_path / "run", tracker, steps=22, alarm=Alarm(ALWAYS))
    [alert] = sl.Run.open(tmp_path / "run").manifest["alarms"]
    assert [call for call in tracker.calls if "it is so" in call] == [f"it is so (step 20): {alert['sentence']}"]


def test_an_alarm_is_a_number_where_the_tracker_has_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, told = Notebook(), []
    monkeypatch.setattr(tracker, "log", lambda values, step: told.append((step, values)))
    loop(tmp_path / "run", tracker, steps=22, alarm=Alarm(ALWAYS))
    assert [step for step, values in told if values == {"alarm/always": 1.0}] == [20]


def test_tensorboard_takes_the_alarm_as_a_text(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loop(tmp_path / "run", "tensorboard", steps=22, alarm=Alarm(ALWAYS))
    events = EventAccumulator(str(tmp_path / "run" / "trackers" / "tensorboard"))
    events.Reload()
    [event] = events.Tensors("alarm/always/text_summary")
    [alert] = sl.Run.open(tmp_path / "run").manifest["alarms"]
    assert (event.step, event.tensor_proto.string_val[0].decode()) == (20, alert["sentence"])


def test_a_failed_loop_closes_its_tracker(tmp_path: Path) -> None:
    tracker = Notebook()
    with pytest.raises(ZeroDivisionError), sl.watch(model(), out=tmp_path / "run", tracker=tracker):
        _ = 1 / 0
    assert tracker.calls[-1] == "finish"
    assert sl.Run.open(tmp_path / "run").status.state == "failed"


def test_tensorboard_reads_what_the_run_holds(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loop(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "trackers" / "tensorboard"))
    events.Reload()
    run = sl.Run.open(tmp_path / "run")
    points = [(event.step, event.value) for event in events.Scalars("metrics/loss")]
    assert points == [(step, float(np.float32(loss))) for step, loss in enumerate(run.metrics["loss"])]
    largest = run.frame("grad_norm").query("stack_name == 'transformer'").groupby("step")["value"].max()
    points = [event.value for event in events.Scalars("grad_norm.value/transformer/max")]
    np.testing.assert_allclose(points, largest, rtol=1e-6)


def test_unknown_and_missing_trackers_are_refused_and_leave_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown tracker 'tensorbored'; choose one of"):
        loop(tmp_path / "run", "tensorbored")
    with pytest.raises(ResourceError, match="pip install aim"):
        loop(tmp_path / "run", "aim")
    assert not (tmp_path / "run").exists()
