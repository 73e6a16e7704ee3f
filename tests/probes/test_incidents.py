"""Faults that are put into a training run, and whether the first place where it broke is named."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of, masks
from torch import Tensor, nn

from stabilitylab import Run, watch
from stabilitylab.errors import UsageError
from stabilitylab.probes import Watcher

STEPS, BROKEN = 6, 3
Fault = Callable[[nn.Module, int, int], None]  # model, step, micro-batch


class Sink(ListSink):
    def __init__(self) -> None:
        super().__init__()
        self.dumps: list[tuple[dict[str, Any], list[int]]] = []

    def incident(self, facts: dict[str, Any], rows: list[Any]) -> None:
        self.dumps.append((facts, [step for step, _, _ in rows]))


def train(
    fault: Fault | None = None,
    *,
    parts: int = 1,
    steps: int = STEPS,
    given: bool = True,
    rate: Callable[[int], float] = lambda t: 1e-3,
    scale: Callable[[int], float] = lambda t: 1.0,
    scaler: torch.amp.GradScaler | None = None,
    **options: Any,
) -> tuple[Watcher, Sink]:
    torch.manual_seed(0)
    model, sink = Toy(layers=2), Sink()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    now = batch()
    held_out = batch(99)
    options = {"every": 1, "update_every": 1} | options
    with Watcher(model, sink, optimizer=optimizer if given else None, scaler=scaler, mask=lambda: masks(now),
                 **options) as watcher:  # fmt: skip
        for t in range(steps):
            for part in range(parts):
                now = batch(10 * t + part)
                if fault is not None:
                    fault(model, t, part)
                loss = loss_of(model, now) * scale(t) / parts
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            watcher.step(loss=loss)
            optimizer.param_groups[0]["lr"] = rate(t)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        del held_out
    return watcher, sink


def places(watcher: Watcher) -> tuple[Any, ...]:
    found = watcher.incident
    assert found is not None
    return found.step, found.phase, found.kind, found.name, found.layer, found.value


def nan_weight(model: nn.Module, step: int, part: int) -> None:
    if step == BROKEN:
        with torch.no_grad():
            model.get_parameter("decoder.layers.1.linear1.weight")[2, 3] = math.nan


def once(module: str, change: Callable[[Tensor], Tensor], at: int = 0) -> Fault:
    """``change`` to a module's output in the broken step, in one micro-batch."""

    def fault(model: nn.Module, step: int, part: int) -> None:
        if (step, part) == (BROKEN, at):
            handle = model.get_submodule(module).register_forward_hook(lambda m, a, y: (handle.remove(), change(y))[1])

    return fault


def overflowing(gradient: Tensor) -> Tensor:
    return gradient * 3e38 * 3e38


def in_backward(y: Tensor) -> Tensor:
    y = y * 1.0
    y.register_hook(overflowing)
    return y


def test_a_healthy_run_has_none(caplog: pytest.LogCaptureFixture) -> None:
    watcher, sink = train()
    assert watcher.incident is None
    assert not sink.dumps
    assert not caplog.records


def test_a_nan_in_one_weight(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "stabilitylab"):
        watcher, sink = train(nan_weight)
    assert places(watcher) == (BROKEN, "forward", "parameter", "decoder.layers.1.linear1.weight", 2, "nan")
    ((_, _, said),) = caplog.record_tuples
    assert said.startswith(
        "Step 3: before the forward pass parameter decoder.layers.1.linear1.weight (stack decoder, l"
    )
    assert "Step 2 had loss " in said
    assert sink.dumps[-1] == (vars(watcher.incident), [0, 1, 2, 3, 4, 5])


def test_without_the_optimizer_the_first_place_after_it() -> None:
    watcher, _ = train(nan_weight, given=False)
    assert places(watcher) == (BROKEN, "forward", "activation", "decoder.layers.1.norm3", 2, "nan")
    assert watcher.incident is not None
    assert watcher.incident.before.startswith("decoder.layers.1.norm2 (ln_input ")
    assert "is recorded with optimizer= alone" in watcher.incident.paragraph


