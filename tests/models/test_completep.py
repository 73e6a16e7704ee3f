"""CompleteP: its multiplier, its optimizer groups, and that they reach the optimizer and the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_model_invariants import copy_weights, gradients

from stabilitylab.config import TrainConfig, parse_set, resolve
from stabilitylab.errors import InputError
from stabilitylab.models import ARCHS, Place, Transformer, build_model
from stabilitylab.models.base import Factors
from stabilitylab.models.groups import groups_of
from stabilitylab.store import Run, RunWriter
from stabilitylab.train import plan, resume, start
from stabilitylab.train.loop import Trainer
from stabilitylab.train.recipe import adamw, optimizer_of, param_groups, set_rate

SIZES: dict[str, Any] = {"d_model": 16, "d_ffn": 32, "heads": 2, "source_vocab": 37, "target_vocab": 37}

GROUPED = {"completep", "hyper-connections", "hyper-connections-static"}  # give the optimizer groups


def built(depth: int = 8, **options: Any) -> Transformer:
    return build_model(arch="completep", stack="decoder", depth=depth, options=options, **SIZES)


@pytest.mark.parametrize(("a", "multiplier", "rate"), [(1.0, 0.25, 1.0), (0.5, 0.5, 0.5)])
def test_the_multiplier_and_the_rate_at_four_times_the_base(a, multiplier, rate) -> None:
    residual = next(iter(built(a=a).residuals()))
    assert float(residual.multiplier) == multiplier
    assert residual.factors("decoder.1.ffn.fc1") == Factors(lr=rate, eps=multiplier, decay=1.0)
    assert ARCHS["completep"].constants(Place("decoder", 0, "", 64, 0, 8))["multiplier of F"] == 0.25


def test_at_the_base_depth_it_is_preln_bit_for_bit(pairs, randomise, loss_of) -> None:
    inputs = {"tokens": pairs["target"], "mask": pairs["target_mask"]}
    for settings in ({"depth": 2}, {"depth": 6, "base_layers": 6}):
        completep = randomise(built(**settings))
        preln = copy_weights(completep, build_model(arch="preln", stack="decoder", depth=settings["depth"], **SIZES))
        expected, found = (gradients(model, loss_of(model, inputs)) for model in (preln, completep))
        assert all(torch.equal(gradient, found[name]) for name, gradient in expected.items())
        assert {group.factors.lr for group in groups_of(completep)} == {1.0}


def test_each_parameter_is_in_one_group_of_its_role() -> None:
    model = built(a=0.5)
    groups = groups_of(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert sorted(names[p] for group in groups for p in group.parameters) == sorted(names.values())
    by_role = {role: group.factors for group in groups for role in group.roles}
    assert by_role["decoder.3.ffn.fc1"] == Factors(0.5, 0.5, 1.0)
    assert by_role["decoder.3.self_attn.norm.weight"] == by_role["decoder.3.ffn.fc2.bias"] == Factors(0.5, 0.5, 0.0)
    assert by_role["decoder.embedding"] == Factors(1.0, 1.0, 1.0)
    assert by_role["decoder.norm.weight"] == by_role["decoder.norm.bias"] == Factors(1.0, 1.0, 0.0)


@pytest.mark.parametrize("arch", sorted(set(ARCHS) - GROUPED))
def test_all_others_have_one_group_in_the_order_of_the_model(arch) -> None:
    model = build_model(arch=arch, depth=4, **SIZES)
    (group,) = groups_of(model)
    assert group.factors == Factors()
    assert all(own is other for own, other in zip(group.parameters, model.parameters(), strict=True))
    assert param_groups(TrainConfig(), [group])[0] is group.parameters[0]


def test_groups_reach_the_optimizer_and_rates_keep_their_factor() -> None:
    train = TrainConfig(lr=1e-2, warmup=0, eps=1e-6, weight_decay=0.1)
    model = built(a=0.5)
    optimizer = optimizer_of(train, param_groups(train, groups_of(model)))
    inside = next(g for g in optimizer.param_groups if g["rate_factor"] == 0.5 and g["weight_decay"])
    assert (inside["lr"], inside["eps"], inside["weight_decay"]) == pytest.approx((5e-3, 5e-7, 0.1))
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}
    set_rate(optimizer, 4e-3)
    assert {group["lr"] / group["rate_factor"] for group in optimizer.param_groups} == {4e-3}


def test_a_step_by_groups_is_adamw_written_out(pairs) -> None:
    train = TrainConfig(lr=1e-2, warmup=0, eps=1e-3, weight_decay=0.1)
    model = built(a=0.5).double()
    optimizer = adamw(train, param_groups(train, groups_of(model)))
    model(tokens=pairs["target"]).square().mean().backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    by_role = {role: group.factors for group in groups_of(model) for role in group.roles}
    optimizer.step()
    for role, (name, rows) in model.parameter_roles().items():
        part = slice(None) if rows is None else rows
        parameter, own = model.get_parameter(name), by_role[role]
        assert parameter.grad is not None
        old, gradient = before[name][part], parameter.grad[part]
        step = gradient / (gradient.abs() + 1e-3 * own.eps)
        expected = old * (1 - 1e-2 * own.lr * 0.1 * own.decay) - 1e-2 * own.lr * step
        torch.testing.assert_close(parameter.detach()[part], expected, rtol=0, atol=1e-12)


def test_a_run_records_its_groups_and_resumes(tmp_path: Path) -> None:
    sets = "model.arch=completep model.stack=decoder train.steps=3 probes.names=['adam'] data.validation=0"
    prepared = plan(resolve(parse_set(sets.split()), depth=4))
    writer = RunWriter.create(tmp_path / "run", {"config": prepared.config.model_dump(mode="json")})
    trainer = Trainer(prepared.config, prepared.dataset, writer, prepared.device)
    trainer.fit(lambda: False, lambda report: None)
    assert {group.factors.eps for group in trainer.groups} == {0.5, 1.0}
    state = trainer.optimizer.state_dict()
    assert [group["rate_factor"] for group in state["param_groups"]] == [1.0] * len(trainer.groups)
    assert trainer.groups[0].described()["roles"]
    trainer.watcher.close()


def test_a_run_whose_groups_are_others_now_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = "model.arch=completep model.stack=decoder train.steps=2 probes.names=['none'] data.validation=0"
    path = start(plan(resolve(parse_set(sets.split()), depth=4)), tmp_path, "run").path
    rule = classmethod(lambda cls, place, role, options=None: Factors(eps=0.25))
    monkeypatch.setattr(ARCHS["completep"], "outer_factors", rule)
    with pytest.raises(InputError, match=r"other parameter groups .* architecture 'completep'"):
        resume(path, steps=4)
    status = Run.open(path).status
    assert (status.state, status.step) == ("failed", 2)
