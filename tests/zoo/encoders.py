"""Encoders of transformers, of text, images and sound."""

from __future__ import annotations

from typing import Any

import torch
from decoders import made
from entries import BATCH, SIZES, TEXT, WIDTH, Entry, images, text

LENGTH = {"max_position_embeddings": 10}
PLAIN = {key: value for key, value in SIZES.items() if key != "intermediate_size"}


def bert(name: str, home: str, norms: str, **options: Any) -> Entry:
    """Post-norm, the feed-forward block in two modules. ``norms``: those outside the layers."""
    return Entry(
        lambda: made(f"{name}ForMaskedLM", f"{name}Config", **options),
        f"{home}.encoder.layer.*",
        f"{home}.encoder.layer.*.attention.output.LayerNorm {home}.encoder.layer.*.output.LayerNorm {norms}",
        f"{home}.encoder.layer.*.intermediate.intermediate_act_fn",
        f"{home}.encoder",
        f"{home}.encoder.layer.*.attention.self",
    )


def sound() -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(1)).double()}


def both() -> dict[str, Any]:
    return {**text(), **images()}


def image(name: str, home: str, norms: str, activation: str, attention: str, **options: Any) -> Entry:
    """``home``: of the layers; norms outside them with a slash in front."""
    names = [n[1:] if n.startswith("/") else f"{home}.*.{n}" for n in norms.split()]
    return Entry(
        lambda: made(f"{name}ForImageClassification", f"{name}Config", image_size=8, patch_size=4, **options),
        f"{home}.*",
        " ".join(names),
        f"<{home}.*.{activation[1:]}" if activation.startswith("<") else f"{home}.*.{activation}",
        home.rpartition(".")[0],
        f"{home}.*.{attention}",
        images,
    )


