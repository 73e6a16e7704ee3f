"""The twelve models of the validation, each as the subject of a search: data, optimizer, clipping and schedule.

All have random weights and are made from configurations; nothing is downloaded. The text is the source of Python's own
standard library, so that there is some on every machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabilitylab.config import resolve
from stabilitylab.data import load_data
from stabilitylab.lr_find import RateSubject, model_subject, reference_subject

HORIZON = 1500
HELD_OUT = 8  # batches
ROWS, LENGTH = 8, 48  # sequences of a batch of text, and their bytes
MASK, FIRST_SENTINEL, PAD = 256, 257, 272  # beyond the bytes
SPANS, SPAN = 3, 4
SIDE, KINDS = 16, 10  # of an image
MOST = 2_000_000  # bytes of text
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model. ``make(width)`` returns it; ``batch(held_out, key)`` a batch; ``optimizer(model)`` its optimizers."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[bool, tuple[int, ...]], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: Callable[[nn.Module], Any]
    clipping: float
    schedule: Any
    warmup: int = 60

    def subject(self, seeds: Sequence[int], horizon: int) -> RateSubject:
        """The subject of a search; batches differ between the first seeds of two searches."""

        def fresh() -> nn.Module:
            with quiet():
                return self.make()

        return model_subject(
            fresh,
            lambda t: self.batch(False, (seeds[0], t)),
            self.loss,
            lambda model: self.optimizer(model),
            horizon=horizon,
            seeds=seeds,
            held_out=[self.batch(True, (7, number)) for number in range(HELD_OUT)],
            schedule=self.schedule,
            warmup=min(self.warmup, horizon // 4),
            clipping=self.clipping,
            name=self.name,
        )


@dataclass(frozen=True)
class ReferenceCase:
    """A model of the package's own, on its synthetic translation."""

    name: str

    def subject(self, seeds: Sequence[int], horizon: int) -> RateSubject:
        warmup = min(60, horizon // 4)
        settings = {
            "model": {"arch": self.name, "d_model": 32, "d_ffn": 64, "heads": 2, "T": max(2, warmup)},
            "data": {"sentences": 8, "held_out": 64, "validation": 0, "seed": seeds[0]},
            "train": {"steps": horizon, "warmup": warmup, "lr": 1e-3, "seed": seeds[0], "schedule": "inverse_sqrt"},
        }
        config = resolve(settings, depth=LAYERS)
        dataset = load_data(config.data, stack=config.model.stack)
        return reference_subject(config, dataset, torch.device("cpu"))


LAYERS = 6  # of encoder and decoder together


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence other libraries while they make models."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with contextlib.redirect_stderr(io.StringIO()):
        yield


@cache
def text() -> tuple[np.ndarray, np.ndarray, str]:
    """Bytes to train on and held-out bytes, a tenth of each file, and the digest of both."""
    train, held_out, size = [], [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        own = path.read_bytes()
        cut = len(own) * 9 // 10
        train.append(own[:cut])
        held_out.append(own[cut:])
        if (size := size + len(own)) > MOST:
            break
    parts = [np.frombuffer(b"".join(one), np.uint8).astype(np.int64) for one in (train, held_out)]
    return parts[0], parts[1], hashlib.sha256(parts[0].tobytes() + parts[1].tobytes()).hexdigest()[:16]


def sequences(held_out: bool, key: tuple[int, ...]) -> tuple[Tensor, np.random.Generator]:
    """(ROWS, LENGTH) bytes at places that ``key`` draws, and the generator for what is drawn further."""
    own = text()[int(held_out)]
    rng = np.random.default_rng([int(held_out), *key])
    starts = rng.integers(0, len(own) - LENGTH, ROWS)
    return torch.from_numpy(np.stack([own[start : start + LENGTH] for start in starts])), rng


def next_bytes(held_out: bool, key: tuple[int, ...]) -> Batch:
    return {"x": sequences(held_out, key)[0]}


def masked_bytes(held_out: bool, key: tuple[int, ...]) -> Batch:
    x, rng = sequences(held_out, key)
    hidden = torch.from_numpy(rng.random(tuple(x.shape)) < 0.15)
    hidden[:, 0] = True  # none is without one
    return {"x": torch.where(hidden, MASK, x), "labels": torch.where(hidden, x, -100)}


def spans(held_out: bool, key: tuple[int, ...]) -> Batch:
    """Three spans of four bytes each behind sentinels; the target has the sentinels and the spans."""
    x, rng = sequences(held_out, key)
    room = LENGTH // SPANS
    starts = [part * room + int(rng.integers(0, room - SPAN)) for part in range(SPANS)]
    source, target, at = [], [], 0
    for number, start in enumerate(starts):
        sentinel = torch.full((ROWS, 1), FIRST_SENTINEL + number)
        source += [x[:, at:start], sentinel]
        target += [sentinel, x[:, start : start + SPAN]]
        at = start + SPAN
    return {"x": torch.cat([*source, x[:, at:]], 1), "labels": torch.cat(target, 1)}


@cache
def shapes() -> Tensor:
    """A template of each kind, (KINDS, SIDE, SIDE)."""
    rng = np.random.default_rng(5)
    coarse = torch.from_numpy(rng.normal(size=(KINDS, 1, 4, 4)).astype(np.float32))
    return F.interpolate(coarse, (SIDE, SIDE), mode="bilinear", align_corners=False)[:, 0]


def images(held_out: bool, key: tuple[int, ...]) -> Batch:
    rng = np.random.default_rng([10 + int(held_out), *key])
    kinds = rng.integers(0, KINDS, 32)
    moved = [
        torch.roll(shapes()[kind], (int(down), int(right)), (0, 1))
        for kind, down, right in zip(kinds, rng.integers(0, SIDE, 32), rng.integers(0, SIDE, 32), strict=True)
    ]
    noise = torch.from_numpy(rng.normal(size=(32, SIDE, SIDE)).astype(np.float32))
    return {"x": (torch.stack(moved) + noise)[:, None], "labels": torch.from_numpy(kinds)}


class ByteLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.lstm = nn.LSTM(64, 96, num_layers=1, batch_first=True)
        self.head = nn.Linear(96, 256)

    def forward(self, x: Tensor) -> Tensor:  # (B, T) -> (B, T, 256)
        return self.head(self.lstm(self.embedding(x))[0])


class Experts(nn.Module):
    """Two of four feed-forward experts a token, by a softmax router; with a loss that balances their load."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(4)
        )
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        share = self.router(x).softmax(-1)
        best, chosen = share.topk(2, dim=-1)
        weight = torch.zeros_like(share).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        self.balance = 4 * (share.mean((0, 1)) * (weight > 0).float().mean((0, 1))).sum()
        return torch.stack([expert(x) * weight[..., n : n + 1] for n, expert in enumerate(self.experts)]).sum(0)


class MixtureBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.experts = Experts(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm_1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.experts(self.norm_2(x))


class ByteMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(256, 48), nn.Embedding(LENGTH, 48)
        self.blocks = nn.ModuleList(MixtureBlock(48, 2) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, 256)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.places.weight[: x.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.blocks:
            h = block(h, mask)
        return self.head(self.norm(h))


def next_loss(logits: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def causal_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The next byte's loss of a model of Hugging Face."""
    return next_loss(model(input_ids=batch["x"]).logits, batch["x"])


def plain_loss(model: nn.Module, batch: Batch) -> Tensor:
    return next_loss(model(batch["x"]), batch["x"])


def mixture_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The next byte's loss; in training with a hundredth of the loss that balances the experts."""
    loss = next_loss(model(batch["x"]), batch["x"])
    if not model.training:
        return loss
    return loss + 0.01 * torch.stack([block.experts.balance for block in model.blocks]).sum()  # pyright: ignore


def masked_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(input_ids=batch["x"], labels=batch["labels"]).loss


def image_loss(model: nn.Module, batch: Batch) -> Tensor:
    found = model(batch["x"])
    return F.cross_entropy(getattr(found, "logits", found), batch["labels"])


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=48, n_layer=2, n_head=2, use_cache=False)
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=257,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=96,
            max_position_embeddings=LENGTH,
        )
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=PAD + 1,
            d_model=48,
            d_kv=24,
            d_ff=96,
            num_layers=1,
            num_heads=2,
            pad_token_id=PAD,
            decoder_start_token_id=PAD,
            use_cache=False,
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=96,
            image_size=SIDE,
            patch_size=4,
            num_channels=1,
            num_labels=KINDS,
        )
    )


