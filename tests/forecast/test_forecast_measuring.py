"""The predictors against gradients and updates that are taken independently; and their lines of evidence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forecast_cases import candidate_of, config_of, dataset, model_of, own

from stabilitylab.errors import InputError, UsageError
from stabilitylab.forecast import measure, of_yours, trials
from stabilitylab.forecast.candidate import entropy
from stabilitylab.forecast.measuring import (
    RATE,
    SMALL,
    UPDATES,
    Probed,
    at_start,
    first_updates,
    gradient_decades,
    growth,
)
from stabilitylab.forecast.ramp import one_update
from stabilitylab.models import ARCHS, Transformer
from stabilitylab.schema import Cells, Row, Table


def backward(model: Transformer) -> float:
    """The widest of both stacks' decades of ||dE/dx|| over layers; leaves dE/dtheta in the model."""
    outputs: dict[str, list[torch.Tensor]] = {name: [] for name in model.stacks}

    def keep(name: str, out) -> None:
        x = out if isinstance(out, torch.Tensor) else out[0]
        x.retain_grad()
        outputs[name].append(x)

    handles = [
        layer.register_forward_hook(lambda _m, _i, out, name=name: keep(name, out))
        for name, stack in model.stacks.items()
        for layer in stack.layers
    ]
    batch = dataset().micro_batch(0)
    counted = batch.weight > 0
    F.cross_entropy(model(**batch.inputs)[counted], batch.labels[counted], label_smoothing=0.1).backward()
    for handle in handles:
        handle.remove()
    norms = [[float(x.grad.norm()) for x in own if x.grad is not None] for own in outputs.values()]
    return max(math.log10(max(one) / min(one)) for one in norms if one and max(one) > 0)


@pytest.mark.parametrize("arch", ["postln", "preln", "admin", "branchnorm", "rezero"])
def test_gradient_and_update_are_those_of_a_model_in_float64(arch: str) -> None:
    numbers, _ = first_updates(candidate_of(arch), 0)
    model = model_of(config_of(arch), torch.float64)
    assert numbers["gradient"] == pytest.approx(backward(model), abs=1e-4)
    batch = dataset().micro_batch(0)

    @torch.no_grad()
    def output() -> torch.Tensor:
        return model.hidden(**batch.inputs)[batch.inputs["target_mask"]]

    before = output()
    torch.optim.Adam(model.parameters(), lr=SMALL, betas=(0.9, 0.98), eps=1e-8).step()
    share = float((output() - before).norm(dim=-1).mean() / (math.sqrt(2) * before.norm(dim=-1).mean()))
    facts, sizes, _ = at_start(candidate_of(arch))
    assert sizes["update"] == pytest.approx(math.log10(share), abs=2e-3)
    assert (facts["layers"], facts["stacks"], facts["width"]) == (5, 2, 16)


@pytest.mark.parametrize("warmup", [0, 40, 10])
def test_the_first_updates_reach_the_rate_within_the_warm_up(warmup: int) -> None:
    numbers, _ = first_updates(candidate_of("preln"), warmup)
    model = model_of(config_of("preln"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-8, weight_decay=1e-4)
    for t in range(UPDATES):
        share = min(1.0, (t + 1) / min(warmup, UPDATES)) if warmup else 1.0
        for group in optimizer.param_groups:
            group["lr"] = RATE * share
        batch = dataset().micro_batch(t)
        counted = batch.weight > 0
        F.cross_entropy(model(**batch.inputs)[counted], batch.labels[counted], label_smoothing=0.1).backward()
        optimizer.step()
        optimizer.zero_grad()
    held_out = dataset().held_out
    counted = held_out.weight > 0
    with torch.no_grad():
        later = float(F.cross_entropy(model(**held_out.inputs)[counted], held_out.labels[counted]))
    assert numbers["loss_later"] == pytest.approx(later, rel=1e-4)


def test_the_critical_rate_is_where_the_held_out_loss_is_what_it_was() -> None:
    candidate = candidate_of("preln")
    numbers, _ = first_updates(candidate, 0)
    model = model_of(config_of("preln"), torch.float64)
    backward(model)
    held_out, theta = dataset().held_out, [p.detach().clone() for p in model.parameters()]
    update = [torch.zeros_like(p) if p.grad is None else p.grad / (p.grad.abs() + 1e-8) for p in model.parameters()]
    real = held_out.weight > 0

    @torch.no_grad()
    def rise(rate: float) -> float:
        for p, start, step in zip(model.parameters(), theta, update, strict=True):
            p.copy_(start * (1 - rate * 1e-4) - rate * step)
        return float(F.cross_entropy(model(**held_out.inputs)[real], held_out.labels[real]))

    critical = 10 ** numbers["critical_start"]
    start = rise(0.0)
    assert rise(critical / 1.1) < start < rise(critical * 1.1)


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != "tfixup"])
def test_every_architecture_has_its_numbers(arch: str) -> None:
    numbers, lines = first_updates(candidate_of(arch), 40)
    assert all(math.isfinite(value) for value in numbers.values()), numbers
    assert set(lines) == {"gradient", "growth"}


