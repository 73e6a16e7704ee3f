"""Attention's entropy and largest logit: closed forms, PyTorch's own modules, the reference model, and what is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from probe_toys import Attention, ListSink, Toy, batch, masks
from torch import Tensor, nn

from stabilitylab.errors import UsageError
from stabilitylab.models import build_model
from stabilitylab.probes import Watcher, find_sites

COLUMNS = ("entropy", "entropy_min", "ceiling", "max_logit")
WIDTH, HEADS = 8, 2


def recorded(model: nn.Module, reference: Callable[[], Any], mask: Any = None) -> ListSink:
    sink = ListSink()
    watcher = Watcher(model, sink, probes="attention", mask=mask, reference=reference)
    watcher.step()
    watcher.flush()
    watcher.close()
    return sink


def columns(sink: ListSink, site: str) -> dict[str, float]:
    return {column: sink.column(0, "attention", column)[site] for column in COLUMNS}


def of(logits: Tensor, allowed: Tensor, real: Tensor) -> dict[str, float]:
    """From logits (B, H, T, L), what is allowed among them, and the real queries (B, T), one query at a time."""
    entropies, lowest, ceilings, largest = [], [], [], -math.inf
    for b, t in real.nonzero().tolist():
        heads = []
        for h in range(logits.shape[1]):
            row = [x for x, a in zip(logits[b, h, t].tolist(), allowed.expand_as(logits)[b, h, t], strict=True) if a]
            top = max(row)
            total = sum(math.exp(x - top) for x in row)
            heads.append(-sum(p * math.log(p) for x in row if (p := math.exp(x - top) / total)))
            ceilings.append(math.log(len(row)))
            largest = max(largest, top)
        entropies += heads
        lowest.append(min(heads))
    numbers = (sum(each) / len(each) for each in (entropies, lowest, ceilings))
    return dict(zip(COLUMNS, (*numbers, largest), strict=True))


# Closed forms --------------------------------------------------------------------------------------------------------


def test_uniform_attention_has_the_entropy_log_n_and_sharp_attention_none() -> None:
    model, inputs = Toy(1).double(), batch()
    attention = model.encoder.layers[0].self_attn
    for tensor in (attention.q.weight, attention.q.bias):
        nn.init.zeros_(tensor)
    sharp = model.decoder.layers[0].self_attn
    with torch.no_grad():
        sharp.q.weight.copy_(1e6 * torch.eye(WIDTH))
        sharp.k.weight.copy_(torch.eye(WIDTH))
    sink = recorded(model, lambda: model(**inputs), masks(inputs))
    lengths = inputs["source_mask"].sum(1).double()
    log_n = ((lengths * lengths.log()).sum() / lengths.sum()).item()
    uniform = columns(sink, "encoder.layers.0.self_attn")
    assert uniform == pytest.approx({"entropy": log_n, "entropy_min": log_n, "ceiling": log_n, "max_logit": 0.0})
    assert columns(sink, "decoder.layers.0.self_attn")["entropy"] == pytest.approx(0.0, abs=1e-12)


def test_scaled_logits_of_two_keys() -> None:
    """Two keys with logits 0 and log 3: weights 1/4 and 3/4."""
    q = torch.tensor([[[[1.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[0.0], [2 * math.log(3)], [99.0]]]], dtype=torch.float64)

    class Halved(nn.Module):
        """A class that calls itself attention."""

    class TwoAttention(Halved):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self) -> Tensor:
            allowed = torch.tensor([[True, True, False]])
            return F.scaled_dot_product_attention(self.weight * q, k, k, allowed, scale=0.5)[0, 0]

    model = nn.Sequential(TwoAttention())
    entropy = math.log(4) - 0.75 * math.log(3)
    assert columns(recorded(model, lambda: model[0]()), "0") == pytest.approx(
        {"entropy": entropy, "entropy_min": entropy, "ceiling": math.log(2), "max_logit": math.log(3)}
    )


# Against float64 by hand -------------------------------------------------------------------------------------------


def toy_logits(model: Toy, inputs: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Site -> logits, allowed keys, real queries; the toy has one head."""
    found = {}

    def hook(name: str, module: Attention, args: tuple[Tensor, ...]) -> None:
        x, y, mask = args
        logits = torch.einsum("btd,bld->btl", module.q(x), module.k(y)) / math.sqrt(WIDTH)
        real = inputs["source_mask" if name.startswith("encoder") else "target_mask"]
        found[name] = logits[:, None], mask[:, None, None, :], real

    handles = [
        site.module.register_forward_pre_hook(lambda m, args, name=site.name: hook(name, m, args))
        for site in find_sites(model).attentions
    ]
    with torch.no_grad():
        model.eval()(**inputs)
    model.train()
    for handle in handles:
        handle.remove()
    return found


