"""alpha_t: its values, and that it survives checkpoints, eval, copies and finalize()."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitylab.config import ModelConfig
from stabilitylab.models import Schedule, Transformer, build_model

PAPER = {  # t: linear, exp, sigmoid at T = 4000
    0: (0.0, 0.0, 0.0),
    1: (0.000250, 0.001258, 0.000017),
    100: (0.025, 0.118300, 0.001910),
    1000: (0.25, 0.718335, 0.070104),
    2000: (0.5, 0.924142, 0.5),
    3000: (0.75, 0.983106, 0.929896),
    3999: (0.999750, 0.999992, 0.999983),
    4000: (1.0, 1.0, 1.0),
}


def schedule(growth: str = "linear", T: int = 4000, t0: int = 0, **settings) -> Schedule:
    config = ModelConfig.model_validate({"growth": growth, "T": T, "t0": t0, **settings})
    return Schedule(config, config.alpha)


def branchnorm(**settings) -> Transformer:
    sizes = {"source_vocab": 37, "target_vocab": 37, "d_model": 16, "d_ffn": 32, "heads": 2, "depth": 4}
    return build_model(arch="branchnorm", **(sizes | settings))


@pytest.mark.parametrize("column", range(3), ids=["linear", "exp", "sigmoid"])
def test_values_at_the_papers_length(column) -> None:
    alpha = schedule(("linear", "exp", "sigmoid")[column])
    for t, row in PAPER.items():
        assert alpha.at(t) == pytest.approx(row[column], abs=5e-7)


@settings(deadline=None)
@given(st.sampled_from(["linear", "exp", "sigmoid"]), st.integers(1, 20_000), st.integers(0, 40_000))
def test_alpha_starts_at_zero_grows_and_stays_one(growth, T, t) -> None:
    alpha = schedule(growth, T=T)
    assert alpha.at(0) == 0.0
    assert 0.0 <= alpha.at(t) <= alpha.at(t + 1) <= 1.0
    assert alpha.at(T) == 1.0
    assert alpha.at(T + t) == 1.0


def test_row_t_uses_alpha_of_t_plus_t0() -> None:
    assert schedule(t0=1).at(0) == 1 / 4000
    assert schedule(t0=1, T=1).at(0) == 1.0
    assert schedule(t0=0).at(0) == 0.0
    assert schedule(t0=7, growth="exp").at(3) == schedule(growth="exp").at(10)


def test_a_constant_replaces_the_schedule_at_every_row() -> None:
    alpha = schedule(alpha=0.3)
    assert [alpha.at(row) for row in (0, 10, 10_000)] == [0.3] * 3
    alpha.finalize()
    assert alpha.get() == 0.3


def test_the_buffer_follows_the_row() -> None:
    model = branchnorm(T=100)
    assert model.schedule is not None
    alpha = model.schedule.alpha
    assert alpha.shape == ()
    assert alpha.dtype is torch.float32
    for row in (0, 1, 41, 99, 250):
        model.set_row(row)
        assert model.schedule.get() == model.schedule.at(row) == min(1.0, (row + 1) / 100)
        assert float(alpha) == pytest.approx(model.schedule.get(), rel=1e-6)
    model.schedule.set(0.125)
    assert (model.schedule.get(), float(alpha)) == (0.125, 0.125)


def test_the_output_uses_the_rows_alpha(pairs) -> None:
    model, constant = branchnorm(T=100), branchnorm(alpha=0.43)
    model.set_row(42)
    assert torch.equal(model(**pairs), constant(**pairs))
    model.set_row(43)
    assert not torch.equal(model(**pairs), constant(**pairs))


def test_eval_and_train_never_change_it(pairs) -> None:
    model = branchnorm(T=100)
    model.set_row(20)
    logits = model(**pairs)
    assert torch.equal(model.eval()(**pairs), logits)
    assert torch.equal(model.train()(**pairs), logits)
    assert model.schedule is not None
    assert model.schedule.get() == 0.21


def test_a_checkpoint_carries_it_once(pairs) -> None:
    model = branchnorm(T=100)
    model.set_row(56)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert [key for key in state if "alpha" in key] == ["schedule.alpha"]
    restored = branchnorm(T=100, seed=4)
    restored.load_state_dict(state)
    assert restored.schedule is not None
    assert restored.schedule.get() == pytest.approx(0.57, rel=1e-6)
    assert torch.equal(restored(**pairs), model(**pairs))


@pytest.mark.parametrize("growth", ["linear", "exp", "sigmoid"])
def test_finalize_is_one_for_good_and_survives_a_checkpoint(growth, pairs) -> None:
    model = branchnorm(T=100, growth=growth)
    model.set_row(3)
    model.finalize()
    restored = branchnorm(T=100, growth=growth)
    restored.load_state_dict(model.state_dict())
    full = branchnorm(alpha=1.0)
    for finished in (model, restored):
        assert finished.schedule is not None
        finished.set_row(3)
        assert finished.schedule.get() == 1.0
        assert torch.equal(finished(**pairs), full(**pairs))


def test_copies_and_conversions_keep_one_shared_buffer(pairs) -> None:
    model = branchnorm(T=100)
    model.set_row(10)
    twin = copy.deepcopy(model)
    twin.set_row(60)
    assert model.schedule is not None
    assert float(model.schedule.alpha) == pytest.approx(0.11)
    assert not torch.equal(twin(**pairs), model(**pairs))
    double = copy.deepcopy(model).double()
    double.set_row(60)
    assert double.schedule is not None
    assert double.schedule.alpha.dtype is torch.float64
    torch.testing.assert_close(double(**pairs).float(), twin(**pairs), rtol=0, atol=1e-5)


def test_alpha_is_not_a_parameter_and_cannot_change_under_a_backward_pass(pairs, loss_of) -> None:
    model = branchnorm(T=100)
    assert not any("alpha" in name for name, _ in model.named_parameters())
    loss = loss_of(model, pairs)
    model.set_row(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_other_architectures_have_no_schedule() -> None:
    model = build_model(arch="deepnorm", depth=2, source_vocab=5, target_vocab=5)
    assert model.schedule is None
    model.set_row(3)