def test_a_whole_measurement_has_a_line_for_each_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "UPDATES", 20)
    found = measure(candidate_of("deepnorm"), 40)
    assert {name for name in found.numbers if not math.isfinite(found.numbers[name])} == set()
    starts = (
        "trials of 20 updates with a warm-up of 40, by the held-out loss: learn at",
        "trials of 20 updates with no warm-up, by the held-out loss: learn at",
        "first update: the held-out loss rises beyond",
        *("gradient: ||dE/dx|| spans", "norm input: ", "one update at 0.0001 moves the output of decoder by"),
    )
    assert all(any(line.startswith(start) for line in found.evidence) for start in starts)
    assert len(found.evidence) == len(starts)
    assert found.numbers["trial"] == found.trials[40].edge
    assert found.numbers["trial_cold"] == found.trials[0].edge
    assert found.seconds > 0
    again = measure(candidate_of("deepnorm"), 40)
    assert again.numbers == found.numbers


def test_a_model_of_ones_own_stays_as_it_is_and_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "UPDATES", 20)
    given = own()
    before = {name: value.clone() for name, value in given["model"].state_dict().items()}
    state = torch.get_rng_state()
    found = measure(of_yours("mine:own", given), 40)
    assert all(torch.equal(before[name], value) for name, value in given["model"].state_dict().items())
    assert not given["optimizer"].state
    assert [group["lr"] for group in given["optimizer"].param_groups] == [1e-3, 4e-3]
    assert torch.equal(state, torch.get_rng_state())
    assert found.facts["layers"] == 3
    assert found.facts["width"] == 16
    assert "by the held-out loss: learn at" in found.evidence[0]
    assert math.isfinite(found.numbers["trial"])


def test_a_model_without_layers_is_one_sentence() -> None:
    given = own() | {"model": torch.nn.Linear(3, 3), "optimizer": None}
    with pytest.raises(UsageError, match="no stack of layers was found"):
        first_updates(of_yours("mine:own", given), 0)


def rows(*tables: tuple[str, tuple[str, ...], list[tuple[int, tuple[float, ...]]]]) -> Probed:
    sink, cells = Probed(), {}
    for name, columns, values in tables:
        places = tuple(Row(f"{n}", "encoder", layer, "ffn") for n, (layer, _) in enumerate(values))
        sink.tables[name] = Table(name, columns, places)
        cells[name] = Cells(np.array([v for _, v in values]), np.zeros(len(values), dtype=bool))
    sink.rows[0] = cells
    return sink


def test_growth_takes_norms_on_the_stream_else_the_stream_itself() -> None:
    nan = math.nan
    both = ("value", "shortcut")
    inputs = (
        "ln_input",
        both,
        [(1, (1.0, 1.0)), (1, (500.0, nan)), (2, (90.0, 1.0)), (2, (110.0, 1.0)), (0, (1e6, nan))],
    )
    stream = ("residual_norm", ("value",), [(0, (3.0,)), (1, (2.0,)), (2, (20.0,))])
    inner = ("ln_input", both, [(1, (1.0, nan)), (2, (5.0, nan))])
    foreign = ("ln_input", ("value",), [(1, (1.0,)), (2, (5.0,))])  # a model that shows no taps
    assert growth(rows(inputs, stream), 0)[0] == pytest.approx(2.0)
    assert growth(rows(inner, stream), 0)[0] == pytest.approx(1.0)
    assert growth(rows(stream), 0)[0] == pytest.approx(1.0)
    assert growth(rows(foreign, stream), 0)[0] == pytest.approx(math.log10(5))
    assert "100 times as large in layer 2 of encoder as in layer 1" in growth(rows(inputs), 0)[1].replace(
        "1e+02", "100"
    )
    assert math.isnan(growth(rows(("residual_norm", ("value",), [(1, (1.0,)), (2, (math.inf,))])), 0)[0])


