"""Places in the shapes of model families that names or shapes mislead: stand-ins of our own, with exact numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from probe_toys import ListSink
from torch import Tensor, nn

from stabilitylab.probes import Watcher, find_sites

WIDTH, TOKENS = 6, 5
EXACT = {"rel": 1e-12}


def recorded(model: nn.Module, x: Tensor, probes: str) -> ListSink:
    """One row of training, and the held-out pass, both on ``x``."""
    sink = ListSink()
    with Watcher(model, sink, probes=probes, every=1, update_every=1, reference=lambda: model(x), strict=True) as w:
        loss = model(x).square().mean()
        loss.backward()
        w.step(loss=loss)
    return sink


class Stack(nn.Module):
    """A residual stream through layers of one kind."""

    def __init__(self, make: Callable[[], nn.Module], count: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(make() for _ in range(count))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 9), nn.ReLU(), nn.Linear(9, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


# a list of n layers beside a weight of n rows


@pytest.mark.parametrize("name", ["layers", "blocks", "h", "stages", "body"])
@pytest.mark.parametrize("beside", ["head", "gate", "positions"])
def test_a_weight_of_as_many_rows_as_there_are_layers_is_no_router(name: str, beside: str) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.ModuleList(Residual() for _ in range(3)))
            self.add_module(beside, nn.Embedding(3, WIDTH) if beside == "positions" else nn.Linear(WIDTH, 3))

        def forward(self, x: Tensor) -> Tensor:
            last = self.get_submodule(beside)
            x = x + last(torch.arange(TOKENS) % 3) if beside == "positions" else x
            for layer in self.get_submodule(name).children():
                x = layer(x)
            return x if beside == "positions" else last(x)

    model = Classifier().double()
    listed = name in ("layers", "blocks", "h") or beside != "gate"  # else it is a router, as in a mixture of experts
    assert [site.name for site in find_sites(model).layers] == ([f"{name}.{i}" for i in range(3)] if listed else [])
    sink = recorded(model, torch.randn(2, TOKENS, WIDTH, dtype=torch.float64), "default")
    total = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    assert sink.row(0)[0]["grad_norm_total"] == pytest.approx(float(total), **EXACT)


# feed-forward blocks


class GatedWithActivation(nn.Module):
    """torchtune's: w1 and its activation, w2 back, w3 the value, registered in this order."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, inner, bias=False), nn.Linear(inner, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, inner, bias=False)
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(self.activation(self.w1(x)) * self.w3(x))


@pytest.mark.parametrize("inner", [WIDTH, 2 * WIDTH, 3 * WIDTH, 4])
@pytest.mark.parametrize("nested", [False, True])
def test_of_a_gate_with_an_activation_module_the_product_counts(inner: int, nested: bool) -> None:
    model = Stack(lambda: nn.ModuleDict({"mlp": GatedWithActivation(inner)}) if nested else GatedWithActivation(inner))
    blocks = [layer.mlp if nested else layer for layer in model.layers]
    model.forward = lambda x: blocks[1](blocks[0](x))  # type: ignore[method-assign]
    batch = x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    products = {}
    for number, block in enumerate(blocks):
        given = F.silu(block.w1(x)) * block.w3(x)
        products[f"layers.{number}.{'mlp.' if nested else ''}w2"] = float((given > 0).double().mean())
        x = block(x)
    sink = recorded(model, batch, "activation_sparsity")
    assert sink.column(0, "activation_sparsity", "nonzero_fraction") == pytest.approx(products, **EXACT)


@pytest.mark.parametrize("order", ["up gate down", "down up gate", "up down gate", "gate down up"])
def test_gate_and_value_may_be_registered_anywhere(order: str) -> None:
    layer = nn.Module()
    layer.mlp = nn.Module()
    for name in order.split():
        layer.mlp.add_module(name, nn.Linear(9, WIDTH) if name == "down" else nn.Linear(WIDTH, 9))
    model = nn.Module()
    model.layers = nn.ModuleList([layer])
    assert [(site.name, site.take) for site in find_sites(model).activations] == [("layers.0.mlp.down", "input")]