def pooled(many: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, float]:
    parts, counts = [of(*each) for each in many], [int(real.sum()) for *_, real in many]
    means = {c: sum(p[c] * n for p, n in zip(parts, counts, strict=True)) / sum(counts) for c in COLUMNS[:3]}
    return means | {"max_logit": max(part["max_logit"] for part in parts)}


@pytest.mark.parametrize("calls", [1, 2])
def test_softmax_of_a_foreign_model_with_padding_and_several_batches(calls: int) -> None:
    model, several = Toy().double(), [batch(seed, 3 + seed) for seed in range(calls)]
    state: dict[str, Any] = {}

    def reference() -> None:
        for state["now"] in several:
            model(**state["now"])

    sink = recorded(model, reference, lambda: masks(state.get("now", several[0])))
    by_batch = [toy_logits(model, inputs) for inputs in several]
    assert len(by_batch[0]) == 6
    for site in by_batch[0]:
        assert columns(sink, site) == pytest.approx(pooled([each[site] for each in by_batch]), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_reference_model(dtype: torch.dtype) -> None:
    model = build_model(
        arch="postln", encoder_layers=2, decoder_layers=2, d_model=WIDTH, d_ffn=16, heads=HEADS,
        source_vocab=11, target_vocab=11, seed=3,
    )  # fmt: skip
    model = model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    draw = torch.Generator().manual_seed(0)
    sizes = {"source": (6, [6, 4, 2]), "target": (5, [3, 5, 4])}
    inputs = {side: torch.randint(0, 11, (3, length), generator=draw) for side, (length, _) in sizes.items()}
    real = {side: torch.arange(length) < torch.tensor(ends)[:, None] for side, (length, ends) in sizes.items()}
    seen: dict[nn.Module, Tensor] = {}
    handles = [m.register_forward_hook(lambda m, args, y: seen.__setitem__(m, y)) for m in model.modules()]
    everything = inputs | {f"{side}_mask": mask for side, mask in real.items()}
    with torch.no_grad():
        plain = model(**everything)
    for handle in handles:
        handle.remove()
    outputs: list[Tensor] = []
    stacks = {"encoder": real["source"], "decoder": real["target"]}
    sink = recorded(model, lambda: outputs.append(model(**everything)), stacks)
    assert torch.equal(outputs[0], plain)
    sites = find_sites(model).attentions
    assert len(sites) == 6
    for site in sites:
        if site.sublayer == "cross_attn":
            q, k = seen[site.module.get_submodule("q")], seen[site.module.get_submodule("kv")].chunk(2, dim=-1)[0]
        else:
            q, k, _ = seen[site.module.get_submodule("qkv")].chunk(3, dim=-1)
        q, k = (each.double().unflatten(-1, (HEADS, -1)) for each in (q, k))
        logits = torch.einsum("bthd,blhd->bhtl", q, k) / math.sqrt(WIDTH / HEADS)
        allowed = real["source"][:, None, None, :]
        if site.stack == "decoder" and site.sublayer == "self_attn":
            allowed = torch.ones(5, 5, dtype=torch.bool).tril()
        expected = of(logits, allowed, stacks[site.stack])
        assert columns(sink, site.name) == pytest.approx(expected, rel=1e-9 if dtype is torch.float64 else 1e-5)


# PyTorch's own modules -----------------------------------------------------------------------------------------------


def mha_logits(module: nn.MultiheadAttention, query: Tensor, key: Tensor) -> Tensor:
    """(B, T, D) and (B, L, D) -> (B, H, T, L)."""
    (wq, wk, _), (bq, bk, _) = (
        each.detach().double().chunk(3) for each in (module.in_proj_weight, module.in_proj_bias)
    )
    q, k = ((x.double() @ w.T + b).unflatten(-1, (HEADS, -1)) for x, w, b in ((query, wq, bq), (key, wk, bk)))
    return torch.einsum("bthd,blhd->bhtl", q, k) / math.sqrt(WIDTH / HEADS)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("lengths", [(5, 7), (3, 3)], ids=["5 queries, 7 keys", "as many as sentences"])
def test_multihead_attention(need_weights: bool, batch_first: bool, lengths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, dtype=torch.float64)
    x, y = (torch.randn(3, n, WIDTH, dtype=torch.float64) for n in lengths)
    padding = torch.arange(lengths[1]) >= torch.tensor([lengths[1], 2, 3])[:, None]
    real = torch.arange(lengths[0]) < torch.tensor([lengths[0], 1, 2])[:, None]
    turned = (lambda z: z) if batch_first else (lambda z: z.transpose(0, 1))
    model, outputs = nn.Sequential(module), []

    def reference() -> None:
        outputs.append(module(turned(x), turned(y), turned(y), key_padding_mask=padding, need_weights=need_weights)[0])

    sink = recorded(model, reference, turned(real))
    with torch.no_grad():
        module.eval()
        reference()
    assert torch.equal(*outputs)
    expected = of(mha_logits(module, x, y), ~padding[:, None, None], real)
    assert columns(sink, "0") == pytest.approx(expected, rel=1e-9)


def test_an_encoder_that_has_a_fused_path() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, real = torch.randn(3, 5, WIDTH, dtype=torch.float64), torch.arange(5) < torch.tensor([[5], [3], [2]])
    entering: list[Tensor] = []
    handles = [m.register_forward_pre_hook(lambda m, args: entering.append(args[0])) for m in model.layers]
    with torch.no_grad():
        slow = model.eval()(x, src_key_padding_mask=~real)
    for handle in handles:
        handle.remove()
    outputs: list[Tensor] = []
    sink = recorded(model, lambda: outputs.append(model(x, src_key_padding_mask=~real)), real)
    assert torch.equal(outputs[0], slow)  # hooks of any kind keep PyTorch from its fused layer
    for number, hidden in enumerate(entering):
        logits = mha_logits(model.layers[number].self_attn, hidden, hidden)
        expected = of(logits, real[:, None, None], real)
        assert columns(sink, f"layers.{number}.self_attn") == pytest.approx(expected, rel=1e-9)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_torch_transformer_with_sentences_in_columns() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 16, dtype=torch.float64)
    source, target = torch.randn(6, 3, WIDTH, dtype=torch.float64), torch.randn(4, 3, WIDTH, dtype=torch.float64)
    causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    seen: dict[str, Tensor] = {}
    attention = model.decoder.layers[0].self_attn
    handle = attention.register_forward_pre_hook(lambda m, args: seen.update(x=args[0]))
    with torch.no_grad():
        model.eval()(source, target, tgt_mask=causal)
    handle.remove()
    real = torch.arange(4)[:, None] < torch.tensor([4, 2, 1])  # (T, B)
    sink = recorded(model, lambda: model(source, target, tgt_mask=causal), {"decoder": real})
    x = seen["x"].transpose(0, 1)
    expected = of(mha_logits(attention, x, x), torch.ones(4, 4, dtype=torch.bool).tril(), real.T)
    assert columns(sink, "decoder.layers.0.self_attn") == pytest.approx(expected, rel=1e-9)
    assert columns(sink, "decoder.layers.0.multihead_attn")["ceiling"] == pytest.approx(math.log(6))


