"""Mixtures of experts: dense and routed layers, shared experts, and in each the product that a down projection sees."""

from __future__ import annotations

from dataclasses import replace

from decoders import llama, made
from entries import EXPERT, KV, SIZES, WIDTH, Entry, pairs

EAGER = {"experts_implementation": "eager"}
QWEN = {
    "moe_intermediate_size": EXPERT,
    "shared_expert_intermediate_size": 20,
    "num_experts": 3,
    "num_experts_per_tok": 2,
}
DEEPSEEK = {
    "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 3, "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "moe_intermediate_size": EXPERT, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
}  # fmt: skip
JAMBA = {
    "num_hidden_layers": 4, "num_experts": 3, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
    "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4,
    "mamba_dt_rank": 2, "intermediate_size": EXPERT,
}  # fmt: skip
ROUTED = {"intermediate_size": EXPERT, "num_local_experts": 3, "num_experts_per_tok": 2}
LAYER = "model.layers.*.input_layernorm model.layers.*.post_attention_layernorm model.norm"

EXPERTS: dict[str, Entry] = {
    "mixtral: all routed": replace(llama("Mixtral", **ROUTED, **EAGER), activations="=model.layers.*.mlp.experts"),
    "mixtral: grouped multiplications": replace(
        llama("Mixtral", **ROUTED, experts_implementation="batched_mm"), activations="=model.layers.*.mlp.experts"
    ),
    "gpt-oss: no activation module": replace(
        llama("GptOss", head_dim=8, **ROUTED, **EAGER), activations="=model.layers.*.mlp.experts"
    ),
    "qwen2-moe: routed beside a shared expert": replace(
        llama("Qwen2Moe", **QWEN, **EAGER),
        activations="=model.layers.*.mlp.experts <model.layers.*.mlp.shared_expert.down_proj",
    ),
    "deepseek: a dense layer, then experts": Entry(
        lambda: made("DeepseekV2ForCausalLM", **{**SIZES, **DEEPSEEK, **EAGER}),
        "model.layers.*",
        f"{LAYER} model.layers.*.self_attn.q_a_layernorm model.layers.*.self_attn.kv_a_layernorm",
        "<model.layers.0.mlp.down_proj =model.layers.1.mlp.experts <model.layers.1.mlp.shared_experts.down_proj",
        "model",
        "model.layers.*.self_attn",
    ),
    "jamba: state-space and attention, dense and routed": Entry(
        lambda: made("JambaForCausalLM", **{**SIZES, **KV, **JAMBA, **EAGER}),
        "model.layers.*",
        "model.layers.*.input_layernorm model.layers.*.pre_ff_layernorm model.final_layernorm "
        "model.layers.{0,2}.mamba.{dt,b,c}_layernorm",
        "<model.layers.{0,2}.feed_forward.down_proj =model.layers.{1,3}.feed_forward.experts",
        "model",
        "model.layers.{1,3}.self_attn",
        depth=4,
    ),
    "switch: experts of a list, of two stacks": Entry(
        lambda: made(
            *("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig"),
            **{"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2},
            **{"num_experts": 3, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
            decoder_start_token_id=0,
        ),
        "{encoder,decoder}.block.*",
        "encoder.block.*.layer.{0,1}.layer_norm decoder.block.*.layer.{0,1,2}.layer_norm "
        "{encoder,decoder}.final_layer_norm",
        "encoder.block.0.layer.1.mlp.act encoder.block.1.layer.1.mlp.experts.expert_{0,1,2}.act "
        "decoder.block.0.layer.2.mlp.act decoder.block.1.layer.2.mlp.experts.expert_{0,1,2}.act",
        "encoder decoder",
        "{encoder,decoder}.block.*.layer.0.SelfAttention decoder.block.*.layer.1.EncDecAttention",
        pairs,
    ),
}