@pytest.mark.parametrize("part", [0, 1, 2])
def test_an_overflow_in_one_activation_of_one_micro_batch(part: int) -> None:
    watcher, _ = train(once("encoder.layers.1.self_attn", lambda y: y * 1e38 * 1e38, at=part), parts=3)
    assert places(watcher)[:4] == (BROKEN, "forward", "activation", "encoder.layers.1.norm1")
    assert watcher.incident is not None
    assert watcher.incident.micro_batch == part
    assert "All parameters were finite" in watcher.incident.paragraph
    assert f"Step 3, micro-batch {part}: " in watcher.incident.paragraph


def test_one_micro_batch_is_number_0() -> None:
    watcher, _ = train(once("encoder.layers.1.self_attn", lambda y: y * math.inf))
    assert watcher.incident is not None
    assert watcher.incident.micro_batch == 0


def test_an_overflow_on_the_way_back() -> None:
    watcher, _ = train(once("decoder.layers.0", in_backward))
    assert places(watcher) == (BROKEN, "backward", "gradient", "decoder.layers.0", 1, "inf")


def test_a_gradient_of_one_parameter_alone() -> None:
    def fault(model: nn.Module, step: int, part: int) -> None:
        if step == BROKEN:
            weight = model.get_parameter("encoder.layers.0.self_attn.q.weight")
            handle = weight.register_hook(lambda gradient: (handle.remove(), gradient * math.nan)[1])

    watcher, _ = train(fault)
    name = "encoder.layers.0.self_attn.q.weight"
    assert places(watcher) == (BROKEN, "backward", "gradient", name, 1, "nan")


def test_the_loss_comes_before_its_gradients() -> None:
    watcher, _ = train(scale=lambda t: math.nan if t == BROKEN else 1.0)
    assert places(watcher)[:3] == (BROKEN, "loss", "loss")
    assert watcher.incident is not None
    assert "though every recorded place of the forward pass is finite" in watcher.incident.paragraph


def test_an_update_that_is_not_finite() -> None:
    watcher, _ = train(rate=lambda t: math.inf if t == BROKEN else 1e-3)
    step, phase, kind, *_ = places(watcher)
    assert (step, phase, kind) == (BROKEN, "update", "update")


def test_a_row_that_is_not_probed_tells_the_step_alone() -> None:
    watcher, _ = train(nan_weight, every=100, update_every=100)
    assert places(watcher) == (BROKEN, "loss", "loss", "", 0, "nan")
    assert watcher.incident is not None
    assert "record from here with every=1, on the command line --every 1." in watcher.incident.paragraph


def nan_before_row_15(out: Path, given: bool, spoiled: str = "decoder.layers.1.linear1.weight") -> str:
    """Row 15 holds the held-out pass alone; what is said of it."""
    torch.manual_seed(0)
    model, inputs = Toy(), batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, out=out, every=10, optimizer=optimizer if given else None) as watcher:
        for t in range(17):
            if t == 15 and spoiled:
                with torch.no_grad():
                    model.get_parameter(spoiled)[0] = math.nan
            loss = loss_of(model, inputs) * (1 if t < 15 or spoiled else math.nan)
            loss.backward()
            watcher.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    incident = Run.open(out).incident
    assert incident is not None
    assert incident["step"] == 15
    return incident["paragraph"]


def test_of_a_row_without_a_training_pass_no_place_is_called_finite(tmp_path: Path) -> None:
    told = nan_before_row_15(tmp_path / "run", given=False)
    assert "every recorded place" not in told
    assert "Step 15: the loss is NaN. This row was not probed, so that no place is known" in told
    assert set(Run.open(tmp_path / "run").frame("model_update")["step"]) >= {15}