# What counts, and what does not --------------------------------------------------------------------------------------


class OneAttention(nn.Module):
    """Attention whose weights somebody else's function makes of logits."""

    def __init__(self, weigh: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.k, self.weigh = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), weigh

    def forward(self, x: Tensor) -> Tensor:
        return self.weigh(x @ self.k(x).transpose(1, 2)) @ x


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


SEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "F.softmax": lambda s: F.softmax(s, dim=-1),
    "F.softmax of a keyword": lambda s: F.softmax(input=s, dim=2),
    "torch.softmax": lambda s: torch.softmax(s, -1),
    "torch.special.softmax": lambda s: torch.special.softmax(s, dim=-1),
    "Tensor.softmax": lambda s: s.softmax(dim=-1),
    "nn.Softmax": nn.Softmax(dim=-1),
}
UNSEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "by hand": lambda s: s.exp() / s.exp().sum(-1, keepdim=True),
    "over queries": lambda s: s.softmax(dim=1),
    "of other tokens": lambda s: torch.ones(5, 2, dtype=torch.float64).softmax(-1).sum() + s,
}


@pytest.mark.parametrize("how", SEEN)
def test_each_way_to_take_a_softmax(how: str, x: Tensor) -> None:
    model = nn.Sequential(OneAttention(SEEN[how]))
    logits = (x @ model[0].k(x).transpose(1, 2)).detach()[:, None]
    expected = of(logits, torch.ones(3, 3, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool))
    assert columns(recorded(model, lambda: model(x)), "0") == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("how", UNSEEN)
