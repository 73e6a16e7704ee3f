"""Passes of our own leave a model as it was, bit by bit, whatever its forward changes, and are ended by name if not."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_toys import ListSink
from state_toys import CHANGING, Plain, Queue, Rebound, Rescaled, alike, inputs, train, watching
from torch import Tensor

import stabilitylab as sl
from stabilitylab.diagnose import diagnose
from stabilitylab.errors import StabilityLabError
from stabilitylab.probes import Watcher
from stabilitylab.probes.state import snapshot, survey

CURVED = {"probes": "critical_sharpness,grad_norm", "curvature_every": 1}


def rows_of(sink: ListSink, table: str) -> list[int]:
    return [row for row, _, tables in sink.rows if table in tables]


def curved(model: Plain, **options: Any) -> dict[str, Any]:
    return {**CURVED, "reference": None, "curvature_loss": lambda: model(inputs(50)).square().mean(-1), **options}


@pytest.mark.parametrize("how", CHANGING)
def test_the_first_reference_pass_is_undone_and_the_last(how: str, caplog: pytest.LogCaptureFixture) -> None:
    kind, names = CHANGING[how]
    plain = train(kind(), None)
    model, sink = kind(), ListSink()
    held: list[Watcher] = []
    watched = train(model, lambda optimizer: held.append(watching(model, sink)(optimizer)) or held[0])
    assert alike(plain, watched)
    assert rows_of(sink, "output_norm") == [0]
    assert rows_of(sink, "grad_norm") == list(range(6))
    why = held[0].ended["output_norm"]
    assert why.startswith(f"row 0: the reference pass changed {', '.join(names[:3])}")
    assert "put back" in why
    assert "restore=True" in why
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING and "changed" in r.message] == [
        f"no more rows of output_norm: {why}. Training goes on."
    ]
    assert held[0].audit["tensors_changed_by_reference"] == names
    assert held[0].audit["tensors_unchanged_by_reference"] == len(survey(kind()).tensors) - len(names)
    assert not held[0].not_neutral


@pytest.mark.parametrize("how", CHANGING)
def test_restore_puts_back_each_time_and_ends_nothing(how: str) -> None:
    kind, _ = CHANGING[how]
    plain = train(kind(), None)
    model, sink = kind(), ListSink()
    assert alike(plain, train(model, watching(model, sink, restore=True)))
    assert rows_of(sink, "output_norm") == list(range(7))


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize("how", CHANGING)
def test_the_first_look_at_curvature_is_undone_and_the_last(how: str, restore: bool) -> None:
    kind, names = CHANGING[how]
    plain = train(kind(), None)
    model, sink = kind(), ListSink()
    held: list[Watcher] = []
    watch = watching(model, sink, **curved(model, restore=restore))
    assert alike(plain, train(model, lambda optimizer: held.append(watch(optimizer)) or held[0]))
    measured = [row for row, _, tables in sink.rows if "critical_sharpness" in tables]
    if restore:
        assert measured == list(range(6))
        assert "critical_sharpness" not in held[0].ended
    else:
        assert (
            held[0].ended["critical_sharpness"].startswith(f"row 0: the curvature pass changed {', '.join(names[:3])}")
        )
    assert held[0].audit["tensors_changed_by_curvature"] == names
    assert not held[0].not_neutral


def test_no_gradient_is_taken_of_what_was_put_back(caplog: pytest.LogCaptureFixture) -> None:
    """A backward would find the weights of before its forward; a look that takes losses alone goes on."""
    plain = train(Rescaled(), None)
    model, sink, held = Rescaled(), ListSink(), []
    watch = watching(model, sink, **curved(model, restore=True, probes="sharpness,critical_sharpness"))
    assert alike(plain, train(model, lambda optimizer: held.append(watch(optimizer)) or held[0]))
    assert list(held[0].ended) == ["sharpness"]
    assert "its forward writes layers.6.out.weight, layers.7.out.weight, put back before" in held[0].ended["sharpness"]
    assert rows_of(sink, "critical_sharpness") == list(range(6))


def test_the_tests_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the snapshot each of these runs is another one."""
    monkeypatch.setattr(snapshot.StateSnapshot, "compare", lambda self: snapshot.Found((), (), (), (), 0, (), None))
    for kind, _ in (*CHANGING.values(), (Rebound, [])):
        model = kind()
        assert not alike(train(kind(), None), train(model, watching(model, ListSink()))), kind