ENCODERS: dict[str, Entry] = {
    "roberta: post-norm": bert(
        "Roberta", "roberta", "roberta.embeddings.LayerNorm lm_head.layer_norm", **SIZES, **LENGTH
    ),
    "deberta: attention without positions added": bert(
        *("DebertaV2", "deberta", "deberta.embeddings.LayerNorm cls.predictions.transform.LayerNorm"),
        **{**SIZES, **LENGTH, "relative_attention": True, "pos_att_type": ["p2c"]},
    ),
    "electra: a narrow embedding": bert(
        *("Electra", "electra", "electra.embeddings.LayerNorm generator_predictions.LayerNorm"),
        **{**SIZES, **LENGTH, "embedding_size": 8},
    ),
    "roberta-prelayernorm: norms inside the parts": Entry(
        lambda: made("RobertaPreLayerNormForMaskedLM", "RobertaPreLayerNormConfig", **SIZES, **LENGTH),
        "roberta_prelayernorm.encoder.layer.*",
        "roberta_prelayernorm.embeddings.LayerNorm roberta_prelayernorm.encoder.layer.*.attention.LayerNorm "
        "roberta_prelayernorm.encoder.layer.*.intermediate.LayerNorm roberta_prelayernorm.LayerNorm lm_head.layer_norm",
        "roberta_prelayernorm.encoder.layer.*.intermediate.intermediate_act_fn",
        "roberta_prelayernorm.encoder",
        "roberta_prelayernorm.encoder.layer.*.attention.self",
    ),
    "distilbert: a Transformer of layer": Entry(
        lambda: made(
            *("DistilBertForMaskedLM", "DistilBertConfig"),
            **{"dim": WIDTH, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 8},
        ),
        "distilbert.transformer.layer.*",
        "distilbert.embeddings.LayerNorm distilbert.transformer.layer.*.sa_layer_norm "
        "distilbert.transformer.layer.*.output_layer_norm vocab_layer_norm",
        "distilbert.transformer.layer.*.ffn.activation",
        "distilbert.transformer",
        "distilbert.transformer.layer.*.attention",
    ),
    "albert: one layer, called twice": Entry(
        lambda: made("AlbertForMaskedLM", "AlbertConfig", **SIZES, **LENGTH, embedding_size=8),
        "albert.encoder.albert_layer_groups.0.albert_layers.0",
        "albert.embeddings.LayerNorm albert.encoder.albert_layer_groups.0.albert_layers.0.full_layer_layer_norm "
        "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.LayerNorm predictions.LayerNorm",
        "albert.encoder.albert_layer_groups.0.albert_layers.0.activation",
        "albert.encoder.albert_layer_groups.0",
        "albert.encoder.albert_layer_groups.0.albert_layers.0.attention",
    ),
    "modernbert: the first norm is none": Entry(
        lambda: made(
            *("ModernBertForMaskedLM", "ModernBertConfig"),
            **{**SIZES, **LENGTH, "global_attn_every_n_layers": 2, "local_attention": 4},
            **{"cls_token_id": 1, "sep_token_id": 2},
        ),
        "model.layers.*",
        "model.embeddings.norm model.layers.1.attn_norm model.layers.*.mlp_norm model.final_norm head.norm",
        "<model.layers.*.mlp.Wo",
        "model",
        "model.layers.*.attn",
    ),
    "fnet: a Fourier transform for attention": Entry(
        lambda: made(
            *("FNetForMaskedLM", "FNetConfig"),
            **{"hidden_size": WIDTH, "num_hidden_layers": 2, "intermediate_size": 24, "max_position_embeddings": 8},
        ),
        "fnet.encoder.layer.*",
        "fnet.embeddings.LayerNorm fnet.encoder.layer.*.fourier.output.LayerNorm fnet.encoder.layer.*.output.LayerNorm "
        "cls.predictions.transform.LayerNorm",
        "fnet.encoder.layer.*.intermediate.intermediate_act_fn",
        "fnet.encoder",
    ),
    "beit: scaled branches": image(
        "Beit",
        "beit.layers",
        "layernorm_before layernorm_after /beit.pooler.layernorm",
        "mlp.activation_fn",
        "attention",
        **SIZES,
    ),
    "dinov2: gated, scaled branches": image(
        *("Dinov2", "dinov2.encoder.layer", "norm1 norm2 /dinov2.layernorm", "<mlp.down_proj", "attention"),
        **{**PLAIN, "mlp_ratio": 2, "use_swiglu_ffn": True},
    ),
    "swin: stages of windows": Entry(
        lambda: made(
            *("SwinForImageClassification", "SwinConfig"),
            **{
                "image_size": 8,
                "patch_size": 2,
                "embed_dim": 8,
                "depths": [2, 2],
                "num_heads": [2, 2],
                "window_size": 2,
            },
        ),
        "swin.encoder.layers.{0,1}.blocks.*",
        "swin.embeddings.norm swin.encoder.layers.{0,1}.blocks.*.layernorm_before "
        "swin.encoder.layers.{0,1}.blocks.*.layernorm_after swin.encoder.layers.0.downsample.norm swin.layernorm",
        "swin.encoder.layers.{0,1}.blocks.*.mlp.activation_fn",
        "swin.encoder.layers.{0,1}",
        "swin.encoder.layers.{0,1}.blocks.*.attention",
        images,
    ),
    "convnext: convolutions with norms over channels": Entry(
        lambda: made(
            *("ConvNextForImageClassification", "ConvNextConfig"),
            **{"hidden_sizes": [8, 12], "depths": [2, 2], "num_stages": 2, "patch_size": 2},
        ),
        "convnext.encoder.stages.{0,1}.layers.*",
        "convnext.embeddings.layernorm convnext.encoder.stages.{0,1}.layers.*.layernorm "
        "convnext.encoder.stages.1.downsampling_layer.0 convnext.layernorm",
        "convnext.encoder.stages.{0,1}.layers.*.act",
        "convnext.encoder.stages.{0,1}",
        "",
        images,
    ),
    "clip: two towers": Entry(
        lambda: made(
            *("CLIPModel", "CLIPConfig"),
            text_config={**SIZES, **TEXT, **LENGTH},
            vision_config={**SIZES, "image_size": 8, "patch_size": 4},
            projection_dim=8,
        ),
        "{text,vision}_model.encoder.layers.*",
        "{text,vision}_model.encoder.layers.*.layer_norm{1,2} text_model.final_layer_norm vision_model.pre_layrnorm "
        "vision_model.post_layernorm",
        "{text,vision}_model.encoder.layers.*.mlp.activation_fn",
        "{text,vision}_model.encoder",
        "{text,vision}_model.encoder.layers.*.self_attn",
        both,
    ),
    "wav2vec2: sound, convolutions in front": Entry(
        lambda: made(
            *("Wav2Vec2Model", "Wav2Vec2Config"),
            **{**SIZES, "conv_dim": [8, 8], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_feat_extract_layers": 2},
            **{
                "num_conv_pos_embeddings": 4,
                "num_conv_pos_embedding_groups": 2,
                "mask_time_prob": 0.0,
                "layerdrop": 0.0,
            },
        ),
        "encoder.layers.*",
        "feature_projection.layer_norm encoder.layer_norm encoder.layers.*.layer_norm "
        "encoder.layers.*.final_layer_norm",
        "encoder.layers.*.feed_forward.intermediate_act_fn",
        "encoder",
        "encoder.layers.*.attention",
        sound,
    ),
}