def test_decades_are_of_layer_outputs_and_tell_no_gradient_from_one_that_ends() -> None:
    def table(*values: tuple[int, float]) -> list[tuple[Row, float]]:
        return [(Row(f"{n}", "decoder", layer, "ffn"), value) for n, (layer, value) in enumerate(values)]

    decades, line = gradient_decades(table((0, 1e-9), (1, 7.0), (1, 1e-3), (2, 1e-7), (2, 10.0)))
    assert decades == pytest.approx(4.0)
    assert line == "gradient: ||dE/dx|| spans 4 decades, largest at layer 2 of decoder, smallest at layer 1"
    assert gradient_decades(table((1, 0.0), (2, 0.0))) == (0.0, "")
    assert gradient_decades(table((1, 0.0), (2, 2.0)))[0] == math.inf
    assert math.isnan(gradient_decades(table((1, math.nan), (2, 2.0)))[0])
    assert gradient_decades(table((1, 2.0), (2, 2.0)))[1] == "gradient: ||dE/dx|| is the same at all layers of decoder"


def test_the_baseline_of_ones_own_batches_is_the_entropy_of_their_labels() -> None:
    labels = torch.tensor([[0, 0, 1, -100], [0, 0, 1, 1]])
    counts = np.array([4, 3]) / 7
    assert entropy([{"labels": labels}, {"other": 3}]) == pytest.approx(float(-(counts * np.log(counts)).sum()))
    assert entropy([{"labels": labels.float()}]) is None
    assert entropy([{"labels": torch.full((2, 2), -100)}]) is None
    assert entropy([torch.ones(2)]) is None
    assert of_yours("mine:own", own()).baseline == pytest.approx(math.log(12), abs=0.05)
    assert of_yours("mine:own", own() | {"baseline": 2.5}).baseline == 2.5


def test_gradients_are_clipped_where_training_clips_them() -> None:
    """By SGD at rate 1 the parameters move by the norm that is clipped to, exactly."""
    for clipping, moved in ((0.01, 0.01), (1e9, None)):
        candidate = of_yours("mine:own", own() | {"optimizer": None, "clipping": clipping})
        model = candidate.model()
        sgd = torch.optim.SGD(model.parameters(), 1.0)
        before = [p.detach().clone() for p in model.parameters()]
        one_update(candidate, model, sgd, 0)
        pairs = zip(model.parameters(), before, strict=True)
        norm = math.sqrt(sum(float((now.detach() - old).square().sum()) for now, old in pairs))
        assert (norm == pytest.approx(moved, rel=1e-3)) if moved else (norm > 0.1)
    assert candidate_of("postln", train={"clip_norm": 0.5}).clipping == 0.5


def test_what_the_cover_asks_for_may_be_said_of_ones_own_model() -> None:
    candidate = of_yours("mine:own", own() | {"clipping": 0, "classes": 12})
    assert (candidate.facts["clipping"], candidate.facts["classes"], candidate.clipping) == (0, 12, 0.0)
    assert not {"clipping", "classes"} & {*of_yours("mine:own", own()).facts}
    for key, value in (("clipping", -1), ("classes", "many"), ("classes", math.inf), ("clipping", True)):
        with pytest.raises(UsageError, match=f"{key}=.*: give "):
            of_yours("mine:own", own() | {key: value})


def test_a_loss_that_is_not_finite_at_the_start_is_no_forecast() -> None:
    given = own()
    with torch.no_grad():
        given["model"].head.weight[0, 0] = math.nan
    with pytest.raises(InputError, match="the held-out loss of mine:own is nan before its first update"):
        measure(of_yours("mine:own", given))


def test_groups_of_ones_own_optimizer_keep_their_proportions() -> None:
    candidate = of_yours("mine:own", own())
    optimizer = candidate.optimizer(candidate.model(), 1e-2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([2.5e-3, 1e-2])
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.95)] * 2
    assert candidate.facts["optimizer"] == "adamw (0.9, 0.95)"