def test_numbers_in_names_count_before_the_order_of_registration() -> None:
    layer = nn.Module()
    layer.fc2, layer.fc1 = nn.Linear(9, WIDTH), nn.Linear(WIDTH, 9)
    model = nn.Module()
    model.layers = nn.ModuleList([layer])
    assert [(site.name, site.take) for site in find_sites(model).activations] == [("layers.0.fc2", "input")]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(F.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class FusedGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(WIDTH, 18), nn.Linear(9, WIDTH)
        self.act_fn = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class AttentionDecoderLayer(nn.Module):
    """Zamba2's shared block: attention and a feed-forward block, in a class that is called attention."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.feed_forward = Attention(), FusedGate()
        self.input_layernorm, self.pre_ff_layernorm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.feed_forward(self.pre_ff_layernorm(self.self_attn(self.input_layernorm(x))))


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Module()
        self.mixer.in_proj, self.mixer.conv1d = nn.Linear(WIDTH, 12), nn.Conv1d(6, 6, 1, groups=6)
        self.mixer.out_proj = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        one, gate = self.mixer.in_proj(x).chunk(2, dim=-1)
        return x + self.mixer.out_proj(self.mixer.conv1d(one.mT).mT * F.silu(gate))


class Hybrid(nn.Module):
    def __init__(self, shared: AttentionDecoderLayer) -> None:
        super().__init__()
        self.shared_transformer, self.linear = shared, nn.Linear(WIDTH, WIDTH)
        self.mamba_decoder = Mamba()

    def forward(self, x: Tensor) -> Tensor:
        return self.mamba_decoder(x + self.linear(self.shared_transformer(x)))


@pytest.mark.parametrize("uses", [1, 2])
def test_the_feed_forward_block_of_a_decoder_layer_that_is_called_attention(uses: int) -> None:
    model = Stack(Mamba, 3)
    shared = AttentionDecoderLayer().double()
    for number in range(uses):
        model.layers[2 * number] = Hybrid(shared).double()
    sites = find_sites(model)
    home = "layers.0.shared_transformer"
    assert [site.name for site in sites.attentions] == [f"{home}.self_attn"]
    feed_forward = [site.name for site in sites.activations if "mixer" not in site.name]
    norms = {f"{home}.input_layernorm", f"{home}.pre_ff_layernorm"}
    if uses == 1:
        assert feed_forward == [f"{home}.feed_forward.down_proj"]
        assert {site.name for site in sites.norms} == norms
    else:  # it has no layer of its own, which is said
        assert feed_forward == []
        assert set(sites.left_out["activations"]) == {f"{home}.feed_forward.down_proj"}
        assert set(sites.left_out["norms"]) == norms
        assert "called by several layers" in sites.left_out["activations"][f"{home}.feed_forward.down_proj"]


class Corrected(nn.Module):
    """Gemma 3n's layer: a correction of low rank beside the feed-forward block, and an input for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.gate_proj, self.mlp.up_proj = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12)
        self.mlp.down_proj, self.mlp.act_fn = nn.Linear(12, WIDTH), nn.GELU()
        self.laurel = nn.Module()
        self.laurel.linear_left, self.laurel.linear_right = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self.act_fn = nn.GELU()
        self.per_layer_input_gate, self.per_layer_projection = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mlp, laurel = self.mlp, self.laurel
        x = x + laurel.linear_right(laurel.linear_left(x))
        x = x + mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
        return x + self.per_layer_projection(self.act_fn(self.per_layer_input_gate(x)) * x[..., :3])


def test_corrections_of_low_rank_and_inputs_of_a_layer_are_no_feed_forward_blocks() -> None:
    sites = find_sites(Stack(Corrected))
    assert [(s.name, s.take) for s in sites.activations] == [(f"layers.{i}.mlp.down_proj", "input") for i in range(2)]


def test_adapters_alone_are_feed_forward_blocks() -> None:
    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.act, self.up = nn.Linear(WIDTH, 2), nn.ReLU(), nn.Linear(2, WIDTH)

    assert [site.name for site in find_sites(Stack(Adapter)).activations] == ["layers.0.act", "layers.1.act"]


# norms of maps


class LayerNorm2d(nn.LayerNorm):
    """timm's: of the channels of maps (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class FrozenBatchNorm2d(nn.Module):
    """torchvision's: everything in it is a buffer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


class ChannelNorm(nn.Module):
    """Its name does not say that features come first."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=1, keepdim=True) * self.weight.view(-1, *[1] * (x.dim() - 2))


@pytest.mark.parametrize("norm", [LayerNorm2d, FrozenBatchNorm2d, ChannelNorm])
@pytest.mark.parametrize("side", [3, 4, 7])
def test_norms_of_maps_take_the_length_over_channels(norm: type[nn.Module], side: int) -> None:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.one, self.other = norm(4), nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.other(F.gelu(self.one(self.norm(x))))

    if norm is ChannelNorm and side == 4:
        pytest.skip("four channels and four rows: neither shape nor name tells")
    model = Stack(Convolved)
    x = torch.randn(2, 4, side, side + 2, dtype=torch.float64)
    sink = recorded(model, x, "ln_input")
    for number, layer in enumerate(model.layers):
        length = float(x.detach().norm(dim=1).mean())
        assert sink.column(0, "ln_input", "value")[f"layers.{number}.norm"] == pytest.approx(length, **EXACT)
        x = layer(x)


class BareNorm(nn.Module):
    """Has no weight; the number of its features may be one."""

    def __init__(self, normalized_shape: int | tuple[int, ...]) -> None:
        super().__init__()
        self.normalized_shape = normalized_shape

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("shape", [1, (1,), 6, (5, 6), ()])
def test_a_norm_without_a_weight_has_its_place(shape: int | tuple[int, ...]) -> None:
    (site,) = find_sites(nn.Sequential(BareNorm(shape), nn.Linear(WIDTH, WIDTH))).norms
    assert site.arranged(torch.zeros(2, 5, 6)).shape == (2, 5, 6)


# a stream in two parts


class Parted(nn.Module):
    """Mamba's and flash-attn's: adds what it is given to the residual, and yields its branch and the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None, **rest: Any) -> tuple[Tensor, Tensor]:
        residual = hidden_states if residual is None else hidden_states + residual
        return torch.tanh(self.inner(self.norm(residual))), residual


