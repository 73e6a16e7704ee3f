"""One trial: its losses against an own computation, its stops, and what it leaves alone."""

from __future__ import annotations

import copy
import math
import random
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rest_slow import rest_slow
from small_models import (
    INPUTS,
    Quadratic,
    class_loss,
    clusters,
    ones,
    perceptron,
    quadratic_loss,
    state_of,
)
from torch import nn

import stabilitylab as sl
from stabilitylab.errors import InputError, UsageError
from stabilitylab.lr_find.folder import name_of
from stabilitylab.lr_find.halving import RatePlan, SearchStopped
from stabilitylab.lr_find.search import RateTrial
from stabilitylab.lr_find.subject import BatchStore, RateSubject, model_subject, schedule_of
from stabilitylab.lr_find.trial import RateRun, is_due
from stabilitylab.store import Run


def subject_of(model=None, optimizer=None, **more) -> RateSubject:
    model = perceptron() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3) if optimizer is None else optimizer
    settings = {"horizon": 60, "seeds": (0, 1, 2), "held_out": clusters(4, seed=5), **more}
    batches = settings.pop("batches", clusters(12))
    return model_subject(model, batches, settings.pop("loss_fn", class_loss), optimizer, **settings)


PLAN = RatePlan(1e-3, 60, warmup=6)


def run(subject: RateSubject, out: Path, updates: int = 60, rate: float = 1e-2, plan: RatePlan = PLAN, **more):
    return RateRun(subject, plan, out, RateTrial(rate, more.pop("seed", 0), updates, **more))


def test_losses_are_those_of_momentum_descent_with_warmup_cosine_and_clipping(tmp_path: Path) -> None:
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    subject = subject_of(
        model, optimizer, batches=ones(3), loss_fn=quadratic_loss, held_out=ones(2), schedule="cosine", warmup=6,
        clipping=0.5,
    )  # fmt: skip
    end = run(subject, tmp_path, rate=0.3).run()
    h, x, velocity = np.array([4.0, 1.0, 0.25]), np.ones(3), np.zeros(3)
    for t in range(60):
        rate = 0.3 * (0.5 * (1 + math.cos(math.pi * (t - 6) / 54)) if t >= 6 else (t + 1) / 6)
        gradient = h * x
        norm = math.sqrt(float(gradient @ gradient))
        gradient = gradient * min(1.0, 0.5 / (norm + 1e-6))
        velocity = 0.9 * velocity + gradient
        x = x - rate * velocity
    assert end.marks[60].loss == pytest.approx(0.5 * float(h @ x**2), abs=1e-12)
    assert end.marks[60].start == 0.5 * 5.25
    assert end.ran == 60


def test_a_stopped_trial_goes_on_bit_for_bit(tmp_path: Path) -> None:
    subject = subject_of(warmup=6)
    plan = replace(PLAN, horizon=60)
    whole = run(subject, tmp_path / "whole", plan=plan).run()
    asked = iter([""] * 23 + ["enough"] * 9)
    with pytest.raises(SearchStopped, match="enough"):
        run(subject, tmp_path / "parts", plan=plan).run(lambda: next(asked))
    path = tmp_path / "parts" / name_of(RateTrial(1e-2, 0, 60))
    assert Run.open(path).status.state == "interrupted"
    random.seed(5)
    rest = run(subject, tmp_path / "parts", plan=plan).run()
    assert rest.ran == 60 - 23
    assert rest.marks == whole.marks
    one = Run.open(tmp_path / "whole" / path.name).metrics
    assert one.equals(Run.open(path).metrics)
    assert list(one["step"]) == list(range(61))


def test_nothing_of_the_users_is_changed(tmp_path: Path) -> None:
    model = perceptron().train()
    model[3].eval()  # a flag of the user's
    optimizers = [torch.optim.AdamW(model[:2].parameters(), 1e-3), torch.optim.SGD(model[4:].parameters(), 0.1, 0.9)]
    class_loss(model, clusters(1)[0]).backward()
    for optimizer in optimizers:
        optimizer.step()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    weights, states = state_of(model), copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
    torch.manual_seed(3), np.random.seed(4), random.seed(5)  # noqa: NPY002
    generators = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    flags = [module.training for module in model.modules()]
    batches = clusters(6)
    kept = [(x.clone(), y.clone()) for x, y in batches]

    sl.lr_find(
        model,
        batches,
        class_loss,
        optimizers,
        held_out=clusters(2, seed=7),
        horizon=40,
        updates=300,
        out=tmp_path / "out",
    )

    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    for before, optimizer in zip(states, optimizers, strict=True):
        now = optimizer.state_dict()
        assert before["param_groups"] == now["param_groups"]
        for key, entries in before["state"].items():
            for name, value in entries.items():
                assert value is now["state"][key][name] or torch.equal(value, now["state"][key][name])
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    assert flags == [module.training for module in model.modules()]
    assert torch.equal(generators[0], torch.get_rng_state())
    assert str(generators[1]) == str(np.random.get_state())  # noqa: NPY002
    assert generators[2] == random.getstate()
    assert all(torch.equal(a, x) and torch.equal(b, y) for (a, b), (x, y) in zip(kept, batches, strict=True))


