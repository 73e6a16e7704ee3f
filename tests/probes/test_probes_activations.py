"""What is recorded of a forward pass, and which forward passes are, against float64 numbers taken by other hooks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of, masks
from torch import Tensor, nn

from stabilitylab.errors import UsageError
from stabilitylab.probes import PROBES, Max, Mean, Probe, Watcher, probe
from stabilitylab.probes._engine.training_pass import TrainingPass
from stabilitylab.probes.library.activations import ActivationSparsity
from stabilitylab.probes.places.sites import layers


def watch(model: nn.Module, probes: str = "ln_input", **options: Any) -> tuple[ListSink, Watcher]:
    sink = ListSink()
    return sink, Watcher(model, sink, probes=probes, every=1, **options)


def token_norms(model: Toy, inputs: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Float64 norm of every real token that enters each norm."""
    found: dict[str, np.ndarray] = {}

    def keep(name: str) -> Callable[..., None]:
        real = masks(inputs)[name.split(".")[0]].numpy()

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            found[name] = np.sqrt((args[0].detach().double().numpy()[real] ** 2).sum(-1))

        return hook

    named = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.LayerNorm)]
    handles = [module.register_forward_pre_hook(keep(name)) for name, module in named]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("parts", [[3], [3, 4, 5]])
def test_ln_input_is_the_mean_over_real_tokens_of_all_micro_batches(parts: list[int]) -> None:
    model, current = Toy(), {}
    sink, watcher = watch(model, mask=lambda: masks(current))
    for seed in parts:
        current = batch(seed)
        loss_of(model, current).backward()
    watcher.step()
    watcher.flush()
    exact = [token_norms(model, batch(seed)) for seed in parts]
    tokens = {name: np.concatenate([norms[name] for norms in exact]) for name in exact[0]}
    mean = sink.column(0, "ln_input", "value")
    assert mean == pytest.approx({name: norms.mean() for name, norms in tokens.items()}, rel=1e-6)
    p99 = {name: np.quantile(norms, 0.99, method="inverted_cdf") for name, norms in tokens.items()}
    assert sink.column(0, "ln_input", "p99") == pytest.approx(p99, rel=0.0222)
    assert sink.tables["ln_input"].columns == ("value", "p99")  # this model has no taps
    rows = {row.site: (row.stack, row.layer, row.sublayer) for row in sink.tables["ln_input"].rows}
    assert rows["decoder.layers.1.norm2"] == ("decoder", 2, "norm2")
    assert rows["decoder.norm"] == ("decoder", 0, "norm")


def test_without_a_mask_all_tokens_count() -> None:
    model, inputs = Toy(), batch(3)
    sink, watcher = watch(model)
    loss_of(model, inputs).backward()
    watcher.step()
    watcher.flush()
    everything = inputs | {side: torch.ones_like(inputs[side]) for side in ("source_mask", "target_mask")}
    entered: dict[str, Tensor] = {}
    handle = model.encoder.norm.register_forward_pre_hook(lambda m, a: entered.update(x=a[0].detach().double()))
    model(**inputs)
    handle.remove()
    assert entered["x"].shape[:2] == everything["source_mask"].shape
    exact = entered["x"].norm(dim=-1).mean().item()
    assert sink.column(0, "ln_input", "value")["encoder.norm"] == pytest.approx(exact, rel=1e-6)


def test_a_mask_may_be_one_tensor_of_any_type_and_padded_nan_is_left_out() -> None:
    layer_norm = nn.LayerNorm(4)
    model = nn.Sequential(nn.Sequential(nn.Identity(), layer_norm))
    x = torch.randn(2, 3, 4)
    real = torch.tensor([[True, True, False], [True, False, False]])
    x[~real] = torch.nan
    exact = x[real].norm(dim=-1).mean().item()
    for mask in (real, real.int(), lambda: real):
        sink, watcher = watch(model, mask=mask)
        model(x)
        watcher.step()
        watcher.flush()
        watcher.close()
        assert sink.column(0, "ln_input", "value")["0.1"] == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        (torch.ones(4, 6), r"mask has shape \(4, 6\) where stack 'encoder' has tokens \(4, 7\)"),
        ({"encoder": torch.ones(7, 4)}, "give one value per token"),
        ({"enc": torch.ones(4, 7)}, r"mask names \['enc'\], but the model's stacks are 'encoder', 'decoder'"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask: Any, sentence: str) -> None:
    model = Toy()
    _, watcher = watch(model, mask=mask)
    with pytest.raises(UsageError, match=sentence):
        loss_of(model, batch())
    watcher.close()