@pytest.mark.parametrize("by_name", [False, True])
def test_a_stream_that_layers_yield_in_parts_is_their_sum(by_name: bool) -> None:
    class Backbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Parted() for _ in range(3))
            self.norm_f = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            residual = None
            for layer in self.layers:
                x, residual = layer(hidden_states=x, residual=residual) if by_name else layer(x, residual)
            return self.norm_f(x + residual)

    model = Backbone().double()
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    sink = recorded(model, x, "residual_norm,cosine_similarity,activation_grad_norm")
    streams = [x]
    for layer in model.layers:
        streams.append(streams[-1] + torch.tanh(layer.inner(layer.norm(streams[-1]))))
    lengths = {f"layers.{i}": streams[i + 1].norm(dim=-1).mean().item() for i in range(3)}
    lengths["layers.input"] = x.norm(dim=-1).mean().item()
    found = sink.column(0, "residual_norm", "value")
    assert found == pytest.approx({site: lengths[site] for site in found}, **EXACT)
    assert set(found) == set(lengths)
    cosines = {
        f"layers.{i}": F.cosine_similarity(one, other, dim=-1).mean().item()
        for i, (one, other) in enumerate(pairwise(streams))
    }
    assert sink.column(0, "cosine_similarity", "raw") == pytest.approx(cosines, **EXACT)
    grads = torch.autograd.grad(model.norm_f(streams[-1]).square().mean(), streams[1:])
    norms = {f"layers.{i}": float(grad.norm()) for i, grad in enumerate(grads)}
    found = sink.column(0, "activation_grad_norm", "value")
    assert {site: found[site] for site in norms} == pytest.approx(norms, **EXACT)


# norms behind several stacks of one parent


def two_stacks(*names: str) -> nn.Module:
    """Registers lists of layers, embeddings and norms in the order of ``names``."""
    model = nn.Module()
    for name in names:
        module = nn.LayerNorm(WIDTH) if "norm" in name else nn.ModuleList(Residual() for _ in range(2))
        model.add_module(name, module)
    return model


