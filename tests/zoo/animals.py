"""Models of other people with random weights: what they are fed, and, by hand, which modules are their places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="the zoo is made of transformers' models")
transformers.logging.set_verbosity_error()

VOCAB, WIDTH, BATCH, TOKENS, LAYERS = 29, 16, 3, 6, 2
TEXT = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 24}


@dataclass(frozen=True)
class Animal:
    """``norms`` and the like are full names of modules, ``*`` standing for the number of a layer."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    layers: tuple[str, ...]
    norms: tuple[str, ...]
    activations: tuple[str, ...]  # with "<" in front: the input of the module counts
    outputs: tuple[str, ...]
    inputs: tuple[str, ...] = ("attention_mask",)  # the masks among the batch, one for each of ``layers``
    loss: Callable[[nn.Module, Mapping[str, Any]], Tensor] = field(default=lambda model, batch: model(**batch).loss)

    def names(self, patterns: tuple[str, ...]) -> list[str]:
        return [p.replace("*", str(i)) for p in patterns for i in range(LAYERS if "*" in p else 1)]

    def masks(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Layer pattern -> True on real tokens."""
        return {place: batch[key].bool() for place, key in zip(self.layers, self.inputs, strict=True) if key in batch}


def _text(seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (BATCH, TOKENS), generator=draw)
    mask = (torch.arange(TOKENS)[None] < torch.randint(3, TOKENS + 1, (BATCH, 1), generator=draw)).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _pairs(seed: int) -> dict[str, Any]:
    source, target = _text(seed), _text(seed + 100)
    return {
        "input_ids": source["input_ids"],
        "attention_mask": source["attention_mask"],
        "decoder_input_ids": target["input_ids"],
        "decoder_attention_mask": target["attention_mask"],
        "labels": target["labels"],
    }


def _images(seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(BATCH, 3, 8, 8, generator=draw),
        "labels": torch.randint(0, 2, (BATCH,), generator=draw),
    }


def _hidden(seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, TOKENS + 1, (2, BATCH, 1), generator=draw)
    source, target = torch.arange(TOKENS)[None] < lengths
    return {
        "src": torch.randn(BATCH, TOKENS, WIDTH, generator=draw),
        "tgt": torch.randn(BATCH, TOKENS, WIDTH, generator=draw),
        "source": source,
        "target": target,
    }


def _transformer_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    hidden = ~batch["source"]
    out = model(batch["src"], batch["tgt"], src_key_padding_mask=hidden, memory_key_padding_mask=hidden)
    return F.mse_loss(out[batch["target"]], batch["tgt"][batch["target"]])


BOTH = ("attention_mask", "decoder_attention_mask")

ZOO: dict[str, Animal] = {
    "bert": Animal(
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **TEXT, max_position_embeddings=TOKENS)),
        _text,
        ("bert.encoder.layer.*",),
        (
            "bert.embeddings.LayerNorm",
            "bert.encoder.layer.*.attention.output.LayerNorm",
            "bert.encoder.layer.*.output.LayerNorm",
            "cls.predictions.transform.LayerNorm",
        ),
        ("bert.encoder.layer.*.intermediate.intermediate_act_fn",),
        ("bert.encoder",),
    ),
    "gpt2": Animal(
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=2, n_positions=TOKENS, **TEXT)
        ),
        _text,
        ("transformer.h.*",),
        ("transformer.h.*.ln_1", "transformer.h.*.ln_2", "transformer.ln_f"),
        ("transformer.h.*.mlp.act",),
        ("transformer",),
    ),
    "llama": Animal(
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **TEXT, num_key_value_heads=1)),
        _text,
        ("model.layers.*",),
        ("model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"),
        ("<model.layers.*.mlp.down_proj",),
        ("model",),
    ),
    "mixtral": Animal(
        lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                **SIZES, **TEXT, num_key_value_heads=1, num_local_experts=3, experts_implementation="eager"
            )
        ),
        _text,
        ("model.layers.*",),
        ("model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"),
        ("=model.layers.*.mlp.experts",),
        ("model",),
    ),
    "t5": Animal(
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=WIDTH, d_kv=8, d_ff=24, num_layers=LAYERS, num_heads=2, decoder_start_token_id=0, **TEXT
            )
        ),
        _pairs,
        ("encoder.block.*", "decoder.block.*"),
        (
            *(f"encoder.block.*.layer.{i}.layer_norm" for i in range(2)),
            "encoder.final_layer_norm",
            *(f"decoder.block.*.layer.{i}.layer_norm" for i in range(3)),
            "decoder.final_layer_norm",
        ),
        ("encoder.block.*.layer.1.DenseReluDense.act", "decoder.block.*.layer.2.DenseReluDense.act"),
        ("encoder", "decoder"),
        BOTH,
    ),
    "marian": Animal(
        lambda: transformers.MarianMTModel(
            transformers.MarianConfig(
                d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=2,
                decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=TOKENS,
                decoder_start_token_id=0, **TEXT,
            )
        ),
        _pairs,
        ("model.encoder.layers.*", "model.decoder.layers.*"),
        (
            *(f"model.encoder.layers.*.{norm}_layer_norm" for norm in ("self_attn", "final")),
            *(f"model.decoder.layers.*.{norm}_layer_norm" for norm in ("self_attn", "encoder_attn", "final")),
        ),
        ("model.encoder.layers.*.activation_fn", "model.decoder.layers.*.activation_fn"),
        ("model.encoder", "model.decoder"),
        BOTH,
    ),
    "vit": Animal(
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, image_size=8, patch_size=4)),
        _images,
        ("vit.layers.*",),
        ("vit.layers.*.layernorm_before", "vit.layers.*.layernorm_after", "vit.layernorm"),
        ("vit.layers.*.mlp.activation_fn",),
        ("vit",),
    ),
    "torch": Animal(
        lambda: nn.Transformer(WIDTH, 2, LAYERS, LAYERS, 24, batch_first=True),
        _hidden,
        ("encoder.layers.*", "decoder.layers.*"),
        (
            *(f"encoder.layers.*.norm{i}" for i in (1, 2)),
            *(f"decoder.layers.*.norm{i}" for i in (1, 2, 3)),
            "encoder.norm",
            "decoder.norm",
        ),
        ("<encoder.layers.*.linear2", "<decoder.layers.*.linear2"),
        ("encoder", "decoder"),
        ("source", "target"),
        _transformer_loss,
    ),
}  # fmt: skip


def born(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(7)
    return ZOO[name].build().to(dtype).train()


def fed(name: str, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in ZOO[name].batch(seed).items()}
