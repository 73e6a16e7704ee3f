"""30 healthy models of different families: none of them is among those that the limits were set on (calibration.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
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
    translating,
)
from models import hugging_face as of
from torch import Tensor, nn

BERT = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
BERT |= {"intermediate_size": 96, "max_position_embeddings": 64}
LLAMA = {**BERT, "num_key_value_heads": 2}
BART = {"vocab_size": VOCABULARY, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 0}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
BART |= {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VIT = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
VIT |= {"image_size": 32, "patch_size": 8, "num_labels": 5}


class Attention(nn.Module):
    """Causal self-attention as nanoGPT writes it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = self.attend(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Nano(nn.Module):
    """A GPT written by hand: Pre-LN, weights at a standard deviation of .02, the head tied to the embedding."""

    def __init__(self, layers: int = 3, width: int = 48, heads: int = 4, tied: bool = True) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedded(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    def embedded(self, ids: Tensor) -> Tensor:
        return self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))


def next_tokens(model: nn.Module) -> Given:
    ids = tokens()
    return {"model": model, "batch": (ids[:, :-1], ids[:, 1:]), "loss_fn": cross_entropy}


class LSTM(nn.Module):
    """A character model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(VOCABULARY, 32), nn.LSTM(32, 64, 2, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(ids))[0])


class CausalConvolutions(nn.Module):
    """A TCN: convolutions of growing dilation, padded on the left."""

    def __init__(self, both_sides: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.layers = nn.ModuleList(nn.Conv1d(32, 32, 3, dilation=2**n) for n in range(3))
        self.both_sides = both_sides

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).transpose(1, 2)
        for n, layer in enumerate(self.layers):
            reach = 2 * 2**n
            x = x + torch.relu(layer(F.pad(x, (reach // 2, reach // 2) if self.both_sides else (reach, 0))))
        return self.head(x.transpose(1, 2))


class Mixer(nn.Module):
    """An MLP-Mixer on 16 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 48, 8, 8), nn.Linear(48, 5)
        self.norms = nn.ModuleList(nn.LayerNorm(48) for _ in range(6))
        self.over_patches = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)
        )
        self.over_channels = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for n, (patches, channels) in enumerate(zip(self.over_patches, self.over_channels, strict=True)):
            x = x + patches(self.norms[2 * n](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * n + 1](x))
        return self.head(x.mean(dim=1))


def labelled_pictures(model: nn.Module) -> Given:
    return {"model": model, "batch": (torch.randn(8, 3, 32, 32), classes_of(8, 5)), "loss_fn": cross_entropy}


def vgg() -> nn.Module:
    """Convolutions with batch norms, as CIFAR tutorials write them."""
    layers: list[nn.Module] = []
    for wide, out in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(wide, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4 * 4, 5))


def regression() -> Given:
    """A number for each of 64 rows."""
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    x = torch.randn(64, 10)
    batch = (x, (x[:, :1] * 2 + x[:, 1:2]).sin())
    return {"model": model, "batch": batch, "loss_fn": lambda model, batch: F.mse_loss(model(batch[0]), batch[1])}