@pytest.mark.parametrize(
    ("names", "outputs"),
    [
        ("encoder decoder enc_norm dec_norm", "enc_norm dec_norm"),
        ("encoder decoder dec_norm enc_norm", "enc_norm dec_norm"),
        ("layers_a layers_b norm1 norm2", "norm1 norm2"),
        ("encoder decoder enc_norm norm", "enc_norm norm"),
        ("encLayers decLayers normDec normEnc", "normEnc normDec"),
        ("blocks1 blocks2 blocks3 norm1 norm2 norm3", "norm1 norm2 norm3"),
        # one of them has no norm
        ("encoder decoder dec_norm", "encoder.1 dec_norm"),
        ("encoder decoder enc_norm", "enc_norm decoder.1"),
        ("encoder decoder norm", "encoder.1 norm"),
        ("encoder decoder norm1 norm2 norm3", "encoder.1 decoder.1"),
        ("encoder decoder dec_norm norm", "encoder.1 dec_norm"),
        # each list before its own, as ever
        ("encoder enc_norm decoder dec_norm", "enc_norm dec_norm"),
        ("encoder norm1 decoder norm2 norm3", "norm1 norm2"),
        ("embed_norm encoder dec_embed_norm decoder dec_norm", "encoder.1 dec_norm"),
        ("encoder decoder", "encoder.1 decoder.1"),
        ("encoder dec_norm norm", "dec_norm"),
        ("norm encoder", "encoder.1"),
    ],
)
def test_each_stack_of_one_parent_ends_in_its_own_norm(names: str, outputs: str) -> None:
    assert [site.name for site in find_sites(two_stacks(*names.split())).outputs] == outputs.split()
    nested = nn.Module()
    nested.model = two_stacks(*names.split())
    assert [site.name for site in find_sites(nested).outputs] == [f"model.{name}" for name in outputs.split()]


def test_the_outputs_of_two_stacks_of_one_parent_are_those_of_their_norms() -> None:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.encoder = nn.ModuleList(Residual() for _ in range(2))
            self.decoder = nn.ModuleList(Residual() for _ in range(2))
            self.enc_norm, self.dec_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            nn.init.constant_(self.dec_norm.weight, 3.0)

        def encoded(self, x: Tensor) -> Tensor:
            for layer in self.encoder:
                x = layer(x)
            return self.enc_norm(x)

        def forward(self, x: Tensor) -> Tensor:
            y = x + self.encoded(x).mean(1, keepdim=True)
            for layer in self.decoder:
                y = layer(y)
            return self.dec_norm(y)

    model = Translator().double()
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    sink = recorded(model, x, "output_norm")
    exact = {"enc_norm": model.encoded(x), "dec_norm": model(x)}
    norms = {name: value.norm(dim=-1).mean().item() for name, value in exact.items()}
    assert sink.column(0, "output_norm", "value") == pytest.approx(norms, **EXACT)


# channels first or last in layers with convolutions


class ChannelsLast(nn.Module):
    """VMamba's: a stream (B, H, W, C), and a depthwise convolution inside."""

    rank = 4

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.enter, self.leave = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.conv, self.act = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.conv(self.enter(self.norm(x)).permute(0, 3, 1, 2)))
        return x + self.leave(inner.permute(0, 2, 3, 1))


class TimesLast(nn.Module):
    """The block of a 1-D U-Net: a stream (B, C, T), and a Linear that takes the time of diffusion."""

    rank = 3

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv1d(WIDTH, 9, 3, padding=1), nn.Conv1d(9, WIDTH, 3, padding=1)
        self.time = nn.Linear(4, 9)

    def forward(self, x: Tensor) -> Tensor:
        time = self.time(torch.ones(len(x), 4, dtype=x.dtype))
        return x + self.other(F.silu(self.one(x) + time[:, :, None]))


class ConvolvedTokens(nn.Module):
    """A stream (B, T, C) with a LayerNorm, and convolutions instead of Linears."""

    rank = 3

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.conv(self.norm(x).mT)).mT