def convnet() -> nn.Module:
    layers: list[nn.Module] = []
    for inner, outer in ((1, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * (SIDE // 8) ** 2, KINDS))


def adamw(model: nn.Module, betas: tuple[float, float] = (0.9, 0.999), decay: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3, betas=betas, weight_decay=decay)


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for all other parameters; 20 : 1."""
    inside = {name for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name}
    matrices = [p for name, p in model.named_parameters() if name in inside]
    others = [p for name, p in model.named_parameters() if name not in inside]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, 1e-3)]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-3)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), 1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)


LANGUAGE = partial(adamw, betas=(0.9, 0.95), decay=0.1)
CASES: dict[str, Case | ReferenceCase] = {
    case.name: case
    for case in (
        Case("gpt2", gpt2, next_bytes, causal_loss, LANGUAGE, 1.0, "cosine"),
        Case("llama", llama, next_bytes, causal_loss, muon, 1.0, "linear"),
        Case("bert", bert, masked_bytes, masked_loss, adamw, 0.0, "linear"),
        Case("t5", t5, spans, masked_loss, adafactor, 0.0, "inverse_sqrt"),
        Case("vit", vit, images, image_loss, partial(adamw, decay=0.05), 1.0, "cosine"),
        Case("convnet", convnet, images, image_loss, sgd, 0.0, "cosine", warmup=0),
        Case("lstm", ByteLSTM, next_bytes, plain_loss, adam, 0.25, "constant", warmup=0),
        Case("moe", ByteMixture, next_bytes, mixture_loss, LANGUAGE, 1.0, "cosine"),
        *(ReferenceCase(arch) for arch in ("postln", "preln", "deepnorm", "branchnorm")),
    )
}
SEEN = ("gpt2", "deepnorm", "branchnorm")  # of which numbers were known when the rule was written
OF_ADAMW = {"llama": 20.0}  # a rate of AdamW is this much less than that of the search