class Variational(nn.Module):
    """A variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 48), nn.Linear(12, 48)
        self.middle, self.out = nn.Linear(48, 24), nn.Linear(48, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.middle(torch.relu(self.encoder(x))).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp() if self.training else mean
        return self.out(torch.relu(self.decoder(z))), mean, spread


def elbo(model: nn.Module, x: Tensor) -> Tensor:
    made, mean, spread = model(x)
    fit = F.binary_cross_entropy_with_logits(made, x, reduction="none").sum(dim=1)
    return (fit - 0.5 * (1 + spread - mean.square() - spread.exp()).sum(dim=1)).mean()


def variational() -> Given:
    return {"model": Variational(), "batch": torch.rand(16, 64), "loss_fn": elbo}


class Graph(nn.Module):
    """Two graph convolutions over one fixed graph per sample, (batch, nodes, features)."""

    def __init__(self, nodes: int = 10) -> None:
        super().__init__()
        edges = (torch.rand(nodes, nodes, generator=torch.Generator().manual_seed(3)) < 0.3).float()
        edges = ((edges + edges.T) > 0).float() + torch.eye(nodes)
        self.register_buffer("edges", edges / edges.sum(dim=1, keepdim=True))
        self.layers = nn.ModuleList([nn.Linear(12, 32), nn.Linear(32, 32)])
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(self.edges @ x))
        return self.head(x)


def nodes() -> Given:
    batch = (torch.randn(6, 10, 12), torch.randint(4, (6, 10)))
    return {"model": Graph(), "batch": batch, "loss_fn": cross_entropy}


def named(name: str, family: str, make: Callable[[], Given], rate: float = 1e-3, warmup: int = 0, *kind: str) -> Entry:
    return Entry(name, family, make, rate, warmup, *kind)


def lm(architecture: str, config: str, **settings: Any) -> Callable[[], Given]:
    return lambda: causal(of(architecture, config, **settings))


GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 6, "n_head": 4, "n_positions": 64}
ENTRIES = (
    named("GPT-2 of 6 layers, 64 wide", "GPT-2", lm("GPT2LMHeadModel", "GPT2Config", **GPT2)),
    named("LLaMA of 6 layers, 64 wide", "LLaMA", lm(
        "LlamaForCausalLM", "LlamaConfig", **{**LLAMA, "num_hidden_layers": 6})),
    named("GPT-NeoX", "GPT-NeoX", lm("GPTNeoXForCausalLM", "GPTNeoXConfig", **BERT)),
    named("OPT", "OPT", lm(
        "OPTForCausalLM", "OPTConfig", vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=3, ffn_dim=96,
        num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=48)),
    named("BLOOM", "BLOOM", lm(
        "BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=64, n_layer=3, n_head=4)),
    named("Phi", "Phi", lm("PhiForCausalLM", "PhiConfig", **BERT)),
    named("Qwen 2", "Qwen", lm("Qwen2ForCausalLM", "Qwen2Config", **LLAMA)),
    named("Gemma", "Gemma", lm("GemmaForCausalLM", "GemmaConfig", **LLAMA, head_dim=16)),
    named("Mixtral", "MoE", lm("MixtralForCausalLM", "MixtralConfig", **LLAMA, num_local_experts=4)),
    named("Mamba", "Mamba", lm(
        "MambaForCausalLM", "MambaConfig", vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=3, state_size=8)),
    named("GPT by hand", "nanoGPT", lambda: next_tokens(Nano())),
    named("LSTM", "RNN", lambda: next_tokens(LSTM()), 3e-3),
    named("causal convolutions", "TCN", lambda: next_tokens(CausalConvolutions()), 3e-3),
    named("BERT", "BERT", lambda: masked(of("BertForMaskedLM", "BertConfig", **BERT)), 1e-3, 50),
    named("RoBERTa", "BERT", lambda: masked(of("RobertaForMaskedLM", "RobertaConfig", **BERT))),
    named("ALBERT", "ALBERT", lambda: masked(of("AlbertForMaskedLM", "AlbertConfig", **BERT, embedding_size=32))),
    named("DistilBERT, sentences", "DistilBERT", lambda: sentences(of(
        "DistilBertForSequenceClassification", "DistilBertConfig", vocab_size=VOCABULARY, dim=48, n_layers=3, n_heads=4,
        hidden_dim=96, max_position_embeddings=64, num_labels=3))),
    named("ELECTRA, tags", "ELECTRA", lambda: tagging(of(
        "ElectraForTokenClassification", "ElectraConfig", **BERT, embedding_size=48, num_labels=5))),
    named("T5", "T5", lambda: translating(of(
        "T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=48, d_kv=12, d_ff=96, num_layers=2,
        num_heads=4, decoder_start_token_id=0))),
    named("BART", "BART", lambda: translating(of("BartForConditionalGeneration", "BartConfig", **BART))),
    named("ViT", "ViT", lambda: pictures(of("ViTForImageClassification", "ViTConfig", **VIT))),
    named("Swin", "Swin", lambda: pictures(of(
        "SwinForImageClassification", "SwinConfig", image_size=32, patch_size=2, embed_dim=16, depths=[1, 2],
        num_heads=[2, 4], window_size=4, num_labels=5))),
    named("ResNet", "ResNet", lambda: pictures(of(
        "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16, 32], depths=[1, 1, 1],
        layer_type="basic", num_labels=5)), 0.1, 0, "sgd"),
    named("ConvNeXt", "ConvNeXt", lambda: pictures(of(
        "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1],
        image_size=32, num_labels=5))),
    named("MLP-Mixer", "Mixer", lambda: labelled_pictures(Mixer())),
    named("convolutions with BatchNorm", "VGG", lambda: labelled_pictures(vgg())),
    named("regression", "MLP", regression, 3e-3),
    named("variational autoencoder", "VAE", variational),
    named("graph convolutions", "GNN", nodes, 1e-2),
    named("CLIP's text and pictures", "CLIP", lambda: clip()),
)  # fmt: skip


def clip() -> Given:
    """Sentences and pictures that are compared with each other."""
    text = {**BERT, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    model = of(
        *("CLIPModel", "CLIPConfig"), text_config=text, projection_dim=32, vision_config={**VIT, "projection_dim": 32}
    )
    batch = {"input_ids": tokens(), "pixel_values": torch.randn(6, 3, 32, 32), "return_loss": True}
    return {"model": model, "batch": batch, "loss_fn": lambda model, batch: model(**batch).loss}