class ConvolvedMaps(nn.Module):
    """ConvNeXt's: a stream (B, C, H, W), and Linears on (B, H, W, C) inside."""

    rank = 4

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.norm, self.fc1, self.act, self.fc2 = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 8),
            nn.GELU(),
            nn.Linear(8, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return x + self.fc2(self.act(self.fc1(inner))).permute(0, 3, 1, 2)


STREAMS = [(ChannelsLast, -1), (TimesLast, 1), (ConvolvedTokens, -1), (ConvolvedMaps, 1)]


@pytest.mark.parametrize(("layer", "axis"), STREAMS)
def test_sizes_tell_where_the_channels_of_a_stream_are(layer: Any, axis: int) -> None:
    model: Any = Stack(layer, 3)
    shape = [5] * layer.rank
    shape[0], shape[axis] = 2, WIDTH
    x = torch.randn(shape, dtype=torch.float64)
    sink = recorded(model, x, "residual_norm,cosine_similarity")
    streams = [x]
    for each in model.layers:
        streams.append(each(streams[-1]))
    names = ["layers.input", *(f"layers.{i}" for i in range(3))]
    lengths = {name: y.norm(dim=axis).mean().item() for name, y in zip(names, streams, strict=True)}
    assert sink.column(0, "residual_norm", "value") == pytest.approx(lengths, **EXACT)
    cosines = {
        name: F.cosine_similarity(one, other, dim=axis).mean().item()
        for name, (one, other) in zip(names[1:], pairwise(streams), strict=True)
    }
    assert sink.column(0, "cosine_similarity", "raw") == pytest.approx(cosines, **EXACT)


@pytest.mark.parametrize(("layer", "shape"), [(ChannelsLast, (2, 8, 5, 7)), (ConvolvedMaps, (2, 5, 7, 8))])
def test_an_activation_inside_of_a_layer_has_an_axis_of_its_own(layer: type[nn.Module], shape: tuple[int, ...]) -> None:
    sites = find_sites(Stack(layer)).activations
    assert [site.name for site in sites] == ["layers.0.act", "layers.1.act"]
    assert all(site.arranged(torch.zeros(shape)).shape == (2, 5, 7, 8) for site in sites)


@pytest.mark.parametrize(
    ("layer", "shape", "arranged"),
    [
        (ChannelsLast, (2, WIDTH, 7, WIDTH), (2, 7, WIDTH, WIDTH)),  # as high as there are channels
        (ChannelsLast, (2, 7, 7, 7), (2, 7, 7, 7)),
        (TimesLast, (2, WIDTH, 9), (2, WIDTH, 9)),  # the inner width
        (TimesLast, (2, 7, 7), (2, 7, 7)),
        (ConvolvedMaps, (2, 10, 7, WIDTH), (2, 10, 7, WIDTH)),  # only the last dimension fits
        (ConvolvedMaps, (2, 10, 7, 8), (2, 10, 7, 8)),
        (ConvolvedMaps, (2, 10, 7, 11), (2, 7, 11, 10)),
        (ConvolvedMaps, (2, WIDTH), (2, WIDTH)),
        (ConvolvedTokens, (2, 7, 7), (2, 7, 7)),
        (Residual, (2, WIDTH, 7), (2, WIDTH, 7)),  # without convolutions
    ],
)
def test_sizes_decide_if_one_dimension_alone_fits_and_else_the_kinds_of_modules(
    layer: type[nn.Module], shape: tuple[int, ...], arranged: tuple[int, ...]
) -> None:
    for site in find_sites(Stack(layer)).layers:
        assert site.arranged(torch.arange(torch.Size(shape).numel()).view(shape)).shape == arranged


def test_an_axis_that_sizes_told_once_stays() -> None:
    (site, _) = find_sites(Stack(TimesLast)).layers
    twice = torch.zeros(2, WIDTH, 9)
    assert site.arranged(twice).shape == (2, WIDTH, 9)
    assert site.arranged(torch.zeros(2, WIDTH, 5)).shape == (2, 5, WIDTH)
    assert site.arranged(twice).shape == (2, 9, WIDTH)


class GainNorm(nn.Module):
    """lucidrains' RMSNorm of maps: its weight is called g; with ``shift`` his LayerNorm."""

    def __init__(self, shape: tuple[int, ...], shift: bool = False) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.rand(shape) + 0.5)
        if shift:
            self.b = nn.Parameter(torch.rand(shape))
        self.register_buffer("calls", torch.zeros(3, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * self.g + getattr(self, "b", 0.0)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("side", [3, 4, 7])
def test_a_norm_of_maps_whose_weight_has_another_name(side: int, shift: bool) -> None:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.one = GainNorm((1, 4, 1, 1), shift), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.one(self.norm(x)))

    model: Any = Stack(Convolved)
    x = torch.randn(2, 4, side, side, dtype=torch.float64)
    sink = recorded(model, x, "ln_input")
    lengths = {}
    for number, layer in enumerate(model.layers):
        lengths[f"layers.{number}.norm"] = x.norm(dim=1).mean().item()
        x = layer(x)
    assert sink.column(0, "ln_input", "value") == pytest.approx(lengths, **EXACT)


@pytest.mark.parametrize("shape", [(6,), (1, 1, 6), (1,), (), (5, 6), (3,)])
def test_other_parameters_of_a_norm_leave_the_features_in_the_last_dimension(shape: tuple[int, ...]) -> None:
    (site,) = find_sites(nn.Sequential(GainNorm(shape), nn.Linear(WIDTH, WIDTH))).norms
    assert site.arranged(torch.zeros(2, 5, 6)).shape == (2, 5, 6)
    assert site.arranged(torch.zeros(2, 1, 6)).shape == (2, 1, 6)
    assert site.arranged(torch.zeros(2, 6, 6)).shape == (2, 6, 6)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Other(Mlp): ...


class Staged(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))


