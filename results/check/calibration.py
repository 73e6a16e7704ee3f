"""Models that the limits of the checks were set on: none of them is among those that the limits are shown by.

    python results/check/calibration.py      # calibration.csv

Two kinds: healthy ones as they are commonly trained, and the same at 100 times the rate.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from models import (
    VOCABULARY,
    Entry,
    Given,
    causal,
    classes_of,
    cross_entropy,
    masked,
    pictures,
    sentences,
    tagging,
    tokens,
    told,
    translating,
)
from models import hugging_face as of
from torch import Tensor, nn

import stabilitylab as sl

HERE = Path(__file__).parent
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDE = {**TEXT, "intermediate_size": 96, "max_position_embeddings": 64}


class Recurrent(nn.Module):
    """A GRU that names the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn, self.head = (
            nn.Embedding(VOCABULARY, 32), nn.GRU(32, 48, 2, batch_first=True), nn.Linear(48, VOCABULARY)
        )  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(ids))[0])


def recurrent() -> Given:
    ids = tokens()
    return {"model": Recurrent(), "batch": (ids[:, :-1], ids[:, 1:]), "loss_fn": cross_entropy}


def perceptron() -> Given:
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    return {"model": model, "batch": (torch.randn(32, 20), classes_of(32, 4)), "loss_fn": cross_entropy}


def convolutional() -> Given:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 5),
    )  # fmt: skip
    return {"model": model, "batch": (torch.randn(8, 3, 16, 16), classes_of(8, 5)), "loss_fn": cross_entropy}


class Plain(nn.Module):
    """A decoder by nn.TransformerEncoder, as tutorials write it."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, 48), nn.Parameter(0.02 * torch.randn(64, 48))
        layer = nn.TransformerEncoderLayer(48, 4, 96, 0.1, "gelu", batch_first=True, norm_first=norm_first)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(48, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.body(self.embedding(ids) + self.places[: ids.shape[1]], mask, is_causal=True))


def plain(norm_first: bool) -> Given:
    ids = tokens()
    return {"model": Plain(norm_first), "batch": (ids[:, :-1], ids[:, 1:]), "loss_fn": cross_entropy}


def reference(arch: str, depth: int, decoder: bool = True) -> Given:
    """The package's own Transformer, 48 wide, as in results/alarm."""
    from stabilitylab.config import resolve

    own = {"arch": arch, "d_model": 48, "d_ffn": 96, "heads": 4, "stack": "decoder" if decoder else "encoder-decoder"}
    config = resolve({"model": own}, depth=depth)
    target = tokens(seed=2)
    inputs = {"tokens": target} if decoder else {"source": tokens(), "target": target}
    model = sl.build_model(config.model, source_vocab=VOCABULARY, target_vocab=VOCABULARY, seed=0)
    model.calibrate(**inputs)
    model.set_row(0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(**batch)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())

    return {"model": model, "batch": inputs, "loss_fn": loss}