def test_what_is_bound_anew_is_put_back_after_each_pass_without_a_copy() -> None:
    plain = train(Rebound(), None)
    model, sink = Rebound(), ListSink()
    held: list[Watcher] = []
    watched = train(model, lambda optimizer: held.append(watching(model, sink)(optimizer)) or held[0])
    assert alike(plain, watched)
    assert rows_of(sink, "output_norm") == list(range(7))
    assert not held[0].ended
    assert set(held[0].audit["rebound_by_reference"]) >= {"calls", "mean", "history[1]"}
    model = Rebound()
    assert alike(plain, train(model, watching(model, sink, **curved(model))))


def test_the_model_is_copied_at_the_first_pass_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    kept = snapshot.kept
    monkeypatch.setattr(snapshot, "kept", lambda words: sizes.append(sum(w.nbytes for w in words)) or kept(words))
    model, sink = Plain(), ListSink()
    train(model, watching(model, sink))
    size = sum(p.nbytes for p in model.parameters())
    assert sizes == [size, 0, 0, 0, 0, 0, 0]
    sizes.clear()
    model = Plain()
    train(model, watching(model, sink, restore=True))
    assert sizes == [size] * 7


def test_where_memory_is_short_the_first_pass_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "free_memory", lambda: 10)
    model = Plain()
    watcher = watching(model, ListSink())(torch.optim.SGD(model.parameters()))
    model(inputs(0)).sum().backward()
    watcher.step()
    watcher.flush()
    assert watcher.audit["sampled_at_first_reference"] is True
    assert not watcher.not_neutral
    watcher.close()
    changing = Queue()
    watcher = watching(changing, ListSink())(torch.optim.SGD(changing.parameters()))
    changing(inputs(0)).sum().backward()
    watcher.step()
    watcher.flush()
    assert watcher.not_neutral[0].startswith("row 0: the reference pass changed queue")
    watcher.close()