def test_a_stack_that_a_dict_leaves_out_counts_all_tokens() -> None:
    model, inputs = Toy(), batch(3)
    sink, watcher = watch(model, mask={"encoder": inputs["source_mask"]})
    bare, other = watch(model)
    loss_of(model, inputs).backward()
    for each in (watcher, other):
        each.step()
        each.flush()
    columns = [each.column(0, "ln_input", "value") for each in (sink, bare)]
    assert columns[0]["decoder.norm"] == columns[1]["decoder.norm"]
    assert columns[0]["encoder.norm"] != columns[1]["encoder.norm"]


def test_only_forwards_in_training_mode_with_gradients_are_recorded() -> None:
    model, plain = Toy(), Toy()
    sink, watcher = watch(model)
    alone, other = watch(plain)
    for each, extra in ((model, True), (plain, False)):
        loss_of(each, batch(1)).backward()
        if extra:
            with torch.no_grad():  # validation that forgot eval()
                loss_of(each, batch(2))
            each.eval()
            loss_of(each, batch(3))  # ... or no_grad()
            each.train()
    watcher.step()
    other.step()
    watcher.flush()
    other.flush()
    assert sink.column(0, "ln_input", "value") == alone.column(0, "ln_input", "value")


def test_a_row_without_a_recorded_forward_is_absent() -> None:
    model = Toy()
    sink, watcher = watch(model)
    watcher.step()
    watcher.flush()
    assert len(sink.absent(0, "ln_input")) == len(sink.tables["ln_input"].rows)
    assert all(np.isnan(list(sink.column(0, "ln_input", column).values())).all() for column in ("value", "p99"))


def test_a_module_that_is_called_twice_counts_the_tokens_of_both_calls() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))])

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.layers[0](x)
            return x

    model = Recurrent()
    sink, watcher = watch(model, "ln_input,activation_grad_norm")
    x, entered, left = torch.randn(2, 5, 4), [], []
    handle = model.layers[0][1].register_forward_hook(lambda m, a, y: (entered.append(a[0]), left.append(y), None)[-1])
    model(x).square().sum().backward(retain_graph=True)
    handle.remove()
    watcher.step()
    watcher.flush()
    exact = torch.stack(entered).double().norm(dim=-1).mean().item()
    assert sink.column(0, "ln_input", "value")["layers.0.1"] == pytest.approx(exact, rel=1e-6)
    gradients = torch.autograd.grad(left[-1].square().sum(), left)
    exact = torch.stack(gradients).double().norm().item()
    assert sink.column(0, "activation_grad_norm", "value")["layers.0"] == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_parts_that_are_called_instead_of_the_model_count_with_their_own_masks(accumulate: int) -> None:
    model, whole, current = Toy(), Toy(), {}
    sink, watcher = watch(model, mask=lambda: masks(current))
    expected, other = watch(whole, mask=lambda: masks(current))
    for seed in range(accumulate):
        current = inputs = batch(seed)
        memory = model.encoder(model.embed_source(inputs["source"]), inputs["source_mask"])
        target = model.embed_target(inputs["target"])
        model.decoder(target, inputs["target_mask"], memory, inputs["source_mask"])
        whole(**inputs)
    watcher.step()
    other.step()
    watcher.flush()
    other.flush()
    for column in ("value", "p99"):
        assert sink.column(0, "ln_input", column) == expected.column(0, "ln_input", column)


def test_what_waits_on_the_device_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = Toy(), batch()
    plain, other = watch(model)
    loss_of(model, inputs)
    other.step()
    other.close()
    monkeypatch.setattr("stabilitylab.probes._engine.passes.HELD", 50)
    most = 0

    class Counted(TrainingPass):
        def keep(self, *args: Any) -> None:
            super().keep(*args)
            nonlocal most
            most = max(most, self._held)

    monkeypatch.setattr("stabilitylab.probes.instruments.training_pass.TrainingPass", Counted)
    sink, watcher = watch(model)
    loss_of(model, inputs)
    watcher.step()
    watcher.flush()
    other.flush()
    assert 0 < most <= 50
    assert sink.column(0, "ln_input", "value") == pytest.approx(plain.column(0, "ln_input", "value"), rel=1e-12)


