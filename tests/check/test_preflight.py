"""The check before training: numbers against an independent computation, faults that it must name, health that it must
not doubt."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from probe_toys import Toy, batch, loss_of, masks
from rest_slow import rest_slow
from torch import Tensor, nn

from stabilitylab import build_model, preflight
from stabilitylab.check import BOUNDS
from stabilitylab.config import resolve
from stabilitylab.errors import InputError, UsageError

Loss = Callable[[nn.Module, Any], Tensor]


def toy(dtype: torch.dtype = torch.float64) -> nn.Module:
    return Toy(layers=3, dropout=0.1).to(dtype)


def sgd(model: nn.Module, rate: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


def reference_model(arch: str, depth: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """The package's own Transformer, 16-32-2, half of it encoder, half decoder."""
    settings = {"model": {"arch": arch, "d_model": 16, "d_ffn": 32, "heads": 2, "dropout": 0.0}}
    config = resolve(settings, depth=depth)
    draw = torch.Generator().manual_seed(1)
    inputs = {name: torch.randint(4, 30, (4, 9), generator=draw) for name in ("source", "target")}
    model = build_model(config.model, source_vocab=30, target_vocab=30, seed=3)
    model.calibrate(**inputs)
    model.set_row(0)
    return model, inputs


def next_token(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits = model(**inputs)[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), inputs["target"][:, 1:].flatten())


def test_the_table_is_what_one_step_of_a_copy_shows() -> None:
    model, inputs = toy(), batch()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    twin = copy.deepcopy(model)
    result = preflight(model, inputs, loss_of, sgd(model), mask=masks(inputs))
    seen: dict[str, Tensor] = {}
    for stack in ("encoder", "decoder"):
        for number in range(3):
            name = f"{stack}.layers.{number}"

            def keep(m: nn.Module, a: Any, y: Tensor, name: str = name) -> None:
                if y.requires_grad:
                    y.retain_grad()
                    seen[name] = y

            twin.get_submodule(name).register_forward_hook(keep)
    before = loss_of(twin, inputs)
    before.backward()
    for one in result.layers:
        if not one.number:
            continue
        name = f"{one.stack}.layers.{one.number - 1}"
        gradients = [p.grad for p in twin.get_submodule(name).parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        entries = sum(g.numel() for g in gradients)
        assert one["gradient"] == pytest.approx(norm, rel=1e-9)
        assert one["activation_gradient"] == pytest.approx(float(seen[name].grad.norm()), rel=1e-9)
        assert one["zero"] == pytest.approx(sum(float((g == 0).sum()) for g in gradients) / entries)
        small = sum(float(((g.abs() < 2.0**-24) & (g != 0)).sum()) for g in gradients)
        assert one["fp16"] == pytest.approx(small / (entries * (1 - one["zero"])))
        assert math.isnan(one["eps"])  # SGD has none
    assert result.numbers["loss_before"] == pytest.approx(float(before.detach()), rel=1e-12)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter -= 1e-2 * (0 if parameter.grad is None else parameter.grad)
        assert result.numbers["loss_after"] == pytest.approx(float(loss_of(twin, inputs)), rel=1e-12)


@pytest.mark.slow
def test_share_of_gradients_under_eps_leaves_out_zeros() -> None:
    model, inputs = toy(), batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    result = preflight(model, inputs, loss_of, optimizer)
    shares = {one.name: one["eps"] for one in result.layers if one.number}
    assert len(shares) == 6
    assert all(0 < share < 1 for share in shares.values())
    everything = preflight(model, inputs, loss_of, torch.optim.AdamW(model.parameters(), eps=1e6))
    assert all(one["eps"] == 1 for one in everything.layers if one.number)
    assert any(finding.bound == "under eps" for finding in everything.findings)


def test_nothing_of_the_callers_is_changed() -> None:
    model, inputs = toy(), batch()
    model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    preflight(model, inputs, loss_of, optimizer)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training
    assert not optimizer.state
    assert torch.equal(random, torch.get_rng_state())
    assert not any(module._forward_hooks for module in model.modules())


def test_an_optimizer_may_be_made_for_the_copy_and_go_missing() -> None:
    model, inputs = toy(), batch()
    made = preflight(model, inputs, loss_of, lambda parameters: torch.optim.SGD(parameters, lr=1e-2))
    own = preflight(model, inputs, loss_of, sgd(model))
    assert made.numbers == own.numbers
    none = preflight(model, inputs, loss_of)
    assert all(math.isnan(one["update"]) for one in none.layers)
    assert "one update" not in str(none)
    assert "updates: not checked, since no optimizer was given" in str(none)


def test_a_model_without_stacks_is_judged_by_its_modules() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(5, 4)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    calm = preflight(model, x, loss, sgd(model, 1e-3))
    assert calm.ok
    assert "one update: loss " in str(calm)
    wild = preflight(model, x, loss, torch.optim.AdamW(model.parameters(), lr=100.0))
    assert next((f.bound, f.place) for f in wild.findings) == ("loss rises", "the model")


HEALTHY = [("postln", 6), ("preln", 24), ("deepnorm", 80), ("branchnorm", 80), ("admin", 24)]


@pytest.mark.parametrize(("arch", "layers"), rest_slow(HEALTHY, [("postln", 6)]))
def test_models_that_train_are_not_doubted(arch: str, layers: int) -> None:
    model, inputs = reference_model(arch, layers)
    result = preflight(model, inputs, next_token, torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert result.ok, str(result)


def deep_post_ln() -> tuple[nn.Module, Any, Loss]:
    return *reference_model("postln", 300), next_token


def exploding() -> tuple[nn.Module, Any, Loss]:
    """Layers that multiply by 3: the gradient grows towards the input."""
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Identity()) for _ in range(12))
    for layer in model.layers:
        nn.init.orthogonal_(layer[0].weight, gain=3.0)
    x = torch.randn(4, 5, 8)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        for layer in model.layers:
            x = layer(x)
        return x.mean()

    return model, x, loss


