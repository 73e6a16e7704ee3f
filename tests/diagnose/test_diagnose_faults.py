"""Faults injected into watched training: the right step, place and cause are named; healthy runs are called healthy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diagnose_cases import Copier, Made, falling, found, kinds, layer_rows, made, only, train
from edited_runs import edit
from rest_slow import rest_slow

AT = 24  # the faulty step
SOON = 40  # steps: a fault that is found at once needs no more
LAYER = 3  # counted from 1


def nan_in_a_weight(t: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
    if t == AT:
        with torch.no_grad():
            model.layers[LAYER - 1].linear1.weight[0, 0] = float("nan")


def overflow_of_an_activation(t: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
    layer = model.layers[LAYER - 1].linear2
    if t == AT:
        layer.handle = layer.register_forward_hook(lambda module, x, y: y * 1e30 * 1e30)
    if t == AT + 1:
        layer.handle.remove()


def nan_in_a_gradient(t: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
    weight = model.layers[LAYER - 1].linear2.weight
    if t == AT:
        model.handle = weight.register_hook(lambda gradient: gradient * float("nan"))
    if t == AT + 1:
        model.handle.remove()


def weights_times_1000(t: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
    if t == AT:
        with torch.no_grad():
            for parameter in model.layers[LAYER - 1].linear2.parameters():
                parameter.mul_(1000)


def weights_zeroed(t: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
    if t == AT:
        with torch.no_grad():
            for parameter in model.layers[LAYER - 1].parameters():
                parameter.zero_()


def layer_frozen(t: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
    if t == AT:
        model.layers[LAYER - 1].requires_grad_(False)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 4])
def test_a_nan_in_one_weight_is_found_where_it_enters_the_forward_pass(tmp_path: Path, every: int) -> None:
    run = train(tmp_path / "run", fault=nan_in_a_weight, every=every)
    told = only(found(run), "non_finite")
    assert told.place is not None
    assert (told.step, told.phase, told.place.layer, told.place.sublayer) == (AT, "step", LAYER, "linear1")
    assert "parameter layers.2.linear1.weight (stack layers, layer 3) holds a value that is NaN" in told.evidence
    (tmp_path / "run" / "incident.json").unlink()  # from here on, what the tables alone say
    diagnosis = found(run)
    event = only(diagnosis, "non_finite")
    assert (event.step, event.phase) == (AT, "reference")  # which depends on the weights alone
    assert event.place is not None
    assert (event.place.layer, event.place.sublayer) == (LAYER, "norm2")  # the norm behind linear1
    behind = f"after it, in the training pass of that row: ln_input.value of layer {LAYER} of layers (norm2) is nan"
    assert behind in event.evidence
    assert ("does not decide" in event.evidence) == (every == 4)  # the update of step 23 was not recorded
    assert diagnosis.verdict == "failure"
    assert diagnosis.cause.first is event


def test_an_overflow_of_one_activation_is_inf_at_its_layer(tmp_path: Path) -> None:
    event = only(found(train(tmp_path / "run", fault=overflow_of_an_activation, steps=SOON)), "non_finite")
    assert (event.step, event.phase, event.numbers["value"]) == (AT, "forward", "inf")
    assert event.place is not None
    assert (event.place.layer, event.place.sublayer) == (LAYER, "norm2")


def test_a_nan_gradient_is_found_in_the_backward_pass_and_not_in_the_forward_pass_after_it(tmp_path: Path) -> None:
    event = only(found(train(tmp_path / "run", fault=nan_in_a_gradient, steps=SOON)), "non_finite")
    assert (event.step, event.phase) == (AT, "backward")
    assert event.place is not None
    assert (event.place.layer, event.place.sublayer) == (LAYER, "linear2")


def test_between_probed_rows_the_incident_names_the_weight_and_the_loss_tells_the_step_alone(tmp_path: Path) -> None:
    run = train(tmp_path / "run", fault=nan_in_a_weight, every=16, steps=SOON)  # rows 16 and 32
    told = only(found(run), "non_finite")
    assert told.place is not None
    assert (told.step, told.phase, told.place.layer, told.place.sublayer) == (AT, "step", LAYER, "linear1")
    (run / "incident.json").unlink()  # from here on, what the tables alone say
    event = only(found(run), "non_finite")
    assert (event.step, event.phase, event.after) == (AT, "loss", AT - 1)
    assert event.place is None  # one update later every weight is NaN
    assert (
        "by the next recorded row with tables, 32, every place of activation_sparsity, model_update, " in event.evidence
    )
    assert "ln_input recorded step 16 and step 32 but not step 24" in event.evidence
    assert "does not decide between the update of step 23 and the passes of step 24" in event.evidence


@pytest.mark.slow
def test_a_nan_gradient_between_probed_rows_is_placed_by_the_next_one(tmp_path: Path) -> None:
    event = only(found(train(tmp_path / "run", fault=nan_in_a_gradient, every=5)), "non_finite")  # row 25 is the next
    assert (event.step, event.phase, event.probe) == (AT, "backward", "grad_norm_total")
    assert event.place is not None
    assert (event.place.layer, event.place.sublayer) == (LAYER, "norm2")  # the norm behind linear2
    assert "does not decide which place of step 24 came first" in event.evidence


@pytest.mark.parametrize("stacks", [("encoder", "decoder"), ("t5.enc", "t5.dec")])
@pytest.mark.parametrize(("broken", "place"), [(1, ("first", 2)), (2, ("second", 1)), (3, ("second", 2))])
def test_of_two_forward_passes_the_place_nearest_to_the_input_counts(
    tmp_path: Path, stacks: tuple[str, str], broken: int, place: tuple[str, int]
) -> None:
    """A layer's norm comes after its activations, so that the held-out pass shows the fault one layer later."""
    rows = [*layer_rows(2, stacks[0]), *layer_rows(2, stacks[1])]

    def lost_from(first: int) -> Callable[[int], list[float]]:
        return lambda step: [math.nan if step == 3 and n >= first else 1.0 for n in range(4)]

    tables = {
        "activation_sparsity": Made(rows, ["nonzero_fraction"], lost_from(broken + 1), range(5)),
        "ln_input": Made(rows, ["value"], lost_from(broken), range(5)),
    }
    event = only(found(made(tmp_path / "run", {"loss": falling(5)}, tables)), "non_finite")
    assert event.place is not None
    assert (event.step, event.place.stack, event.place.layer) == (3, stacks[place[0] == "second"], place[1])


