"""Attention of Hugging Face models, against the weights that their eager code returns, and logits worked out apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from probe_toys import ListSink
from torch import Tensor, nn

from stabilitylab.probes import Watcher, find_sites
from stabilitylab.probes.places.sites import Site

hf = pytest.importorskip("transformers")

HEADS, SIZE, VOCAB = 4, 4, 30  # of a head
Inputs = dict[str, Tensor]

LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HEADS * SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
}
BERT: dict[str, Any] = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
CASES: dict[str, Callable[[], tuple[type, Any]]] = {
    "bert": lambda: (hf.BertForMaskedLM, hf.BertConfig(**BERT)),
    "gpt2": lambda: (
        hf.GPT2LMHeadModel,
        hf.GPT2Config(vocab_size=VOCAB, n_embd=HEADS * SIZE, n_layer=2, n_head=HEADS, n_positions=20, **NO_TOKENS),
    ),
    "llama": lambda: (hf.LlamaForCausalLM, hf.LlamaConfig(**LLAMA)),
    "mixtral": lambda: (hf.MixtralForCausalLM, hf.MixtralConfig(**LLAMA, num_local_experts=4)),
    "t5": lambda: (
        hf.T5ForConditionalGeneration,
        hf.T5Config(vocab_size=VOCAB, d_model=HEADS * SIZE, d_kv=SIZE, num_layers=2, num_heads=HEADS, d_ff=24),
    ),
    "marian": lambda: (
        hf.MarianMTModel,
        hf.MarianConfig(
            vocab_size=VOCAB,
            d_model=HEADS * SIZE,
            max_position_embeddings=20,
            **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 24))},
            **{f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")},
            **{"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": 1},
        ),
    ),
    "vit": lambda: (hf.ViTModel, hf.ViTConfig(**BERT_FOR_IMAGES)),
}
BERT_FOR_IMAGES = {key: BERT[key] for key in BERT if "size" in key or "num" in key} | {"image_size": 8, "patch_size": 4}
ROTARY, ENCODER_DECODER = ("llama", "mixtral"), ("t5", "marian")


def build(case: str, implementation: str) -> nn.Module:
    kind, config = CASES[case]()
    config._attn_implementation = implementation
    config._experts_implementation = "eager"  # the other takes no float64
    torch.manual_seed(0)
    model = kind(config).double().eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():  # away from attention that is nearly uniform
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return model


def batch_of(case: str) -> tuple[Inputs, Mapping[str, Tensor] | None]:
    """What the model takes, and its masks by stack."""
    draw = torch.Generator().manual_seed(2)
    if case == "vit":
        return {"pixel_values": torch.randn(3, 3, 8, 8, generator=draw, dtype=torch.float64)}, None

    def side(length: int) -> tuple[Tensor, Tensor]:
        ends = torch.tensor([[length], [length - 2], [2]])
        return torch.randint(2, VOCAB, (3, length), generator=draw), (torch.arange(length) < ends).long()

    tokens, real = side(7)
    inputs = {"input_ids": tokens, "attention_mask": real}
    stacks = [stack.name for stack in find_sites(build(case, "sdpa")).stacks]
    if case not in ENCODER_DECODER:
        return inputs, {stacks[0]: real.bool()}
    target, target_real = side(5)
    more = {"decoder_input_ids": target, "decoder_attention_mask": target_real}
    return inputs | more, dict(zip(stacks, (real.bool(), target_real.bool()), strict=True))


def is_cross(site: Site) -> bool:
    return "EncDec" in site.name or "encoder_attn" in site.name


def projected(case: str, module: nn.Module, seen: Mapping[nn.Module, Tensor]) -> tuple[Tensor, Tensor]:
    """q and k of an attention module, (B, H, T, d)."""
    if case == "gpt2":
        q, k, _ = seen[module.get_submodule("c_attn")].chunk(3, dim=-1)
    else:
        q, k = (
            next(seen[child] for name, child in module.named_children() if name in names)
            for names in (("q", "query", "q_proj"), ("k", "key", "k_proj"))
        )
    q, k = (each.unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in (q, k))
    return q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-right, left), dim=-1) * sin[:, None]


def expected(case: str) -> dict[str, dict[str, float]]:
    """Column -> site -> number, from the eager model's own weights and from projections that hooks saw.

    Eager code takes its softmax in float32, whatever the model's type.
    """
    model, (inputs, masks) = build(case, "eager"), batch_of(case)
    seen: dict[nn.Module, Tensor] = {}
    handles = [m.register_forward_hook(lambda m, args, y: seen.__setitem__(m, y)) for m in model.modules()]
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    for handle in handles:
        handle.remove()
    kinds = ("encoder_attentions", "decoder_attentions", "cross_attentions")
    own = iter(out.attentions) if case not in ENCODER_DECODER else iter((*out[kinds[0]], *out[kinds[1]]))
    across = iter(out[kinds[2]] if case in ENCODER_DECODER else ())
    sites, table = find_sites(model), {c: {} for c in ("entropy", "entropy_min", "ceiling", "max_logit")}
    for site in sites.attentions:
        weights = next(across if is_cross(site) else own)  # (B, H, T, L)
        real = torch.ones(weights.shape[0], weights.shape[2], dtype=torch.bool) if masks is None else masks[site.stack]
        q, k = projected(case, site.module, seen)
        if case in ROTARY:
            rotary = model.get_submodule("model.rotary_emb")
            q, k = (rotated(each, *seen[rotary]) for each in (q, k))
        logits = q @ k.transpose(2, 3) * (1.0 if case == "t5" else SIZE**-0.5)
        if case == "t5" and not is_cross(site):
            first = model.get_submodule(f"{site.stack}.block.0.layer.0.SelfAttention")
            logits = logits + first.compute_bias(*weights.shape[2:]).detach()
        flat = weights.transpose(1, 2)[real]  # (tokens, H, L)
        entropies = torch.tensor(
            [[-sum(a * math.log(a) for a in row if a) for row in head] for head in flat.tolist()],
            dtype=torch.float64,
        )
        table["entropy"][site.name] = entropies.mean().item()
        table["entropy_min"][site.name] = entropies.amin(1).mean().item()
        table["ceiling"][site.name] = (flat > 0).sum(-1).double().log().mean().item()
        table["max_logit"][site.name] = logits.transpose(1, 2)[real][flat > 0].max().item()
    return table


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_attention_of_each_family(case: str, implementation: str) -> None:
    model, (inputs, masks) = build(case, implementation), batch_of(case)
    with torch.no_grad():
        plain = model(**inputs)[0]
    sink, watched = ListSink(), []
    watcher = Watcher(
        model, sink, probes="attention", mask=masks, reference=lambda: watched.append(model(**inputs)[0]) or {}
    )
    watcher.step()
    watcher.flush()
    watcher.close()
    assert len(watched) == 1
    assert torch.equal(watched[0], plain)
    assert len(sink.tables["attention"].rows) == (6 if case in ENCODER_DECODER else 2)
    for column, numbers in expected(case).items():
        assert sink.column(0, "attention", column) == pytest.approx(numbers, rel=1e-9 if column == "ceiling" else 1e-5)


@pytest.mark.parametrize("case", CASES)
def test_the_other_probes_of_the_second_wave_find_their_places(case: str) -> None:
    model, (inputs, masks) = build(case, "sdpa"), batch_of(case)
    probes = {"ln_gain", "residual_norm", "outliers", "rank"} | ({"logits"} if case != "vit" else set())
    layers, sink = 4 if case in ENCODER_DECODER else 2, ListSink()
    model.train()
    with Watcher(model, sink, probes=[*probes], mask=masks, reference=lambda: model(**inputs)) as watcher:
        model(**inputs)[0].sum().backward()
        watcher.step()
    for name in probes:
        assert not sink.absent(0, name)
        for column in set(sink.tables[name].columns) - {"max_over_median"}:  # which activations have none of
            assert all(math.isfinite(number) for number in sink.column(0, name, column).values())
    assert len(sink.tables["rank"].rows) == layers
    assert len(sink.tables["logits"].rows) == 1 if "logits" in probes else "logits" not in sink.tables
    sites = find_sites(model)
    assert [row.site for row in sink.tables["ln_gain"].rows] == [site.name for site in sites.norms]
    assert all(number > 0 for number in sink.column(0, "residual_norm", "value").values())
