"""Encoder-decoders of transformers, and cross-attention in every n-th layer of a decoder."""

from __future__ import annotations

from typing import Any

import torch
from decoders import made
from entries import BATCH, KV, SIZES, WIDTH, Entry, ids, pairs, text

BART = {
    "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": 1,
}  # fmt: skip
ATTENDING = "model.{encoder,decoder}.layers.*.self_attn model.decoder.layers.*.encoder_attn"
NORMS = (
    "model.{encoder,decoder}.layers.*.self_attn_layer_norm model.{encoder,decoder}.layers.*.final_layer_norm "
    "model.decoder.layers.*.encoder_attn_layer_norm"
)


def spectra() -> dict[str, Any]:
    spectrum = torch.randn(BATCH, 4, 16, generator=torch.Generator().manual_seed(1)).double()
    return {"input_features": spectrum, "decoder_input_ids": ids()}


def pictured() -> dict[str, Any]:
    states = torch.randn(BATCH, 3, WIDTH, generator=torch.Generator().manual_seed(2)).double()
    return {**text(), "cross_attention_states": states}


TRANSLATORS: dict[str, Entry] = {
    "bart: post-norm": Entry(
        lambda: made("BartForConditionalGeneration", "BartConfig", **BART, max_position_embeddings=8),
        "model.{encoder,decoder}.layers.*",
        f"{NORMS} model.{{encoder,decoder}}.layernorm_embedding",
        "model.{encoder,decoder}.layers.*.activation_fn",
        "model.encoder model.decoder",
        ATTENDING,
        pairs,
    ),
    "mt5: gated, parts in a list": Entry(
        lambda: made(
            *("MT5ForConditionalGeneration", "MT5Config"),
            **{"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
            feed_forward_proj="gated-gelu",
        ),
        "{encoder,decoder}.block.*",
        "encoder.block.*.layer.{0,1}.layer_norm decoder.block.*.layer.{0,1,2}.layer_norm "
        "{encoder,decoder}.final_layer_norm",
        "<encoder.block.*.layer.1.DenseReluDense.wo <decoder.block.*.layer.2.DenseReluDense.wo",
        "encoder decoder",
        "{encoder,decoder}.block.*.layer.0.SelfAttention decoder.block.*.layer.1.EncDecAttention",
        pairs,
    ),
    "whisper: sound to text": Entry(
        lambda: made(
            *("WhisperForConditionalGeneration", "WhisperConfig"),
            **{**BART, "max_source_positions": 8, "max_target_positions": 8, "num_mel_bins": 4},
        ),
        "model.{encoder,decoder}.layers.*",
        f"{NORMS} model.{{encoder,decoder}}.layer_norm",
        "model.{encoder,decoder}.layers.*.activation_fn",
        "model.encoder model.decoder",
        ATTENDING,
        spectra,
    ),
    "mllama: cross-attention in one layer of four": Entry(
        lambda: made(
            *("MllamaForCausalLM", "MllamaTextConfig"),
            **{**SIZES, **KV, "num_hidden_layers": 4, "cross_attention_layers": [1]},
        ),
        "model.layers.*",
        "model.layers.*.input_layernorm model.layers.*.post_attention_layernorm model.norm "
        "model.layers.1.cross_attn.{q,k}_norm",
        "<model.layers.*.mlp.down_proj",
        "model",
        "model.layers.{0,2,3}.self_attn model.layers.1.cross_attn",
        pictured,
        depth=4,
    ),
}