def test_what_is_not_seen_leaves_the_row_absent(how: str, x: Tensor) -> None:
    model = nn.Sequential(OneAttention(UNSEEN[how]))
    sink = recorded(model, lambda: model(x).softmax(-1))  # one outside attention does not count either
    assert sink.absent(0, "attention") == {"0"}


@pytest.mark.parametrize("mask", [-torch.inf, torch.finfo(torch.float64).min, -1e30, -1e4])
def test_masks_of_any_size(mask: float, x: Tensor) -> None:
    def weigh(scores: Tensor) -> Tensor:
        return (scores + torch.full((3, 3), mask, dtype=torch.float64).triu(1)).softmax(-1)

    model = nn.Sequential(OneAttention(weigh))
    assert columns(recorded(model, lambda: model(x)), "0")["ceiling"] == pytest.approx(math.log(6) / 3)


def test_a_query_without_any_key_has_no_entropy_and_no_logit(x: Tensor) -> None:
    allowed = torch.tensor([[True] * 3, [False] * 3, [True] * 3])
    model = nn.Sequential(OneAttention(lambda s: s.masked_fill(~allowed, -torch.inf).softmax(-1)))
    numbers = columns(recorded(model, lambda: model(x)), "0")
    logits = (x @ model[0].k(x).transpose(1, 2)).detach()[:, None]
    real = allowed[:, 0].expand(2, 3)
    expected = of(logits, allowed, real)
    assert numbers["entropy"] == pytest.approx(2 / 3 * expected["entropy"])
    assert numbers["ceiling"] == pytest.approx(2 / 3 * math.log(3))
    assert numbers["max_logit"] == pytest.approx(expected["max_logit"])


def test_a_nan_is_no_mask(x: Tensor) -> None:
    model = nn.Sequential(OneAttention(lambda s: (s * torch.nan).softmax(-1)))
    numbers = columns(recorded(model, lambda: model(x)), "0")
    assert math.isnan(numbers["entropy"])
    assert math.isnan(numbers["max_logit"])
    assert numbers["ceiling"] == pytest.approx(math.log(3))


