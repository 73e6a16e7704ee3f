"""Places found by structure in models that know nothing of us."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from probe_toys import Toy
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from stabilitylab.errors import UsageError
from stabilitylab.probes import Site, find_sites
from stabilitylab.probes.places.naming import modules_of, parameters_of, unwrapped
from stabilitylab.probes.places.sites import stream, tensor_of


def names(sites: tuple[Site, ...]) -> list[str]:
    return [site.name for site in sites]


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Gated(nn.Module):
    """A feed-forward block with two ways in, as LLaMA's."""

    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 9), nn.Linear(4, 9), nn.Linear(9, 4)
        if activation is not None:
            self.act_fn = activation


class Block(nn.Module):
    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(4), RMSNorm(4)
        self.self_attn = nn.ModuleDict({"q": nn.Linear(4, 4), "o": nn.Linear(4, 4), "dropout": nn.ReLU()})
        self.mlp = Gated(activation)


class Causal(nn.Module):
    """A stack inside ``model``, as LLaMA's; or at the root, with a norm and a head behind it."""

    def __init__(self, layers: int = 2, activation: nn.Module | None = None, norm: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(Block(activation) for _ in range(layers))
        if norm:
            self.norm = RMSNorm(4)
        self.lm_head = nn.Linear(4, 5)

    def forward(self, ids: Tensor) -> Tensor:
        raise NotImplementedError("these models are looked at, not called")


def test_the_toy_by_kind() -> None:
    sites = find_sites(Toy())
    assert [(stack.name, stack.path, stack.home) for stack in sites.stacks] == [
        ("encoder", "encoder.layers", "encoder"),
        ("decoder", "decoder.layers", "decoder"),
    ]
    assert [(s.name, s.stack, s.layer) for s in sites.layers][2:] == [
        ("decoder.layers.0", "decoder", 1),
        ("decoder.layers.1", "decoder", 2),
    ]
    assert len(sites.norms) == 2 * 2 + 1 + 2 * 3 + 1
    assert all(site.take == "input" and not site.taps for site in sites.norms)
    assert names(sites.activations)[:2] == ["encoder.layers.0.linear2", "encoder.layers.1.linear2"]
    assert all(site.take == "input" and site.sublayer == "linear2" for site in sites.activations)
    assert names(sites.outputs) == ["encoder", "decoder"]
    assert names(stream(sites))[:4] == ["encoder.input", "encoder.layers.0", "encoder.layers.1", "decoder.input"]


def test_torch_transformer() -> None:
    sites = find_sites(nn.Transformer(8, 2, 2, 3, 16, batch_first=True))
    assert [(stack.name, len(stack.layers)) for stack in sites.stacks] == [("encoder", 2), ("decoder", 3)]
    assert len(sites.norms) == 2 * 2 + 1 + 3 * 3 + 1
    assert [site.layer for site in sites.activations] == [1, 2, 1, 2, 3]
    assert all(site.name.endswith("linear2") for site in sites.activations)


@pytest.mark.parametrize("activation", [None, nn.SiLU])
def test_rms_norms_and_gated_feed_forward_blocks(activation: type[nn.Module] | None) -> None:
    model = nn.Module()
    model.model = Causal()
    for layer in model.model.layers:
        if activation:
            layer.mlp.act_fn = activation()
    sites = find_sites(model)
    assert [stack.name for stack in sites.stacks] == ["model"]
    assert [(site.stack, site.layer, site.sublayer) for site in sites.norms][-3:] == [
        ("model", 2, "input_layernorm"),
        ("model", 2, "post_attention_layernorm"),
        ("model", 0, "norm"),
    ]
    # with an activation module or without: what the last linear sees is the product of gate and value
    assert [(site.name, site.take, site.sublayer) for site in sites.activations] == [
        (f"model.layers.{i}.mlp.down", "input", "mlp") for i in range(2)
    ]
    assert names(sites.outputs) == ["model"]


def test_an_activation_that_layers_share_gives_way_to_the_second_linear() -> None:
    sites = find_sites(Causal(activation=nn.GELU()))
    assert names(sites.activations) == ["layers.0.mlp.down", "layers.1.mlp.down"]


def test_a_norm_that_layers_share_belongs_to_no_layer() -> None:
    model = Causal()
    model.layers[0].input_layernorm = model.layers[1].input_layernorm
    assert names(find_sites(model).norms) == [
        "layers.0.post_attention_layernorm",
        "layers.1.post_attention_layernorm",
        "norm",
    ]


def test_the_output_of_a_stack_at_the_root_is_before_the_head() -> None:
    assert names(find_sites(Causal()).outputs) == ["norm"]
    assert names(find_sites(Causal(norm=False)).outputs) == ["layers.1"]
    assert [stack.name for stack in find_sites(Causal()).stacks] == ["layers"]
    assert names(
        find_sites(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=False)).outputs
    )