@pytest.mark.slow
def test_with_the_optimizer_a_parameter_is_named_at_a_row_that_is_not_probed(tmp_path: Path) -> None:
    told = nan_before_row_15(tmp_path / "run", given=True)
    where = "parameter decoder.layers.1.linear1.weight (stack decoder, layer 2) holds a value that is NaN"
    assert f"Step 15: before the forward pass {where}. Step 14 had" in told
    told = nan_before_row_15(tmp_path / "fine", given=True, spoiled="")
    assert "the loss is NaN. All parameters were finite. This row was not probed" in told


def test_where_no_probe_looks_at_the_forward_pass_it_is_not_called_finite() -> None:
    watcher, _ = train(nan_weight, probes="grad_norm")
    assert watcher.incident is not None
    assert "the loss is NaN. " in watcher.incident.paragraph
    assert "was not probed" not in watcher.incident.paragraph


def test_gradients_that_a_scaler_throws_away_are_no_incident() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    watcher, sink = train(scaler=scaler, steps=3, scale=lambda t: 1e4)
    assert not math.isfinite(sink.row(0)[0]["grad_norm_total"] or 0)
    assert watcher.incident is None
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    watcher, _ = train(nan_weight, scaler=scaler)
    assert places(watcher)[3] == "decoder.layers.1.linear1.weight"


def test_a_held_out_pass_alone() -> None:
    torch.manual_seed(0)
    model, sink, inputs = Toy(), Sink(), batch()

    def reference() -> None:
        handle = model.encoder.layers[1].linear2.register_forward_pre_hook(lambda m, a: (a[0] * math.nan,))
        model(**inputs)
        handle.remove()

    with Watcher(model, sink, every=1, update_every=1, reference=reference) as watcher:
        loss_of(model, inputs).backward()
        watcher.step(loss=1.0)
    assert watcher.incident is not None
    assert (watcher.incident.phase, watcher.incident.table) == ("reference", "activation_sparsity")
    assert places(watcher)[3] == "encoder.layers.1.linear2"
    assert watcher.incident.before.startswith("encoder.layers.0 (cosine_similarity ")
    assert "training is finite, and in the held-out pass" in watcher.incident.paragraph


def test_a_division_by_zero_is_no_incident() -> None:
    """A bias that starts at 0 has no ratio, and a token of zeros no direction."""

    class Zeros(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])
            for layer in self.layers:
                nn.init.zeros_(layer[0].weight)
                nn.init.zeros_(layer[0].bias)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model, sink = Zeros(), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 3, 4)
    with Watcher(model, sink, every=1, update_every=1, optimizer=optimizer, reference=lambda: model(x)) as watcher:
        model(x).sum().backward()
        watcher.step(loss=1.0)
        optimizer.step()
    similarity = sink.row(0)[1]["cosine_similarity"]
    assert np.isnan(similarity.values).any()
    assert watcher.incident is None


def test_the_rows_around_it_stand_in_the_run_directory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Toy(), batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    out = tmp_path / "run"
    with watch(model, out=out, every=1, optimizer=optimizer) as watcher:
        for t in range(40):
            if t == 30:
                nan_weight(model, BROKEN, 0)
            loss = loss_of(model, inputs)
            loss.backward()
            watcher.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    run = Run.open(out)
    stored = json.loads((out / "incident.json").read_text())
    assert (stored.pop("run_id"), "checksum" in stored) == (run.identity.run_id, True)
    assert run.incident == {key: value for key, value in stored.items() if key not in ("checksum", "files")}
    assert run.incident is not None
    assert (run.incident["step"], run.incident["name"]) == (30, "decoder.layers.1.linear1.weight")
    kept = pd.read_parquet(out / "incident" / "ln_input.parquet")
    assert sorted(set(kept["step"])) == list(range(10, 34))
    stored = run.frame("ln_input").query("10 <= step < 34").reset_index(drop=True)
    columns = ["step", "site", "layer", "value"]
    pd.testing.assert_frame_equal(stored[columns], kept[columns], check_categorical=False, check_dtype=False)
    metrics = pd.read_parquet(out / "incident" / "metrics.parquet")
    assert metrics["loss"].isna().tolist() == [step >= 30 for step in range(10, 34)]
    assert Run.open(out).status.state == "finished"