def test_under_autocast_the_numbers_are_those_of_the_rounded_q_and_k() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    model, x = nn.Sequential(module), torch.randn(2, 5, WIDTH)

    def reference() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            module(x, x, x, need_weights=False)

    numbers = columns(recorded(model, reference), "0")
    real = torch.ones(2, 5, dtype=torch.bool)
    expected = of(mha_logits(module, x, x), torch.ones(5, 5, dtype=torch.bool), real)
    assert numbers == pytest.approx(expected, rel=2e-2)
    assert numbers["max_logit"] != pytest.approx(expected["max_logit"], rel=1e-6)
    assert numbers["max_logit"] != torch.tensor(numbers["max_logit"]).bfloat16().item()  # not rounded again


def test_hooks_and_the_mode_are_gone_after_the_pass_even_if_it_fails() -> None:
    model, inputs = Toy(1), batch()

    def reference() -> None:
        model(**inputs)
        assert torch.overrides._get_current_function_mode() is not None
        raise KeyError("mine")

    before = {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()}
    watcher = Watcher(model, ListSink(), probes="attention", reference=reference)
    with pytest.raises(KeyError, match="mine"):
        watcher.step()
    watcher.close()
    assert {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()} == before
    assert torch.overrides._get_current_function_mode() is None


def test_a_model_without_attention_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="probe 'attention' finds no attention modules in this model; nearest are "):
        Watcher(nn.Sequential(nn.Linear(2, 2)), ListSink(), probes="attention", reference=lambda: None)


def test_the_innermost_attention_with_parameters_is_the_site() -> None:
    class CoreAttention(nn.Module):
        pass

    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.core = nn.Linear(2, 2), CoreAttention()

    class BlockAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = SelfAttention(), nn.Linear(2, 2)

    model = nn.Sequential(BlockAttention(), nn.Linear(2, 2))
    assert [site.name for site in find_sites(model).attentions] == ["0.inner"]


def test_heads_that_share_their_keys() -> None:
    class GroupedAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = (nn.Linear(WIDTH, heads * 2, dtype=torch.float64) for heads in (4, 2))

        def forward(self, x: Tensor) -> Tensor:
            q, k = (each(x).unflatten(-1, (-1, 2)).transpose(1, 2) for each in (self.q, self.k))
            return F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    model, x = nn.Sequential(GroupedAttention()), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    q, k = (each(x).detach().unflatten(-1, (-1, 2)) for each in (model[0].q, model[0].k))
    k = torch.stack([k[:, :, head // 2] for head in range(4)], dim=2)
    logits = torch.einsum("bthd,blhd->bhtl", q, k) / math.sqrt(2)
    expected = of(logits, torch.ones(3, 3, dtype=torch.bool).tril(), torch.ones(2, 3, dtype=torch.bool))
    assert columns(recorded(model, lambda: model(x)), "0") == pytest.approx(expected, rel=1e-9)


def test_a_compiled_model_is_run_uncompiled() -> None:
    model, inputs = Toy(1), batch()
    expected = recorded(model, lambda: model(**inputs), masks(inputs)).column(0, "attention", "entropy")
    compiled = torch.compile(Toy(1), backend="eager")
    sink = recorded(compiled, lambda: compiled(**inputs), masks(inputs))
    assert sink.column(0, "attention", "entropy") == expected


def test_the_listing_of_places_shows_who_attends_and_where_the_logits_are() -> None:
    rows = [line.replace(",", "").split() for line in str(find_sites(Toy())).splitlines()]
    cross = ["attentions", "decoder", "1-2", "2", "decoder.layers.*.cross_attn", "Attention"]
    assert [*cross, "attention", "attention_heads", "attention_sink"] in rows
    assert ["logits", "decoder", "-", "1", "head", "Linear", "logits"] in rows
    assert any(row[:2] == ["layers", "encoder"] and {"rank", "outliers"} <= {*row} for row in rows)