def test_output_site_is_the_callers() -> None:
    assert names(find_sites(Toy(), "decoder.layers.0").outputs) == ["decoder.layers.0"]
    with pytest.raises(UsageError, match=r"'decoder.norn' is no module of the model; near it are decoder.norm"):
        find_sites(Toy(), "decoder.norn")


def test_a_list_with_one_layer_counts_if_its_name_says_so() -> None:
    assert len(find_sites(Causal(1)).layers) == 1
    odd = nn.Module()
    odd.heads = nn.ModuleList([Gated()])
    assert find_sites(odd).layers == ()


def test_sequential_blocks_count_and_sequential_leaves_do_not() -> None:
    mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    assert find_sites(mlp).layers == ()
    model = nn.Sequential(OrderedDict(stem=nn.Linear(3, 4), a=Block(), b=Block(), tail=RMSNorm(4)))
    sites = find_sites(model)
    assert [(site.name, site.layer) for site in sites.layers] == [("a", 1), ("b", 2)]
    assert (sites.norms[-1].name, sites.norms[-1].layer) == ("tail", 0)


def test_lists_inside_a_layer_are_not_stacks() -> None:
    class T5Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ModuleList([Block(), Block()])

    model = nn.Module()
    model.block = nn.ModuleList([T5Block(), T5Block(), T5Block()])
    sites = find_sites(model)
    assert [(stack.name, len(stack.layers)) for stack in sites.stacks] == [("block", 3)]
    assert (sites.norms[2].layer, sites.norms[2].sublayer) == (1, "layer.1")


def test_two_lists_under_one_parent_are_two_stacks() -> None:
    model = nn.Module()
    model.layers, model.blocks = (nn.ModuleList([Block(), Block()]) for _ in range(2))
    inner = nn.Module()
    inner.vision = model
    assert [stack.name for stack in find_sites(inner).stacks] == ["vision", "vision.blocks"]


def test_norms_over_channels_and_parametrisations_are_no_sites() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(4),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm1d(4),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    )
    sites = find_sites(model)
    assert sites.norms == ()
    assert sites.nearest("norms")[:2] == ["0 (BatchNorm1d)", "1 (GroupNorm)"]


class Wrapped(nn.Module):
    """As a compiler or a data-parallel wrapper stands around a model."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)


WRAPPERS = {  # as torch's classes of these names
    "_orig_mod": type("OptimizedModule", (Wrapped,), {"__module__": "torch._dynamo.eval_frame"}),
    "module": type("DistributedDataParallel", (Wrapped,), {"__module__": "torch.nn.parallel.distributed"}),
    "_fsdp_wrapped_module": type("FullyShardedDataParallel", (Wrapped,), {"__module__": "torch.distributed.fsdp"}),
}


def wrapped(name: str, inner: nn.Module) -> nn.Module:
    return WRAPPERS[name](name, inner)


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_leave_no_trace_in_names(name: str) -> None:
    plain = Toy()
    for model in (wrapped(name, Toy()), wrapped("module", wrapped(name, Toy()))):
        for kind in ("layers", "inputs", "norms", "activations", "outputs"):
            one, other = (getattr(find_sites(each), kind) for each in (plain, model))
            assert [site.row for site in one] == [site.row for site in other]
        assert list(parameters_of(model)) == [key for key, _ in plain.named_parameters()]


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_child_that_is_called_as_what_a_wrapper_holds_hides_nothing(name: str) -> None:
    model = Wrapped(name, Toy())
    model.head = nn.Linear(2, 2)
    assert set(parameters_of(model)) == {key for key, _ in model.named_parameters()}
    assert next(site.name for site in find_sites(model).layers) == f"{name}.encoder.layers.0"


def test_checkpointed_layers_are_layers() -> None:
    model = Toy()
    for stack in (model.encoder, model.decoder):
        stack.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in stack.layers)
    plain, wrapped = find_sites(Toy()), find_sites(model)
    assert [site.row for site in plain.norms] == [site.row for site in wrapped.norms]
    assert [site.row for site in plain.layers] == [site.row for site in wrapped.layers]


def test_names_of_wrapped_parts() -> None:
    inner = nn.Module()
    inner.ffn = wrapped("_orig_mod", checkpoint_wrapper(nn.Linear(2, 2)))
    model = wrapped("module", inner)
    assert list(modules_of(model)) == ["", "ffn"]
    assert list(parameters_of(model)) == ["ffn.weight", "ffn.bias"]
    assert modules_of(model)["ffn"] is unwrapped(model.module.ffn)


def test_the_hidden_state_of_any_output() -> None:
    @dataclass
    class Output:
        mask: Tensor
        last_hidden_state: Tensor

    hidden, mask = torch.ones(2, 3), torch.ones(2, dtype=torch.bool)
    for value in (
        hidden,
        (hidden, mask),
        [mask, (None, hidden)],
        {"mask": mask, "hidden": hidden},
        Output(mask, hidden),
    ):
        assert tensor_of(value) is hidden
    for value in (None, mask, (), {"a": 3}, "text"):
        assert tensor_of(value) is None