class Late(Plain):
    """Changes something at the third forward in eval mode for the first time, and at each one after."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.calls = itertools.count(1)  # an object of this kind is not put back
        self.memory = torch.zeros(1000)
        with torch.inference_mode():
            self.inferred = torch.zeros(7)

    @torch.no_grad()
    def change(self, x: Tensor) -> float:
        if not self.training and next(self.calls) >= 3:
            if self.how == "data":
                self.layers[1].norm.weight.data.mul_(1.5)
            elif self.how == "in place":
                self.memory[7] += 1  # one entry, which a sample need not hold
            elif self.how == "block":
                self.memory.data[400:416] += 1  # ceil(1000 / 64) entries side by side
            elif self.how == "inference":
                with torch.inference_mode():
                    self.inferred += 1
            elif self.how == "storage":
                self.memory.data = torch.ones(1000)
        return 0.0


LATE = {"data": "layers.1.norm.weight", "in place": "memory", "block": "memory", "inference": "inferred"}


@pytest.mark.parametrize("how", LATE)
def test_a_change_that_comes_at_the_third_pass_is_named_and_the_run_marked(how: str, tmp_path: Path) -> None:
    model = Late(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {"probes": "output_norm,grad_norm", "every": 1, "update_every": 1}
    with sl.watch(model, out=tmp_path / "run", optimizer=optimizer, **options) as watcher:
        for step in range(6):
            loss = model(inputs(step)).square().mean()
            loss.backward()
            watcher.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            if step == 4:  # known at once, so that a run that is killed says so
                known = json.loads((tmp_path / "run" / "run.json").read_text())["not_neutral"]
    said = (
        f"row 2: the reference pass changed {LATE[how]}, of which no copy was kept: this cannot be undone, and the run "
        "is not neutral from here on"
    )
    assert known == [said]
    assert list(watcher.not_neutral) == [said]
    assert watcher.ended["output_norm"].startswith(said)
    run = sl.Run.open(tmp_path / "run")
    assert run.manifest["not_neutral"] == [said]
    assert run.manifest["audit"]["tensors_unchanged_by_reference"] == len(list(model.parameters())) + 2
    assert set(run.frame("output_norm")["step"]) == {0, 1, 2}
    assert set(run.frame("grad_norm")["step"]) == set(range(6))
    found = diagnose(run)
    assert found.not_neutral == (said,)
    assert f"Not neutral: {said}." in found.paragraph


def test_memory_that_is_swapped_is_given_back_at_any_pass() -> None:
    plain = train(Late("storage"), None)
    model, held = Late("storage"), []
    watched = train(model, lambda optimizer: held.append(watching(model, ListSink())(optimizer)) or held[0])
    assert alike(plain, watched)
    assert held[0].ended["output_norm"].startswith("row 2: the reference pass changed memory, and it was put back")
    assert not held[0].not_neutral


def test_a_late_change_during_a_look_at_curvature() -> None:
    """Parameters and buffers are restored after each row in any case; an attribute is not."""
    for how, lasting in (("data", False), ("block", True)):
        plain, model, held = train(Late(how), None), Late(how), []
        watch = watching(model, ListSink(), **curved(model))
        watched = train(model, lambda optimizer: held.append(watch(optimizer)) or held[0])  # noqa: B023
        why = held[0].ended["critical_sharpness"]
        assert why.startswith(f"row 0: the curvature pass changed {LATE[how]}")
        assert bool(held[0].not_neutral) is lasting
        assert lasting or alike(plain, watched)


def test_strict_raises_what_cannot_be_undone() -> None:
    model = Late("data")
    with pytest.raises(StabilityLabError, match=r"row 2: the reference pass changed layers\.1\.norm\.weight"):
        train(model, watching(model, ListSink(), strict=True))


def test_a_mark_stays_over_a_resume() -> None:
    model = Late("data")
    first = watching(model, ListSink())(torch.optim.SGD(model.parameters()))
    for step in range(4):
        model(inputs(step)).sum().backward()
        first.step()
    first.flush()
    state = first.state_dict()
    first.close()
    second = watching(model, ListSink())(torch.optim.SGD(model.parameters()))
    second.load_state_dict(state)
    assert list(second.not_neutral) == list(first.not_neutral)
    assert len(second.not_neutral) == 1
    second.close()


def test_a_pass_without_tables_ends_too(caplog: pytest.LogCaptureFixture) -> None:
    model, sink, calls = Queue(), ListSink(), []

    def reference() -> dict[str, Tensor]:
        calls.append(1)
        return {"held_out": model(inputs(9)).mean()}

    plain = train(Queue(), None)
    assert alike(plain, train(model, watching(model, sink, probes="none", reference=reference)))
    assert len(calls) == 1
    assert [row for row, metrics, _ in sink.rows if "held_out" in metrics] == [0]
    assert "no more reference passes: row 0: the reference pass changed queue" in caplog.text


def test_a_pass_that_raises_is_undone_as_well() -> None:
    model, asked = Queue(), []

    def reference() -> None:
        model(inputs(9))
        asked.append(1)
        if len(asked) == 1:
            raise ArithmeticError

    watcher = watching(model, ListSink(), reference=reference)(torch.optim.SGD(model.parameters()))
    model(inputs(0)).sum().backward()
    before = model.queue.clone(), model.at
    with pytest.raises(ArithmeticError):
        watcher.step()
    assert torch.equal(model.queue, before[0])
    assert model.at == before[1]
    watcher.close()


def test_a_parameter_that_is_written_to_what_it_was_ends_nothing() -> None:
    class Projected(Plain):
        """Keeps a weight within bounds at each forward, which it always is."""

        @torch.no_grad()
        def change(self, x: Tensor) -> float:
            self.layers[0].out.weight.clamp_(-10, 10)
            return 0.0

    plain, model, held = train(Projected(), None), Projected(), []
    watched = train(model, lambda optimizer: held.append(watching(model, ListSink())(optimizer)) or held[0])
    assert alike(plain, watched)
    assert not held[0].ended
    assert not held[0].not_neutral


def test_not_a_number_is_no_change() -> None:
    model, sink = Plain(), ListSink()
    with torch.no_grad():
        model.layers[0].out.bias[0] = torch.nan
    watcher = watching(model, sink)(torch.optim.SGD(model.parameters()))
    for step in range(3):
        model(inputs(step)).sum().backward()
        watcher.step()
    watcher.finish()
    watcher.close()
    assert "output_norm" not in watcher.ended
    assert not watcher.not_neutral


def test_rwkv_like_losses_differed_by_what_the_pass_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights alone are not enough: the flag that says that they are rescaled must come back too."""
    plain = train(Rescaled(), None)
    model = Rescaled()
    monkeypatch.setattr("stabilitylab.probes.state.holders.Holder.put_back", lambda self, before: [])
    assert not alike(plain, train(model, watching(model, ListSink())))