def test_groups_and_optimizers_keep_their_proportions(tmp_path: Path) -> None:
    model = perceptron()
    first = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[1].parameters()}], 4e-3)
    second = torch.optim.SGD(model[4].parameters(), 0.02)
    subject = subject_of(model, [first, second])
    assert subject.rate == 0.02
    assert subject.rates == (1e-3, 4e-3, 0.02)
    made = subject.make(0)
    made.set_rate(0.1)
    rates = [group["lr"] for optimizer in made.optimizers for group in optimizer.param_groups]
    assert rates == pytest.approx([0.005, 0.02, 0.1], abs=1e-15)
    assert [group["lr"] for group in first.param_groups] == [1e-3, 4e-3]
    own = {id(parameter) for parameter in made.model.parameters()}
    held = [p for optimizer in made.optimizers for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} <= own
    assert run(subject, tmp_path).run().marks[60].loss < math.log(6)


def test_the_peak_of_a_scheduled_optimizer_counts_and_a_rate_that_is_a_tensor_is_filled() -> None:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.0)
    assert subject_of(model, optimizer).rate == 1e-3
    tensor = torch.optim.AdamW(model.parameters(), torch.tensor(2e-3))
    subject = subject_of(model, tensor)
    made = subject.make(0)
    made.set_rate(0.5)
    assert float(made.optimizers[0].param_groups[0]["lr"]) == 0.5
    assert float(tensor.param_groups[0]["lr"]) == pytest.approx(2e-3, abs=1e-9)


@pytest.mark.parametrize("kind", rest_slow(["Muon", "Adafactor", "RAdam", "Adagrad"], ["Adagrad"]))
def test_other_optimizers_go_on_from_a_checkpoint(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 16, bias=False), nn.ReLU(), nn.Linear(16, 6, bias=False))
    subject = subject_of(model, lambda parameters: getattr(torch.optim, kind)(parameters, lr=1e-2))
    plan = replace(PLAN, horizon=200)
    assert plan.rungs == (200,)
    plan = replace(PLAN, horizon=300)
    whole = run(subject, tmp_path / "whole", 300, plan=plan).run()
    run(subject, tmp_path / "parts", 150, plan=plan).run()
    assert run(subject, tmp_path / "parts", 300, plan=plan).run().marks == whole.marks


def test_a_function_that_takes_the_model_gets_it() -> None:
    subject = subject_of(perceptron(), lambda model: torch.optim.SGD(model[4].parameters(), 0.5))
    assert subject.rate == 0.5


def test_a_loss_that_is_not_finite_ends_a_trial_at_once(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch) -> torch.Tensor:
        return class_loss(model, batch) * (math.nan if not torch.is_inference_mode_enabled() and model.training else 1)

    end = run(subject_of(loss_fn=loss), tmp_path).run()
    assert end.failed == (1, "the training loss is nan at update 0")
    assert end.at(60).failed
    assert Run.open(tmp_path / "lr0.01-s0").status.state == "diverged"


def test_a_loss_that_rises_and_stays_up_is_a_failure(tmp_path: Path) -> None:
    model = Quadratic()
    subject = subject_of(
        model, torch.optim.SGD(model.parameters(), 0.1), batches=ones(2), loss_fn=quadratic_loss, held_out=ones(2),
        horizon=300, warmup=0,
    )  # fmt: skip
    plan = RatePlan(0.1, 300)
    end = run(subject, tmp_path, 300, rate=0.51, plan=plan).run()  # 2 / 4 is the largest stable rate
    assert end.failed is not None
    assert end.failed[0] == 150
    assert "stays up" in end.failed[1]
    assert run(subject, tmp_path, 300, rate=0.49, plan=plan).run().failed is None


def test_without_held_out_data_the_training_loss_is_smoothed(tmp_path: Path) -> None:
    subject = subject_of(held_out=None)
    end = run(subject, tmp_path).run()
    metrics = Run.open(tmp_path / "lr0.01-s0").metrics
    assert end.marks[60].losses == pytest.approx(metrics["loss"].to_numpy()[50:60], abs=0)
    assert end.marks[60].start == metrics["loss"][0]
    assert metrics["smoothed_loss"].iloc[-1] == pytest.approx(metrics["loss"][50:60].mean(), abs=1e-12)