def test_a_learning_rate_jump_comes_first_and_its_consequences_follow(tmp_path: Path) -> None:
    diagnosis = found(train(tmp_path / "run", rate=lambda t: 3e-3 * (300 if t >= AT else 1)))
    first = diagnosis.cause.first
    assert first is not None
    assert (first.kind, first.step) == ("lr_jump", AT)
    assert first.numbers["times_maximum_before"] == pytest.approx(300)
    chain = [event.kind for event in diagnosis.cause.chain]
    assert chain[:2] == ["lr_jump", "update_jump"]
    assert only(diagnosis, "update_jump").step == AT
    assert {"loss_spike", "divergence", "plateau"} & kinds(diagnosis)
    assert diagnosis.cause.rivals == ()
    assert diagnosis.paragraph.index("learning-rate jump") < diagnosis.paragraph.index("update jump")
    placed = [event for event in diagnosis.cause.chain if event.place is not None]
    assert f"Where: {'; '.join(f'{event.title} in {event.where}' for event in placed[:4])}" in diagnosis.paragraph


@pytest.mark.parametrize(
    ("fault", "how"),
    rest_slow(
        [(weights_times_1000, "1e+03 times"), (weights_zeroed, "exactly 0")], [(weights_times_1000, "1e+03 times")]
    ),
)
def test_a_broken_layer_is_told_from_an_update(tmp_path: Path, fault, how: str) -> None:
    diagnosis = found(train(tmp_path / "run", fault=fault, steps=SOON))
    event = only(diagnosis, "weight_jump")
    assert event.step == AT
    assert event.place is not None
    assert event.place.layer == LAYER
    assert how in event.evidence
    assert diagnosis.cause.first is event
    assert "non_finite" not in kinds(diagnosis)  # the cosine of a zero vector, 0 / 0, is no broken number
    if fault is weights_times_1000:  # which shows in the norm behind them
        behind = only(diagnosis, "ln_growth")
        assert behind.step == AT
        assert behind.place is not None
        assert (behind.place.layer, behind.place.sublayer) == (LAYER, "norm2")


@pytest.mark.slow
def test_a_layer_frozen_on_the_way_is_a_warning_and_one_frozen_from_the_start_a_note(tmp_path: Path) -> None:
    diagnosis = found(train(tmp_path / "late", fault=layer_frozen))
    event = only(diagnosis, "dead_layer")
    assert (event.step, event.severity) == (AT, "warning")
    assert event.evidence.startswith(f"layer {LAYER} of layers has no gradient")
    early = found(train(tmp_path / "early", fault=lambda t, model, o: model.layers[1].requires_grad_(False)))
    assert (only(early, "dead_layer").severity, early.verdict) == ("note", "healthy")


@pytest.mark.parametrize(
    ("case", "severity", "told"),
    [
        ("detached", "warning", "no gradient, though parameters there require one, from the start"),
        ("frozen", "note", "no gradient (frozen) from the start"),
        ("left out", "note", "no gradient (not in the optimizer) from the start"),
        ("old", "note", "no gradient (frozen, or unused) from the start"),
    ],
)
def test_layers_without_a_gradient_are_a_warning_where_they_were_to_be_trained(
    tmp_path: Path, case: str, severity: str, told: str
) -> None:
    """Layers 1 and 2 of 4, by a ``detach`` behind them; an old run does not say what was to be trained."""

    def cut(t: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
        if t:
            return
        model.layers[1].register_forward_hook(lambda module, x, y: y.detach())
        below = [*model.embedding.parameters(), *model.layers[:2].parameters()]
        if case == "frozen":
            for parameter in below:
                parameter.requires_grad_(False)
        if case == "left out":
            group, mine = optimizer.param_groups[0], {id(parameter) for parameter in below}
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in mine]

    path = train(tmp_path / "run", fault=cut, steps=5)
    if case == "old":
        document = json.loads((path / "run.json").read_text())
        del document["places_untrained"]
        edit(path / "run.json", document)
    diagnosis = found(path)
    event = only(diagnosis, "dead_layer")
    assert (event.severity, event.step) == (severity, 0)
    assert event.evidence == f"embedding, layer 1 of layers, layer 2 of layers have {told}"
    assert diagnosis.verdict == ("warning" if severity == "warning" else "open")