ENTRIES = (
    Entry("GPT-2 of 4 layers, 48 wide", "GPT-2", lambda: causal(of(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=48, n_layer=4, n_head=4, n_positions=64)), 3e-3),
    Entry("GPT-2 of 8 layers, 48 wide", "GPT-2", lambda: causal(of(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=48, n_layer=8, n_head=4, n_positions=64)), 1e-2),
    Entry("LLaMA of 4 layers, 48 wide", "LLaMA", lambda: causal(of(
        "LlamaForCausalLM", "LlamaConfig", **{**WIDE, "hidden_size": 48})), 3e-3),
    Entry("LLaMA of 8 layers, 48 wide", "LLaMA", lambda: causal(of(
        "LlamaForCausalLM", "LlamaConfig", **{**WIDE, "num_hidden_layers": 8, "hidden_size": 48})), 1e-2),
    Entry("Falcon", "Falcon", lambda: causal(of("FalconForCausalLM", "FalconConfig", **TEXT)), 1e-3),
    Entry("GPT-J", "GPT-J", lambda: causal(of(
        "GPTJForCausalLM", "GPTJConfig", vocab_size=VOCABULARY, n_embd=48, n_layer=3, n_head=4, rotary_dim=8,
        n_positions=64)), 1e-3),
    Entry("StableLM", "StableLM", lambda: causal(of(
        "StableLmForCausalLM", "StableLmConfig", **WIDE, num_key_value_heads=4)), 1e-3),
    Entry("OLMo 2", "OLMo", lambda: causal(of("Olmo2ForCausalLM", "Olmo2Config", **WIDE)), 1e-3),
    Entry("Granite", "Granite", lambda: causal(of("GraniteForCausalLM", "GraniteConfig", **WIDE)), 1e-3),
    Entry("OLMoE", "MoE", lambda: causal(of(
        "OlmoeForCausalLM", "OlmoeConfig", **WIDE, num_experts=8, num_experts_per_tok=2)), 1e-3),
    Entry("Mamba 2", "Mamba", lambda: causal(of(
        "Mamba2ForCausalLM", "Mamba2Config", vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=3, head_dim=12,
        num_heads=8, n_groups=1, state_size=8, chunk_size=8)), 1e-3),
    Entry("CodeGen", "CodeGen", lambda: causal(of(
        "CodeGenForCausalLM", "CodeGenConfig", vocab_size=VOCABULARY, n_embd=48, n_layer=3, n_head=4, rotary_dim=8,
        n_positions=64, n_ctx=64)), 1e-3),
    Entry("XLM-RoBERTa", "BERT", lambda: masked(of(
        "XLMRobertaForMaskedLM", "XLMRobertaConfig", **WIDE)), 1e-3, 50),
    Entry("DeBERTa v2", "BERT", lambda: masked(of("DebertaV2ForMaskedLM", "DebertaV2Config", **WIDE)), 1e-3, 50),
    Entry("MPNet", "BERT", lambda: masked(of("MPNetForMaskedLM", "MPNetConfig", **WIDE)), 1e-3),
    Entry("Funnel", "Funnel", lambda: sentences(of(
        "FunnelForSequenceClassification", "FunnelConfig", vocab_size=VOCABULARY, d_model=48, n_head=4, d_head=12,
        d_inner=96, block_sizes=[1, 1], num_labels=3)), 1e-3),
    Entry("CamemBERT, tags", "BERT", lambda: tagging(of(
        "CamembertForTokenClassification", "CamembertConfig", **WIDE, num_labels=5)), 1e-3),
    Entry("Marian", "BART", lambda: translating(of(
        "MarianMTModel", "MarianConfig", vocab_size=VOCABULARY, d_model=48, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96,
        max_position_embeddings=64, decoder_start_token_id=0, **ENDS)), 1e-3),
    Entry("Pegasus", "BART", lambda: translating(of(
        "PegasusForConditionalGeneration", "PegasusConfig", vocab_size=VOCABULARY, d_model=48, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96,
        max_position_embeddings=64, decoder_start_token_id=0)), 1e-3, 50),
    Entry("LongT5", "T5", lambda: translating(of(
        "LongT5ForConditionalGeneration", "LongT5Config", vocab_size=VOCABULARY, d_model=48, d_kv=12, d_ff=96,
        num_layers=2, num_heads=4, decoder_start_token_id=0, tie_word_embeddings=True)), 1e-3),
    Entry("DeiT", "ViT", lambda: pictures(of(
        "DeiTForImageClassification", "DeiTConfig", hidden_size=48, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=96, image_size=32, patch_size=8, num_labels=5)), 1e-3),
    Entry("BEiT", "ViT", lambda: pictures(of(
        "BeitForImageClassification", "BeitConfig", hidden_size=48, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=96, image_size=32, patch_size=8, num_labels=5)), 1e-3),
    Entry("PVT v2", "ViT", lambda: pictures(of(
        "PvtV2ForImageClassification", "PvtV2Config", image_size=32, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 4, 4], num_labels=5)), 1e-3),
    Entry("RegNet", "ConvNet", lambda: pictures(of(
        "RegNetForImageClassification", "RegNetConfig", embedding_size=8, hidden_sizes=[8, 16, 32, 64],
        depths=[1, 1, 2, 1], groups_width=8, num_labels=5)), 0.1, 0, "sgd"),
    Entry("MobileNet v2", "ConvNet", lambda: pictures(of(
        "MobileNetV2ForImageClassification", "MobileNetV2Config", image_size=32, depth_multiplier=0.25,
        num_labels=5)), 1e-3),
    Entry("GRU", "RNN", recurrent, 3e-3),
    Entry("perceptron", "MLP", perceptron, 3e-3),
    Entry("convolutions with GroupNorm", "ConvNet", convolutional, 3e-3),
    Entry("nn.TransformerEncoder, Post-LN", "tutorial", lambda: plain(False), 1e-3),
    Entry("nn.TransformerEncoder, Pre-LN", "tutorial", lambda: plain(True), 1e-3),
    *(Entry(f"reference {arch}, {layers} layers", "reference", lambda a=arch, n=layers: reference(a, n), 1e-3)
      for arch in ("postln", "preln", "deepnorm", "branchnorm") for layers in (4, 12)),
    *(Entry(f"reference {arch}, 3L-3L", "reference", lambda a=arch: reference(a, 6, False), 3e-3)
      for arch in ("postln", "preln", "deepnorm", "branchnorm")),
)  # fmt: skip


def rows() -> Iterator[dict[str, Any]]:
    for entry in ENTRIES:
        for times in (1, 100):
            given = entry.given()
            for group in given["optimizer"].param_groups:
                group["lr"] *= times
            found = sl.preflight(**given)
            row: dict[str, Any] = {"model": entry.name, "family": entry.family, "rate": f"{times * entry.rate:g}"}
            row |= {"warmup": entry.warmup, "times": times, "ok": found.ok}
            row |= told(found)
            row |= {check.name: f"{check.value:.4g}" for check in found.checks}
            before, after = found.numbers["loss_before"], found.numbers["loss_after"]
            row["loss rises"] = "" if before is None or after is None else f"{after - before:.4g}"
            row["raised"] = "; ".join(
                check.measured for check in found.checks if check.measured.startswith("it raised")
            )
            print(row, file=sys.stderr, flush=True)
            yield row


def main() -> None:
    found = list(rows())
    columns = list(dict.fromkeys(name for row in found for name in row))
    with (HERE / "calibration.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(found)


if __name__ == "__main__":
    main()