def broken(change: Callable[[nn.Module], None]) -> tuple[nn.Module, Any, Loss]:
    model, inputs = toy(torch.float32), batch()
    change(model)
    return model, inputs, loss_of


def nan_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("encoder.layers.1.linear2.weight")[0, 0] = math.nan


def cut_off(model: nn.Module) -> None:
    """What comes out of the second decoder layer has no history."""
    model.decoder.layers[1].register_forward_hook(lambda m, a, y: y.detach())


def loud(model: nn.Module) -> None:
    model.encoder.layers[1].norm3.weight.data.mul_(1e3)


def sharp(model: nn.Module) -> None:
    for part in (model.decoder.layers[2].self_attn.q, model.decoder.layers[2].self_attn.k):
        part.weight.data.mul_(60.0)


@pytest.mark.parametrize(
    ("case", "rate", "bound", "place", "severity"),
    [
        (exploding, 1e-6, "exploding gradient", "layers 5", "fail"),
        (lambda: broken(nan_weight), 1e-3, "not finite", "encoder 2", "fail"),
        (lambda: broken(cut_off), 1e-3, "no gradient", "decoder 1", "fail"),
        (lambda: broken(lambda model: None), 3.0, "loss rises", "the model", "fail"),
        (lambda: broken(lambda model: None), 3.0, "output change", "the model", "fail"),
        (lambda: broken(lambda model: None), 0.1, "output moved", "decoder", "warn"),
        (lambda: broken(sharp), 1e-3, "attention logit", "decoder 3", "warn"),
        (lambda: broken(loud), 1e-3, "branch", "encoder 2", "warn"),
    ],
)
def test_a_fault_is_named_with_its_layer(
    case: Callable[[], tuple[nn.Module, Any, Loss]], rate: float, bound: str, place: str, severity: str
) -> None:
    model, inputs, loss = case()
    result = preflight(model, inputs, loss, torch.optim.AdamW(model.parameters(), lr=rate))
    found = [finding for finding in result.findings if (finding.bound, finding.severity) == (bound, severity)]
    assert found, str(result)
    assert found[0].place.startswith(place), str(result)
    assert result.ok == (severity != "fail")
    if severity == "fail":
        assert result.suspect is not None
        assert result.suspect.severity == "fail"
        assert "not ready to train; look first at" in str(result)


@pytest.mark.slow
def test_where_a_gradient_vanishes_is_the_first_layer_beyond_the_bound() -> None:
    model, inputs, loss = deep_post_ln()
    result = preflight(model, inputs, loss)
    found = next(f for f in result.findings if f.bound == "vanishing gradient")
    assert (found.severity, found.stack) == ("fail", "decoder")
    assert result.suspect == found
    own = [one for one in result.layers if one.number and one.stack == "decoder"]
    flowing = {one.number: one["activation_gradient"] for one in own}
    limit = BOUNDS["vanishing gradient", "fail"].limit * max(flowing.values())
    assert found.layer == max(number for number, value in flowing.items() if value < limit)


@pytest.mark.slow
def test_fp16_is_judged_where_the_model_is_in_it() -> None:
    model, inputs = toy(torch.float32), batch()
    model.encoder.layers[0].norm3.weight.data.mul_(1e4)
    assert not any("fp16" in f.bound for f in preflight(model, inputs, loss_of).findings)
    model.head.half()

    def loss(model: nn.Module, inputs: Any) -> Tensor:
        handle = model.head.register_forward_pre_hook(lambda m, a: (a[0].half(),))
        value = loss_of(model, inputs)
        handle.remove()
        return value.float()

    found = {f.bound: f for f in preflight(model, inputs, loss).findings}
    assert found["fp16 overflow"].place == "encoder 1"


