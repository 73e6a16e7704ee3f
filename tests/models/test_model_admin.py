"""Admin: the profiling pass, its flag, and the fold into Post-LN."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import Tensor

from stabilitylab.errors import UsageError
from stabilitylab.models import Transformer, build_model
from stabilitylab.models.archs.postln import PostLN
from stabilitylab.models.archs.preln import PreLN

SIZES = {"source_vocab": 37, "target_vocab": 37, "d_model": 32, "d_ffn": 128, "heads": 4}


def fresh(depth: int = 12, **settings) -> Transformer:
    return build_model(arch="admin", depth=depth, **(SIZES | settings))


def omegas(model: Transformer, stack: str) -> list[float]:
    values = []
    for residual in model.stacks[stack].residuals():
        omega = residual.get_parameter("omega").detach()
        assert omega.shape == (32,)
        assert (omega == omega[0]).all()  # a vector, filled with one number
        values.append(float(omega[0]))
    return values


def variances(model: Transformer, inputs: dict[str, Tensor]) -> dict[str, list[tuple[float, float, float]]]:
    """(Var of the stream, of omega times it, of the branch) of each sub-layer during one pass as it stands."""
    seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in model.stacks}

    def variance(x: Tensor) -> float:
        x = x.double().flatten()
        return float(((x - x.mean()) ** 2).mean())

    outputs: dict[str, Tensor] = {}
    handles = []
    for residual in model.residuals():
        handles += [
            residual.shortcut.register_forward_hook(lambda _m, _i, output: outputs.__setitem__("shortcut", output)),
            residual.branch.register_forward_hook(lambda _m, _i, output: outputs.__setitem__("branch", output)),
            residual.register_forward_hook(
                lambda module, args, _output: seen[module.place.stack].append(
                    (variance(args[0]), variance(outputs["shortcut"]), variance(outputs["branch"]))
                )
            ),
        ]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("stack", ["encoder-decoder", "encoder", "decoder"])
def test_profile_equals_its_recursion_and_its_closed_form(stack, pairs) -> None:
    both = stack == "encoder-decoder"
    inputs = pairs if both else {"tokens": pairs["target"], "mask": pairs["target_mask"]}
    model = fresh(12 if both else 6, stack=stack, dropout=0.2, attention_dropout=0.1, activation_dropout=0.1)
    torch.manual_seed(3)
    model.calibrate(**inputs)
    torch.manual_seed(3)
    model.train()
    per_layer = {"encoder": 2, "decoder": 3 if both else 2}
    for name, rows in variances(model, inputs).items():
        found = omegas(model, name)
        assert len(found) == 6 * per_layer[name]
        assert found[0] == 1.0
        stream, branches = rows[0][0], [branch for _, _, branch in rows]
        for i in range(1, len(found)):
            _, shortcut, branch = rows[i - 1]
            assert found[i] == pytest.approx(math.sqrt(shortcut + branch), rel=1e-6)
            assert found[i] ** 2 == pytest.approx(stream + sum(branches[:i]), rel=1e-4)


def test_profiling_pass_is_the_forward_pass_with_what_it_stored(pairs) -> None:
    model = fresh(dropout=0.3)
    seen: list[Tensor] = []
    assert model.decoder is not None
    handle = model.decoder.register_forward_hook(lambda _m, _i, output: seen.append(output))
    torch.manual_seed(3)
    model.calibrate(**pairs)
    handle.remove()
    torch.manual_seed(3)
    assert torch.equal(seen[0], model.hidden(**pairs))


def test_profile_measures_with_dropout_on_and_padding_included(pairs) -> None:
    plain, dropped = fresh(), fresh(dropout=0.5)
    for model in (plain, dropped):
        model.calibrate(**pairs)
    assert omegas(dropped, "encoder")[-1] > 1.1 * omegas(plain, "encoder")[-1]
    moved = fresh()
    source = torch.where(pairs["source_mask"], pairs["source"], (pairs["source"] + 1) % 37)  # padding alone
    moved.calibrate(**{**pairs, "source": source})
    assert omegas(moved, "encoder")[1] != omegas(plain, "encoder")[1]


@pytest.mark.parametrize("training", [True, False])
def test_calibration_leaves_the_random_stream_the_mode_and_no_hook(training, pairs) -> None:
    model = fresh(dropout=0.5).train(training)
    before = torch.get_rng_state()
    model.calibrate(**pairs)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training is training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_uncalibrated_model_refuses_to_run(pairs) -> None:
    model = fresh()
    for call in (lambda: model(**pairs), lambda: model.hidden(**pairs), model.finalize):
        with pytest.raises(UsageError, match=r"no omega yet: call model\.calibrate"):
            call()
    model.calibrate(**pairs)
    assert model(**pairs).isfinite().all()


def test_a_failed_calibration_does_not_count(pairs) -> None:
    model = fresh()
    with pytest.raises(IndexError):
        model.calibrate(**{**pairs, "target": pairs["target"] + 100})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(UsageError):
        model(**pairs)


def test_calibrating_again_changes_nothing(pairs) -> None:
    model = fresh()
    model.calibrate(**pairs)
    before = omegas(model, "decoder")
    model.calibrate(**{**pairs, "target": pairs["target"].flip(0)})
    assert omegas(model, "decoder") == before


def test_a_restored_checkpoint_counts_as_calibrated(pairs) -> None:
    model = fresh()
    model.calibrate(**pairs)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    restored = fresh(seed=9)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(restored(**pairs), model(**pairs))
    untouched = fresh()
    untouched.load_state_dict(fresh().state_dict())
    with pytest.raises(UsageError):
        untouched(**pairs)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(**pairs), model(**pairs))


def test_omega_is_trained(pairs, loss_of) -> None:
    model = fresh()
    model.calibrate(**pairs)
    loss_of(model, pairs).backward()
    for residual in model.residuals():
        gradient = residual.get_parameter("omega").grad
        assert gradient is not None
        assert gradient.count_nonzero() > 0


@pytest.mark.parametrize("stack", ["encoder-decoder", "encoder", "decoder"])
@pytest.mark.parametrize("tie", ["output", "none"])
def test_fold_is_exact(stack, tie, small, randomise, pairs) -> None:
    both = stack == "encoder-decoder"
    inputs = pairs if both else {"tokens": pairs["target"], "mask": pairs["target_mask"]}
    model = randomise(small("admin", stack=stack, tie=tie, depth=12, dropout=0.1)).eval()
    with torch.no_grad():
        before = model.hidden(**inputs)
        model.finalize()
        after = model.hidden(**inputs)
    assert (after - before).abs().max() < 1e-5
    assert not torch.equal(after, before)
    assert all(type(residual) is PostLN for residual in model.residuals())
    assert not any("omega" in name or "calibrated" in name for name in model.state_dict())
    assert [f"{name}.input_scale" in model.state_dict() for name in model.stacks] == [True] * len(model.stacks)
    assert all(not module.training for module in model.modules())


def test_fold_is_exact_in_double_and_needs_the_input_scale(small, randomise, pairs) -> None:
    model = randomise(small("admin", depth=12).double())
    with torch.no_grad():
        before = model(**pairs)
        model.finalize()
        torch.testing.assert_close(model(**pairs), before, rtol=0, atol=1e-12)
        model.encoder.input_scale.fill_(1.0)
        assert (model(**pairs) - before).abs().max() > 1e-3


def test_fold_of_a_mixed_model_touches_the_admin_stack_alone(small, randomise, pairs) -> None:
    model = randomise(small("admin", decoder_arch="preln").double())
    with torch.no_grad():
        before = model(**pairs)
        model.finalize()
        torch.testing.assert_close(model(**pairs), before, rtol=0, atol=1e-12)
    assert {type(residual) for residual in model.stacks["decoder"].residuals()} == {PreLN}
    assert model.stacks["decoder"].input_scale is None


def test_a_zero_omega_cannot_be_folded(small) -> None:
    model = small("admin")
    next(iter(model.residuals())).get_parameter("omega").data[3] = 0.0
    with pytest.raises(UsageError, match="an omega of this Admin model is 0"):
        model.finalize()


@pytest.mark.parametrize("arch", ["postln", "preln", "postln-init", "deepnorm"])
def test_without_anything_to_do_calibrate_and_finalize_do_nothing(arch, small, pairs) -> None:
    model = small(arch)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.calibrate(**pairs)
    model.set_row(7)
    model.finalize()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