SKIPS = {0: {1}, 3: {2}, 4: {2}, 5: {2}, 6: {1}, 9: {3}, 10: {3}, 11: {3}}  # step -> layers, as chance might draw them


@pytest.mark.parametrize(
    ("skips", "severity", "since"),
    [
        (SKIPS, "note", "from step 3 until 6"),
        ({step: {2} for step in range(7, 12)}, "warning", "from step 7 on"),  # a fault: it is never called again
    ],
)
def test_layers_that_the_forward_pass_skips_are_told_from_frozen_ones(
    tmp_path: Path, skips: dict[int, set[int]], severity: str, since: str
) -> None:
    def skip(t: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
        model.skipped = frozenset(skips.get(t, ()))

    diagnosis = found(train(tmp_path / "run", fault=skip, steps=12))
    events = [event for event in diagnosis.events if event.kind == "dead_layer"]
    assert {event.severity for event in events} == {severity}
    told = f"layer 3 of layers has no gradient, since the forward pass did not call it, {since}"
    assert events[0].evidence == told


def test_a_frozen_layer_that_is_skipped_in_some_rows_is_a_warning_to_the_end(tmp_path: Path) -> None:
    def freeze(t: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
        model.skipped = frozenset({LAYER - 1} if t in (2, 9) else ())
        if t == 5:
            model.layers[LAYER - 1].requires_grad_(False)

    events = [e for e in found(train(tmp_path / "run", fault=freeze, steps=12)).events if e.kind == "dead_layer"]
    assert [(event.severity, event.evidence) for event in events] == [
        ("warning", f"layer {LAYER} of layers has no gradient (frozen, or unused) from step 5 on")
    ]


def test_a_layer_that_the_first_row_skips_leaves_the_list_of_places_without_a_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def skip(t: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
        model.skipped = frozenset({1, 3} if t == 0 else {3})

    path = train(tmp_path / "run", fault=skip, steps=4)
    unseen = json.loads((path / "run.json").read_text())["places_unseen"]
    assert unseen["ln_input"] == ["layers.3.norm1", "layers.3.norm2"]
    assert unseen["activation_grad_norm"] == ["layers.3"]
    said = next(text for text in caplog.messages if text.startswith("row 0: layers.1.norm1"))
    assert "not called in the training pass of this row" in said
    document = json.loads((path / "run.json").read_text())
    document["places_unseen"] = {"ln_input": ["layers.1.norm1", "layers.3.norm1"]}  # as older versions have it
    edit(path / "run.json", document)
    assert "ln_input (no number at layers.3.norm1)" in found(path).paragraph


def test_parameters_that_the_optimizer_does_not_have_are_found(tmp_path: Path) -> None:
    def forgotten(t: int, model: Copier, optimizer: torch.optim.Optimizer) -> None:
        if t == 0:
            mine = {id(p) for p in model.layers[LAYER - 1].parameters()}
            group = optimizer.param_groups[0]
            group["params"] = [p for p in group["params"] if id(p) not in mine]

    event = only(found(train(tmp_path / "run", fault=forgotten, steps=SOON)), "dead_layer")
    assert event.evidence.startswith(f"layer {LAYER} of layers has a gradient but no update")


@pytest.mark.parametrize("seed", rest_slow([0, 1], [0]))
@pytest.mark.parametrize("every", rest_slow([1, "log"], [1]))
@pytest.mark.parametrize(("pre", "sgd"), rest_slow([(False, False), (True, False), (True, True)], [(False, False)]))
def test_a_healthy_watched_run_is_called_healthy(tmp_path: Path, seed: int, every, pre: bool, sgd: bool) -> None:
    rate = (lambda t: 0.05) if sgd else (lambda t: 3e-3 * min(1, (t + 1) / 20))
    diagnosis = found(train(tmp_path / "run", seed=seed, every=every, pre=pre, sgd=sgd, rate=rate))
    assert diagnosis.events == ()
    assert diagnosis.verdict == "healthy"
    assert diagnosis.paragraph.startswith(f"{tmp_path / 'run'} is healthy")
    assert diagnosis.checked.keys() >= {"non_finite", "loss_spike", "vanishing_gradient", "update_jump", "lr_jump"}
    of_translators = {"constant_encoder", "ignored_source", "alike_tokens"}
    assert diagnosis.unchecked.keys() == {"attention_collapse", "beyond_the_edge", *of_translators}