@pytest.mark.usefixtures("scratch")
def test_a_probe_of_ones_own_with_several_numbers_and_a_maximum() -> None:
    @probe("extremes", on="forward", at=layers, columns={"low": Mean(), "top": Max("high"), "high": Mean()})
    class Extremes(Probe):
        """Smallest and largest entry per token."""

        def measure(self, site: Any, x: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
            assert not torch.is_grad_enabled()
            return {"low": y.amin(-1), "high": y.amax(-1)}

    model, inputs, left = Toy(), batch(2), {}
    sink, watcher = watch(model, "extremes", mask=masks(inputs))
    model.encoder.layers[1].register_forward_hook(lambda m, a, y: left.update(y=y.detach()[inputs["source_mask"]]))
    loss_of(model, inputs)
    watcher.step()
    watcher.flush()
    found = {column: sink.column(0, "extremes", column)["encoder.layers.1"] for column in ("low", "top", "high")}
    exact = {"low": left["y"].amin(-1).mean(), "top": left["y"].max(), "high": left["y"].amax(-1).mean()}
    assert found == pytest.approx({name: value.item() for name, value in exact.items()}, rel=1e-6)
    assert sink.tables["extremes"].definition == "Smallest and largest entry per token."
    assert "Extremes" in PROBES  # found under any spelling
    with pytest.raises(ValueError, match="registered already"):
        probe("Extremes", on="forward", at=layers)(Extremes)


@pytest.mark.usefixtures("scratch")
def test_a_number_that_no_column_reads_is_refused() -> None:
    @probe("misspelt", on="forward", at=layers, columns={"lowest": Mean()})
    class Misspelt(Probe):
        def measure(self, site: Any, x: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
            return {"lowset": y.amin(-1)}

    model = Toy()
    _, watcher = watch(model, "misspelt")
    loss_of(model, batch())
    with pytest.raises(UsageError, match="probe 'misspelt' measures 'lowset', but its columns read 'lowest'"):
        watcher.step()


def test_a_layer_that_is_called_with_keywords_or_yields_a_tuple_is_recorded() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.inner = nn.Sequential(nn.Identity())

        def forward(self, ids: Tensor, *, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return ids, {"hidden": self.norm(input=hidden)}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(torch.arange(3), hidden=x)[1]["hidden"]
            return x

    model, x = Model(), torch.randn(2, 3, 4, requires_grad=True)
    sink, watcher = watch(model, "ln_input,activation_grad_norm")
    y = model(x)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    watcher.step()
    watcher.flush()
    exact = x.detach().double().norm(dim=-1).mean().item()
    assert sink.column(0, "ln_input", "value")["layers.0.norm"] == pytest.approx(exact, rel=1e-6)
    found = sink.column(0, "activation_grad_norm", "value")
    assert found["layers.input"] == pytest.approx(x.grad.double().norm().item(), rel=1e-6)
    assert found["layers.1"] == pytest.approx(gradient.double().norm().item(), rel=1e-6)


def test_bfloat16_magnitudes_are_taken_in_float32() -> None:
    model = nn.Sequential(nn.Sequential(nn.Identity(), nn.LayerNorm(256))).to(torch.bfloat16)
    x = torch.full((1, 3, 256), 1.0, dtype=torch.bfloat16)
    sink, watcher = watch(model)
    model(x * 3)
    watcher.step()
    watcher.flush()
    assert sink.column(0, "ln_input", "value") == {"0.1": 48.0}
    assert not sink.row(0)[1]["ln_input"].absent.any()


class LowRankExperts(nn.Module):
    """Stacked weights whose way back is corrected by a product of two others."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(2, *shape)) for shape in ((8, 16), (16, 8)))
        self.left, self.right = (nn.Parameter(torch.randn(2, *shape)) for shape in ((16, 2), (2, 8)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.inner(x), self.down + torch.bmm(self.left, self.right)).sum(0)

    def inner(self, x: Tensor) -> Tensor:
        return torch.bmm(x.expand(2, *x.shape), self.up).relu()


@pytest.mark.parametrize("entry", [math.nan, math.inf])
def test_a_token_that_is_not_finite_has_no_sparsity(entry: float) -> None:
    y = torch.randn(2, 3, 8)
    y[1, 2, 5] = entry
    numbers: Any = ActivationSparsity().measure(None, None, y, torch.ones(2, 3))  # type: ignore[arg-type]
    for name in ("nonzero_fraction", "active_fraction"):
        assert numbers[name].isnan().nonzero().tolist() == [[1, 2]]


class RoutedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(8), nn.Linear(8, 2), LowRankExperts()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.norm(x)) * self.router(x).amax(-1, keepdim=True)


def test_experts_that_multiply_two_weights_with_each_other_have_a_sparsity() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(RoutedLayer(), RoutedLayer()), torch.randn(5, 8)
    sink, watcher = watch(model, "activation_sparsity", reference=lambda: model(x))
    model(x).square().mean().backward()
    watcher.step()
    watcher.flush()
    expected = {}
    with torch.no_grad():
        for number, layer in enumerate(model):
            inner = layer.experts.inner(layer.norm(x))
            expected[f"{number}.experts"] = float((inner > 0).double().mean())
            x = layer(x)
    assert sink.column(0, "activation_sparsity", "nonzero_fraction") == pytest.approx(expected)