class OfImages(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(6, 6, 1)


class Holder(nn.Module):
    """A model whose layers are the children ``names`` of itself, or of a ModuleDict ``home``."""

    def __init__(self, names: str, home: str = "", *kinds: type[nn.Module]) -> None:
        super().__init__()
        layers = {name: kind() for name, kind in zip(names.split(), kinds or [Mlp] * 9, strict=False)}
        if home:
            self.add_module(home, nn.ModuleDict(layers))
        for name, layer in {} if home else layers.items():
            self.add_module(name, layer)
        self.norm, self.called = nn.LayerNorm(6), [*layers.values()]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.called:
            x = layer(x)
        return self.norm(x)


@pytest.mark.parametrize(
    ("names", "home", "stack", "numbers"),
    [
        ("layer1 layer2 layer3", "", "layers", [1, 2, 3]),
        ("block_0 block_1", "", "layers", [1, 2]),
        ("encoder_layer1 encoder_layer2", "", "encoder", [1, 2]),
        ("layer_0 layer_1", "parts", "parts", [1, 2]),
        ("b0 b1 b2", "blocks", "blocks", [1, 2, 3]),
    ],
)
def test_layers_are_found_as_attributes_and_under_keys_with_a_number(
    names: str, home: str, stack: str, numbers: list[int]
) -> None:
    model = Holder(names, home)
    found = find_sites(model)
    layers = [f"{home}.{name}".lstrip(".") for name in names.split()]
    assert [(site.name, site.layer) for site in found.layers] == [*zip(layers, numbers, strict=True)]
    assert [site.name for site in found.activations] == [f"{layer}.act" for layer in layers]
    assert [site.name for site in found.outputs] == ["norm"]
    assert {site.stack for site in found.layers} == {stack}
    sink, x = ListSink(), torch.randn(2, 3, 6)
    with Watcher(model, sink, every=1) as watcher:
        model(x).sum().backward()
        watcher.step()
    inputs = sink.column(0, "ln_input", "value")
    assert inputs[f"{layers[0]}.norm"] == pytest.approx(float(x.norm(dim=-1).mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("names", "home", "kinds"),
    [
        ("layer1", "", [Mlp]),  # one is no list
        ("layer1 layer2", "", [Mlp, Other]),  # of two classes
        ("head1 head2", "", [Mlp, Mlp]),
        ("layer1 layer2", "", [OfImages, OfImages]),
        ("layer_0 layer_1", "parts", [Mlp, Other]),
        ("task_0 task_1", "heads", [Mlp, Mlp]),
    ],
)
def test_other_children_are_no_layers(names: str, home: str, kinds: list[type[nn.Module]]) -> None:
    assert not find_sites(Holder(names, home, *kinds)).layers


def test_attributes_that_hold_lists_are_stages() -> None:
    found = find_sites(Holder("layer1 layer2", "", Staged, Staged))
    assert [site.name for site in found.layers] == [f"layer{n}.blocks.{m}" for n in (1, 2) for m in (0, 1)]
