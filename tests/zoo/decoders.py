"""Decoders of transformers, tiny and with random weights: each lays its layers out in another way."""

from __future__ import annotations

from typing import Any

import pytest
from entries import KV, SIZES, TEXT, WIDTH, Entry

transformers = pytest.importorskip("transformers", reason="these are models of transformers")
transformers.logging.set_verbosity_error()

NEO = {"attention_types": [[["global", "local"], 1]], "intermediate_size": 24, "max_position_embeddings": 8}
GRIFFIN = {
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "lru_width": WIDTH,
    "attention_window_size": 4,
    "head_dim": 8,
}


def made(name: str, config: str = "", **options: Any) -> Any:
    kind = getattr(transformers, config or f"{name.removesuffix('ForCausalLM')}Config")
    return getattr(transformers, name)(kind(**{**TEXT, **options}))


def llama(name: str, norms: str = "input post_attention", **options: Any) -> Entry:
    """What many share: gated blocks under ``mlp``, and norms of the layer by their names' beginnings."""
    inside = " ".join(f"model.layers.*.{each}_layernorm" for each in norms.split() if "." not in each)
    others = " ".join(f"model.layers.*.{each}" for each in norms.split() if "." in each)
    return Entry(
        lambda: made(f"{name}ForCausalLM", **{**SIZES, **KV, **options}),
        "model.layers.*",
        f"{inside.replace('input_layernorm', 'input_layernorm')} {others} model.norm",
        "<model.layers.*.mlp.down_proj",
        "model",
        "model.layers.*.self_attn",
    )


def gpt(name: str, home: str, norms: str, activation: str, attention: str, **options: Any) -> Entry:
    """``home``: the list of layers; ``norms``: in a layer, then outside with a slash in front."""
    names = [n[1:] if n.startswith("/") else f"{home}.*.{n}" for n in norms.split()]
    return Entry(
        lambda: made(f"{name}ForCausalLM", **options),
        f"{home}.*",
        " ".join(names),
        f"<{home}.*.{activation[1:]}" if activation.startswith("<") else f"{home}.*.{activation}",
        home.rpartition(".")[0],
        f"{home}.*.{attention}" if attention else "",
    )


LENGTH = {"n_positions": 8}
GPT = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2}
NEOX = dict(SIZES)
DECODERS: dict[str, Entry] = {
    "llama: pre-norm, gated": llama("Llama"),
    "qwen3: norms of queries and keys": llama(
        "Qwen3", "input post_attention self_attn.q_norm self_attn.k_norm", head_dim=8
    ),
    "gemma2: sandwich": llama("Gemma2", "input post_attention pre_feedforward post_feedforward", head_dim=8),
    "glm4: other sandwich": llama("Glm4", "input post_attention post_self_attn post_mlp", head_dim=8),
    "olmo2: norms behind": llama("Olmo2", "post_attention post_feedforward self_attn.q_norm self_attn.k_norm"),
    "cohere: parallel, one norm": llama("Cohere", "input"),
    "phi3: fused gate": llama("Phi3"),
    "neox: parallel, two norms": gpt(
        *("GPTNeoX", "gpt_neox.layers", "input_layernorm post_attention_layernorm /gpt_neox.final_layer_norm"),
        *("mlp.act", "attention"),
        **SIZES,
    ),
    "falcon: one norm, multi-query": gpt(
        *("Falcon", "transformer.h", "input_layernorm /transformer.ln_f", "mlp.act", "self_attention"),
        **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
    ),
    "bloom: norm of the embedding": gpt(
        "Bloom",
        "transformer.h",
        "input_layernorm post_attention_layernorm /transformer.ln_f /transformer.word_embeddings_layernorm",
        *("mlp.gelu_impl", "self_attention"),
        **{"hidden_size": WIDTH, "n_layer": 2, "n_head": 2},
    ),
    "mpt: blocks, ffn": gpt(
        *("Mpt", "transformer.blocks", "norm_1 norm_2 /transformer.norm_f", "ffn.act", "attn"),
        **{"d_model": WIDTH, "n_layers": 2, "n_heads": 2, "max_seq_len": 8},
    ),
    "opt: feed-forward in the layer": gpt(
        "OPT",
        "model.decoder.layers",
        "self_attn_layer_norm final_layer_norm /model.decoder.final_layer_norm",
        *("activation_fn", "self_attn"),
        **{"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24},
        **{"word_embed_proj_dim": WIDTH, "max_position_embeddings": 8},
    ),
    "gptj: parallel, rotary": gpt(
        *("GPTJ", "transformer.h", "ln_1 /transformer.ln_f", "mlp.act", "attn"), **GPT, **LENGTH, rotary_dim=4
    ),
    "gpt-neo: attention in attention": gpt(
        *("GPTNeo", "transformer.h", "ln_1 ln_2 /transformer.ln_f", "mlp.act", "attn.attention"),
        **{"hidden_size": WIDTH, "num_layers": 2, "num_heads": 2, **NEO},
    ),
    "codegen: fused qkv, parallel": gpt(
        *("CodeGen", "transformer.h", "ln_1 /transformer.ln_f", "mlp.act", "attn"),
        **{"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 4, **LENGTH},
    ),
    "bigcode: an activation by another name, fused qkv": gpt(
        *("GPTBigCode", "transformer.h", "ln_1 ln_2 /transformer.ln_f", "<mlp.c_proj", "attn"),
        **GPT,
        **LENGTH,
    ),
    "phi: biases, one norm": gpt(
        *("Phi", "model.layers", "input_layernorm /model.final_layernorm", "mlp.activation_fn", "self_attn"), **SIZES
    ),
    "mamba: no attention": gpt(
        *("Mamba", "backbone.layers", "norm /backbone.norm_f", "<mixer.out_proj", ""),
        **{"hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4},
    ),
    "rwkv: keys and values, no queries": Entry(
        lambda: made(
            "RwkvForCausalLM", hidden_size=WIDTH, num_hidden_layers=2, attention_hidden_size=WIDTH, intermediate_size=24
        ),
        "rwkv.blocks.*",
        "rwkv.blocks.0.pre_ln rwkv.blocks.*.ln1 rwkv.blocks.*.ln2 rwkv.ln_out",
        "<rwkv.blocks.*.feed_forward.value",
        "rwkv",
        "rwkv.blocks.*.attention",
    ),
    "griffin: recurrent layers, then attention": Entry(
        lambda: made("RecurrentGemmaForCausalLM", **{**SIZES, **KV, **GRIFFIN}),
        "model.layers.*",
        "model.layers.*.temporal_pre_norm model.layers.*.channel_pre_norm model.final_norm",
        "<model.layers.*.mlp_block.down_proj",
        "model",
        "model.layers.2.temporal_block",
        depth=3,
    ),
}