@pytest.mark.slow
def test_the_frame_and_the_dictionary_hold_every_layer() -> None:
    model, inputs = reference_model("deepnorm", 40)
    result = preflight(model, inputs, next_token)
    frame = result.frame()
    assert list(frame.query("layer > 0")["layer"]) == [*range(1, 21), *range(1, 21)]
    assert result.as_dict()["ok"] is True
    short, long = result.text(), result.text(every=True)
    assert "decoder 10" not in short
    assert "decoder 10" in long
    assert short.splitlines()[5].strip() == "..."


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda model, inputs: 1.0, r"gave float: it must return one number with a gradient"),
        (lambda model, inputs: model(**inputs), r"gave a tensor of shape \(4, 5, 23\)"),
        (lambda model, inputs: loss_of(model, inputs).detach(), r"it must return one number with a gradient"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        preflight(toy(torch.float32), batch(), loss)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = toy(torch.float32)
    model.kept = loss_of(model, batch()) * 1.0
    with pytest.raises(UsageError, match="the model cannot be copied"):
        preflight(model, batch(), loss_of)


class Uncopied(Toy):
    def __deepcopy__(self, memo: dict[int, Any]) -> Uncopied:
        raise NotImplementedError


def test_a_model_that_refuses_to_be_copied_without_a_word_is_named() -> None:
    with pytest.raises(UsageError, match=r"the model cannot be copied \(NotImplementedError\)"):
        preflight(Uncopied(), batch(), loss_of)


def test_a_function_that_makes_no_optimizer_is_told_from_a_model_that_cannot_be_copied() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=-1.0)

    with pytest.raises(UsageError, match="the function that makes the optimizer failed: ValueError: Invalid learning"):
        preflight(toy(torch.float32), batch(), loss_of, make)


class Headed(nn.Module):
    """Two layers under a head of zeros, as vision transformers start with."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def classified(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 2, 0]))


def test_a_gradient_that_is_zero_at_the_first_step_alone_is_no_fault() -> None:
    torch.manual_seed(0)
    model, x = Headed(), torch.randn(4, 5, 8)
    result = preflight(model, x, classified, torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert all(one["zero"] == 1 for one in result.layers if one.number)
    assert result.ok, str(result)
    nothing = preflight(model, x, classified, torch.optim.AdamW(model.layers.parameters(), lr=1e-3))
    assert [f.bound for f in nothing.findings if f.severity == "fail"] == ["no gradient"]


@pytest.mark.parametrize(
    ("rate", "part", "place"),
    rest_slow(
        [(0.0, None, "encoder 1"), (1e-3, "decoder", "encoder 1"), (1e-3, "encoder", "decoder 1")],
        [(0.0, None, "encoder 1")],
    ),
)
def test_an_optimizer_that_moves_nothing_is_named(rate: float, part: str | None, place: str) -> None:
    model, inputs = toy(torch.float32), batch()
    held = model.get_submodule(part) if part else model
    result = preflight(model, inputs, loss_of, torch.optim.AdamW(held.parameters(), lr=rate, weight_decay=0.0))
    (found,) = [f for f in result.findings if f.bound == "no update"]
    assert found.place == place
    assert not result.ok


def test_what_fails_in_the_callers_code_is_said_to_be_the_callers() -> None:
    model, inputs = toy(torch.float32), batch()
    with pytest.raises(InputError, match=r"loss_fn\(model, batch\) failed: KeyError"):
        preflight(model, inputs, lambda model, inputs: inputs["nothing"])

    def fails_in_eval_mode(model: nn.Module, inputs: Any) -> Tensor:
        return loss_of(model, inputs) if model.training else inputs["nothing"]

    with pytest.raises(InputError, match=r"loss_fn\(model, batch\) failed in eval mode: "):
        preflight(model, inputs, fails_in_eval_mode)
    with pytest.raises(UsageError, match="LBFGS needs a closure"):
        preflight(model, inputs, loss_of, torch.optim.LBFGS(model.parameters()))
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter of the model requires a gradient"):
        preflight(model, inputs, loss_of)


def test_a_loss_that_draws_from_python_and_numpy_leaves_their_states() -> None:
    model, inputs = toy(torch.float32), batch()

    def noisy(model: nn.Module, inputs: Any) -> Tensor:
        return loss_of(model, inputs) * (1 + random.random() + float(np.random.rand()))  # noqa: NPY002

    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    expected = random.random(), np.random.rand()  # noqa: NPY002
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    preflight(model, inputs, noisy, sgd(model))
    assert (random.random(), np.random.rand()) == expected  # noqa: NPY002