def test_a_run_without_one_says_none(tmp_path: Path) -> None:
    model = Toy()
    with watch(model, out=tmp_path / "run") as watcher:
        loss_of(model, batch()).backward()
        watcher.step(loss=1.0)
    assert Run.open(tmp_path / "run").incident is None


def test_a_loop_that_never_calls_train_is_told_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = Toy().eval(), batch()
    with Watcher(model, Sink(), every=1) as watcher:
        for _ in range(3):
            loss_of(model, inputs).backward()
            watcher.step(loss=1.0)
    assert [record.message for record in caplog.records] == [
        "row 0: there is no number of the forward pass: watch sees forwards in training mode with gradients on, so "
        "call model.train() before them, and step() after each backward; and a model that torch.compile has run "
        "already as what torch.compile returned."
    ]


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        ("zero step update", "row 0: no parameter has a gradient: call step() after backward and before zero_grad."),
        ("update step zero", "row 0: the optimizer's step came before this one: call step() after backward and before"),
    ],
)
def test_a_step_in_the_wrong_place_is_told(order: str, sentence: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, inputs = Toy(), batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Watcher(model, Sink(), every=1, optimizer=optimizer) as watcher:
        for _ in range(3):
            loss_of(model, inputs).backward()
            for what in order.split():
                if what == "zero":
                    optimizer.zero_grad()
                elif what == "step":
                    watcher.step(loss=1.0)
                else:
                    optimizer.step()
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith(sentence)
    (warned,) = watcher.loop_warnings
    assert f"{warned}." == caplog.records[0].message


def test_padding_alone_is_nothing_recorded_and_no_incident() -> None:
    torch.manual_seed(0)
    model, sink, inputs = Toy(), Sink(), batch()
    nothing = {name: torch.zeros_like(mask) for name, mask in masks(inputs).items()}
    with Watcher(model, sink, every=1, mask=nothing, probes="ln_input,grad_norm") as watcher:
        loss_of(model, inputs).backward()
        watcher.step(loss=1.0)
    assert sink.row(0)[1]["ln_input"].absent.all()
    assert not sink.row(0)[1]["grad_norm"].absent.any()
    assert watcher.incident is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"optimizer": 5}, "optimizer = 5 must be a torch.optim.Optimizer."),
        ({"optimizer": []}, "optimizer = [] is empty: give one, several, or leave it out."),
        ({"optimizer": Toy()}, "optimizer = a Toy must be a torch.optim.Optimizer."),
        ({"mask": "nope"}, "mask = 'nope' must be a tensor, a dict of them by stack, or a function."),
        (
            {"reference": 5},
            "reference = 5 must be a function that runs the model on a fixed batch, 'first batch' or None.",
        ),
    ],
)
def test_arguments_of_another_kind_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        Watcher(Toy(), Sink(), **options)
    assert str(caught.value).startswith(sentence)
    with pytest.raises(UsageError, match=r"must be a torch\.nn\.Module"):
        Watcher(5, Sink())  # pyright: ignore


def test_a_resumed_run_keeps_its_first_incident() -> None:
    torch.manual_seed(0)
    model, inputs = Toy(), batch()
    nan_weight(model, BROKEN, 0)
    with Watcher(model, Sink(), every=1) as watcher:
        loss_of(model, inputs).backward()
        watcher.step(loss=1.0)
        watcher.flush()
        state = watcher.state_dict()
    first, sink = watcher.incident, Sink()
    with Watcher(model, sink, every=1) as resumed:
        resumed.load_state_dict(state)
        loss_of(model, inputs).backward()
        resumed.step(loss=1.0)
    assert first is not None
    assert resumed.incident == first
    assert not sink.dumps