def test_seeds_differ_in_order_and_dropout_and_a_function_in_initial_weights_too(tmp_path: Path) -> None:
    subject = subject_of()
    starts = [run(subject, tmp_path, seed=seed).run().start for seed in (0, 1)]
    assert starts[0] == starts[1]
    fresh = model_subject(
        lambda: nn.Linear(INPUTS, 6), clusters(4), class_loss, torch.optim.AdamW, horizon=60, seeds=(0, 1),
        held_out=clusters(2),
    )  # fmt: skip
    found = [run(fresh, tmp_path / "fresh", seed=seed).run().start for seed in (0, 1)]
    assert found[0] != found[1]


@pytest.mark.parametrize("precision", ["bf16"])
def test_autocast_changes_the_losses_and_trains(tmp_path: Path, precision: str) -> None:
    plain, cast = (run(subject_of(precision=one), tmp_path / one).run().marks[60].loss for one in ("fp32", precision))
    assert plain != cast
    assert cast == pytest.approx(plain, abs=0.1)


@pytest.mark.parametrize(
    ("w", "t", "share"),
    [(10, 0, 0.1), (10, 9, 1.0), (0, 0, 1.0)],
)
@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "inverse_sqrt"])
def test_warmup_is_linear(shape, w: int, t: int, share: float) -> None:
    assert schedule_of(shape, 110)(t, w) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(
    ("shape", "share"),
    [("constant", 1.0), ("linear", 0.5), ("cosine", 0.5), ("inverse_sqrt", math.sqrt(10 / 60))],
)
def test_schedules_half_way(shape, share: float) -> None:
    assert schedule_of(shape, 110)(60, 10) == pytest.approx(share, abs=1e-12)
    assert schedule_of(lambda t: 1 / (t + 1), 110)(3, 8) == pytest.approx(0.25 * 0.5, abs=1e-12)


def test_batches_of_a_list_come_once_an_epoch_in_an_order_of_the_seed() -> None:
    store = BatchStore([0, 1, 2, 3, 4], 10, (0, 1))
    orders = [[store(t, seed) for t in range(10)] for seed in (0, 1)]
    for order in orders:
        assert sorted(order[:5]) == sorted(order[5:]) == [0, 1, 2, 3, 4]
    assert orders[0] != orders[1]
    assert [store(t, 0) for t in range(10)] == orders[0]


def test_a_stream_is_read_as_far_as_asked_and_kept() -> None:
    read = []

    def stream():
        for number in range(4):
            read.append(number)
            yield number

    store = BatchStore(stream(), 10, (0,))
    assert store(1, 0) == 1
    assert read == [0, 1]
    assert [store(t, 0) for t in range(6)] == [0, 1, 2, 3, 0, 1]


def test_a_function_of_the_update_gives_other_seeds_later_updates() -> None:
    store = BatchStore(lambda t: t, 10, (0, 7))
    assert (store(3, 0), store(3, 7)) == (3, 13)


def test_losses_are_measured_more_rarely_later_on() -> None:
    due = [t for t in range(2000) if is_due(t)]
    assert due[:4] == [0, 10, 20, 30]
    steps = np.diff(due)
    assert (steps >= 10).all()
    assert steps[-1] == due[-2] // 20


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"loss_fn": lambda model, batch: batch[0].sum()}, "the loss has no gradient"),
        ({"loss_fn": lambda model, batch: model(batch[0])}, "it must return one number"),
        ({"loss_fn": lambda model, batch: 1.0}, "gave float"),
        ({"optimizer": lambda p: torch.optim.LBFGS(p, lr=1e-2)}, "LBFGS needs a closure"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}, "all learning rates of the optimizer are 0"),
        (
            {"optimizer": lambda p: torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)},
            "no parameter of the model",
        ),
        ({"optimizer": "adam"}, "optimizer must be"),
        ({"precision": "fp8"}, "precision"),
        ({"clipping": -1}, "clipping"),
        ({"schedule": "step"}, "schedule"),
        ({"batches": []}, "batches is empty"),
        ({"batches": iter([])}, "batches is empty"),
        ({"batches": 5}, "batches is int"),
        ({"held_out": []}, "held_out is empty"),
        ({"model": "gpt2"}, "model must be"),
        ({"model": nn.ReLU()}, "with parameters"),
        ({"model": nn.Linear(2, 2).requires_grad_(False)}, "requires a gradient"),
    ],
)
def test_what_cannot_be_searched_is_told(tmp_path: Path, change, sentence: str) -> None:
    with warnings.catch_warnings(), pytest.raises(UsageError, match=sentence):
        run(subject_of(**{"optimizer": torch.optim.AdamW, **change}), tmp_path).run()


def test_an_error_of_the_loss_is_told(tmp_path: Path) -> None:
    def broken(model: nn.Module, batch) -> torch.Tensor:
        raise KeyError("labels")

    with pytest.raises(InputError, match="KeyError: 'labels'"):
        run(subject_of(loss_fn=broken), tmp_path).run()


def test_a_rate_that_is_no_number_is_told() -> None:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(UsageError, match="relative_step=False"):
        subject_of(model, optimizer)
