"""What probes read of a stream of several tensors: their mean, and the sum of their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from probe_toys import ListSink
from rest_slow import rest_slow
from torch import Tensor

from stabilitylab.models import Transformer, build_model
from stabilitylab.probes import Watcher, find_sites
from stabilitylab.probes.library.mixing import MixingGain, largest_sum
from stabilitylab.probes.places.sites import shown_by

REAL = torch.arange(7) < torch.tensor([[7], [5], [6]])
STREAMS = "activation_grad_norm,residual_norm,branch_variance,cosine_similarity,layer_branch,outliers,ln_input"


def built(arch: str, **settings: Any) -> Transformer:
    sizes = {"d_model": 16, "d_ffn": 24, "heads": 2, "decoder_layers": 3, "stack": "decoder"}
    return build_model(arch=arch, source_vocab=29, target_vocab=29, **(sizes | settings)).double()


def batch() -> Tensor:
    return torch.randint(0, 29, (3, 7), generator=torch.Generator().manual_seed(0))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens=tokens, mask=REAL)[REAL], tokens[REAL])


def watched(model: Transformer, probes: str = STREAMS, backwards: int = 1, call: Any = None) -> ListSink:
    sink, tokens = ListSink(), batch()
    options = {"mask": {"decoder": REAL}, "every": 1, "update_every": 1}
    watcher = Watcher(model, sink, probes=probes, reference=lambda: model(tokens=tokens, mask=REAL), **options)
    for _ in range(backwards):
        loss_of(call or model, tokens).backward()
    watcher.step()
    watcher.flush()
    return sink


def by_hand(model: Transformer) -> tuple[dict[str, float], dict[str, float]]:
    """Norm per token, and norm of the gradient, of the mean stream behind each sub-layer and in front of the first."""
    kept: dict[str, tuple[Tensor, ...]] = {}
    first = model.decoder.layers[0]
    first.register_forward_pre_hook(lambda _m, args: kept.setdefault("decoder.input", args[0]) and None)
    for number, layer in enumerate(model.decoder.layers):
        for name, sublayer in layer.named_children():
            site = f"decoder.layers.{number}.{name}"
            sublayer.register_forward_hook(lambda _m, _x, y, site=site: kept.setdefault(site, y) and None)
    loss = loss_of(model, batch())
    norms, gradients = {}, {}
    for site, parts in kept.items():
        distinct = list({id(part): part for part in parts}.values())
        found = torch.autograd.grad(loss, distinct, retain_graph=True)
        gradients[site] = float(torch.stack(found).sum(0).norm())
        norms[site] = float(torch.stack(parts).mean(0).norm(dim=-1)[REAL].mean().detach())
    return norms, gradients


@pytest.mark.parametrize("arch", ["hyper-connections", "mhc"])
def test_mean_and_summed_gradient_by_hand(arch: str) -> None:
    torch.manual_seed(0)
    model = built(arch)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    sink = watched(model)
    norms, gradients = by_hand(model)
    found = sink.column(0, "residual_norm", "value"), sink.column(0, "activation_grad_norm", "value")
    assert found[0] == pytest.approx(norms, rel=1e-12)
    assert found[1] == pytest.approx(gradients, rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_at_the_start_every_number_is_that_of_preln(n: int) -> None:
    """Hyper-Connections start as Pre-LN: each stream is its stream, and moving all of them moves it."""
    plain = built("preln")
    streams = built("hyper-connections-static", options={"n": n})
    streams.load_state_dict(plain.state_dict(), strict=False)
    expected, found = watched(plain), watched(streams)
    for name, table in expected.tables.items():
        own = found.tables[name]
        assert [row.site for row in own.rows] == [row.site for row in table.rows]
        cells, others = expected.row(0)[1][name], found.row(0)[1][name]
        np.testing.assert_allclose(others.values, cells.values, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("arch", ["attnres", "attnres-block", "siamese-norm", "resi-dual"])
def test_the_first_of_a_tuple_is_what_is_read_by_default(arch: str) -> None:
    model = built(arch)
    seen: list[Tensor] = []
    model.decoder.layers[1].ffn.register_forward_hook(lambda _m, _x, y: seen.append(y[0]))
    sink = watched(model)
    norm = float(seen[0].norm(dim=-1)[REAL].mean().detach())
    assert sink.column(0, "residual_norm", "value")["decoder.layers.1.ffn"] == pytest.approx(norm, rel=1e-12)
    assert all(value > 0 for value in sink.column(0, "activation_grad_norm", "value").values())


def test_branch_and_shortcut_of_attention_over_depth_add_up_to_what_is_read_next() -> None:
    model = built("attnres-block", options={"blocks": 2})
    taps: list[Tensor] = []
    residual = model.decoder.layers[1].ffn
    for tap in (residual.shortcut, residual.scaled_branch):
        tap.register_forward_hook(lambda _m, _x, y: taps.append(y))
    ends: list[Tensor] = []
    residual.register_forward_hook(lambda _m, _x, y: ends.append(y[0]))
    model(tokens=batch())
    torch.testing.assert_close(taps[0] + taps[1], ends[0], rtol=0, atol=0)


@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_of_several_backwards_add_up_as_those_of_one_tensor_do(backwards: int) -> None:
    plain, streams = built("preln"), built("hyper-connections-static")
    streams.load_state_dict(plain.state_dict(), strict=False)
    own, other = (watched(model, "activation_grad_norm", backwards) for model in (plain, streams))
    expected = own.column(0, "activation_grad_norm", "value")
    assert other.column(0, "activation_grad_norm", "value") == pytest.approx(expected, rel=1e-12)


def test_layers_that_are_computed_again_are_counted_once() -> None:
    model = built("hyper-connections")
    expected = watched(model).column(0, "activation_grad_norm", "value")
    model.zero_grad()
    model.decoder.checkpointing = True
    assert watched(model).column(0, "activation_grad_norm", "value") == pytest.approx(expected, rel=1e-12)


def compiled(model: Transformer, probes: str) -> ListSink:
    """The numbers of a model whose layers are compiled."""
    torch._dynamo.reset()
    for layer in model.decoder.layers:
        layer.compile(backend="eager", fullgraph=True)
    found = watched(model, probes)
    torch._dynamo.reset()
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("arch", rest_slow(["hyper-connections", "preln"], ["preln"]))
def test_compiled_layers_show_the_same(arch: str) -> None:
    expected = watched(built(arch, value_residual="fixed"), "activation_grad_norm,residual_norm")
    found = compiled(built(arch, value_residual="fixed"), "activation_grad_norm,residual_norm")
    for table in ("activation_grad_norm", "residual_norm"):
        own = expected.column(0, table, "value")
        assert found.column(0, table, "value") == pytest.approx(own, rel=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_taps_show_the_same() -> None:
    """Values of all places; gradients of what leaves them, streams and the tuples of taps among them."""
    expected, found = watched(built("mhc"), "fingerprint"), compiled(built("mhc"), "fingerprint")
    own, other = (sink.column(0, "fingerprint", "norm") for sink in (expected, found))
    assert other == pytest.approx(own, rel=1e-12)
    own, other = (
        {site: value for site, value in sink.column(0, "fingerprint_gradient", "norm").items() if site.endswith(":out")}
        for sink in (expected, found)
    )
    assert "decoder.layers.0.ffn.scaled_branch:out" in own
    assert other == pytest.approx(own, rel=1e-12)


def composed(model: Transformer) -> dict[str, tuple[float, float, float, float]]:
    """Gains of the products of the matrices, by numpy."""
    matrices: dict[str, np.ndarray] = {}
    for residual in model.residuals():
        residual.mixing.register_forward_hook(
            lambda _m, _x, y, at=str(residual.place): matrices.__setitem__(at, y.detach().numpy())
        )
    model(tokens=batch())
    found, product = {}, None
    for at, flat in matrices.items():
        own = flat.reshape(*flat.shape[:2], 4, 4)
        product = own if product is None else np.einsum("btij,btjk->btik", own, product)
        sums = [abs(m.sum(axis)).max(-1)[REAL.numpy()].mean() for m in (product, own) for axis in (-1, -2)]
        found[at] = tuple(float(each) for each in sums)
    return found


@pytest.mark.parametrize("arch", ["hyper-connections-static", "hyper-connections", "mhc"])
def test_the_gain_of_composed_mixtures(arch: str) -> None:
    torch.manual_seed(0)
    model = built(arch)
    still = watched(model, "mixing_gain").column(0, "mixing_gain", "forward")
    assert list(still.values()) == pytest.approx([1.0] * 6, rel=1e-12)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("carry", "phi", "scale")):
            parameter.data.add_(0.5 * torch.randn_like(parameter))
    sink = watched(model, "mixing_gain")
    expected = composed(model)
    columns = [
        list(sink.column(0, "mixing_gain", c).values()) for c in ("forward", "backward", "own_forward", "own_backward")
    ]
    np.testing.assert_allclose(np.array(columns).T, np.array([*expected.values()]), rtol=1e-12)
    last = list(sink.column(0, "mixing_gain", "forward").values())[-1]
    assert last == pytest.approx(1, abs=1e-6) if arch == "mhc" else last > 1.5


def test_the_gain_is_that_of_equal_streams_and_bounds_no_others_where_entries_are_negative() -> None:
    """The definition of mHC's figures is |sum|, not the sum of absolute values."""
    mixture = torch.tensor([[[[1.0, -1.0], [-1.0, 1.0]]]])
    assert largest_sum(mixture, -1).tolist() == largest_sum(mixture, -2).tolist() == [[0.0]]
    assert (mixture @ torch.tensor([1.0, -1.0])).abs().max() == 2
    mixture = torch.tensor([[[[0.5, -2.0], [0.25, 0.25]]]])
    assert largest_sum(mixture, -1).tolist() == [[1.5]]
    assert largest_sum(mixture, -2).tolist() == [[1.75]]
    assert "only if the product has no negative entries" in " ".join((MixingGain.__doc__ or "").split())


def test_rows_that_come_with_heads_found_later_repeat_no_place() -> None:
    """Heads are found in the first pass, and places are then looked for again; a probe makes its sites anew."""
    torch.manual_seed(0)
    model = built("hyper-connections-static")
    alone, beside = (watched(model, names) for names in ("none,mixing_gain", "none,mixing_gain,attention_heads"))
    assert [row.site for row in beside.tables["mixing_gain"].rows] == [
        row.site for row in alone.tables["mixing_gain"].rows
    ]
    for column in ("forward", "backward"):
        assert beside.column(0, "mixing_gain", column) == alone.column(0, "mixing_gain", column)


def test_models_without_mixtures_have_no_such_table() -> None:
    assert "mixing_gain" not in watched(built("preln"), "all").tables
    assert shown_by(find_sites(built("resi-dual")).layers[0].module) is None


@pytest.mark.parametrize("arch", rest_slow(["hyper-connections", "mhc"], ["mhc"]))
def test_a_stream_is_read_alike_beside_fingerprints(arch: str) -> None:
    """Both probes look at the modules of sub-layers: what is read there does not depend on which comes first."""
    torch.manual_seed(0)
    model = built(arch)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    probes = "residual_norm", "activation_grad_norm"
    alone = watched(model, ",".join(probes))
    for order in (("fingerprint", *probes), (*probes, "fingerprint")):
        model.zero_grad()
        beside = watched(model, ",".join(order))
        for table in probes:
            assert beside.column(0, table, "value") == alone.column(0, table, "value"), (order, table)


def test_fingerprints_of_streams_and_taps_are_those_of_their_mean() -> None:
    """Of equal streams that is each of them: layers and sub-layers have the numbers of Pre-LN, and taps their values.
    What a shortcut keeps feeds no branch here: its gradient is that of the sub-layer's output."""
    plain, streams = built("preln"), built("hyper-connections-static")
    streams.load_state_dict(plain.state_dict(), strict=False)
    expected, found = (watched(model, "fingerprint") for model in (plain, streams))
    for table, other_paths in (("fingerprint", ()), ("fingerprint_gradient", ("shortcut", "norm:in"))):
        own, other = (sink.column(0, table, "norm") for sink in (expected, found))
        shared = [site for site in own if not any(path in site for path in other_paths)]
        assert {site.rpartition(".")[2] for site in shared} >= {"0:in", "ffn:in", "ffn:out", "branch:out"}
        assert [other[site] for site in shared] == pytest.approx([own[site] for site in shared], rel=1e-12), table
    kept = {site: value for site, value in other.items() if ".shortcut:" in site}
    assert len(kept) == 12
    for site, value in kept.items():
        assert value == pytest.approx(other[f"{site.rpartition('.')[0]}:out"], rel=1e-12), site
