"""Our trainer's update beside the same model written with torch.nn.Transformer, and Hugging Face's Marian of its size.

    python benchmarks/peers.py --out benchmarks/peers
    python benchmarks/peers.py --device cuda --precision bf16 --rounds 50 --out DIR/peers

One process, random weights, the same batches, loss (smoothed cross-entropy per token) and fused AdamW, no dropout.
Post-LN encoder-decoders with the same number of parameters and a loss near log V before the first update (both are
checked); updates take turns, each second round in reverse (ABBA). CPU time of one thread, or on a GPU wall time from
idle to idle. Ours is the trainer as it is, loss and total gradient norm recorded in a run; "control" is a second one.
The others record nothing. Over ours: the median over rounds of the ratio within a round, and its 95 % bootstrap
interval. Writes OUT.md and OUT.png.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from subject import UNWATCHED, prepared, trainer, update, warm
from timing import Middle, machine, middle, rounds, seconds
from torch import Tensor, nn

from stabilitylab.config import ModelConfig, TrainConfig
from stabilitylab.data import Batch, Dataset
from stabilitylab.train import Plan
from stabilitylab.train.recipe import adamw, learning_rate, token_losses

SMALL = ["model.d_model=256", "model.d_ffn=1024", "model.heads=4", "data.sentences=64", "data.max_length=64"]
SIZES: dict[str, tuple[str, int, list[str]]] = {  # name -> (what a reader calls it, depth, settings)
    "tiny-6": ("64-128-2, 6L-6L", 12, []),
    "tiny-100": ("64-128-2, 100L-100L", 200, []),
    "small-6": ("256-1024-4, 6L-6L", 12, SMALL),
}
OURS, NEAR = "stabilitylab", 1.0  # NEAR: nats between a first loss and log V
Forward = Callable[[Batch], Tensor]  # -> logits (B, T, V)


def positions(length: int, like: Tensor) -> Tensor:
    """Sinusoids as ours has them, (length, D): all sines, then all cosines."""
    width = like.shape[-1]
    rates = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=like.device) / width)
    angle = torch.arange(length, dtype=torch.float64, device=like.device)[:, None] * rates
    return torch.cat([angle.sin(), angle.cos()], dim=1).to(like.dtype)


class TorchTransformer(nn.Module):
    """Embeddings times sqrt(d), sinusoidal positions, ``nn.Transformer`` without its last norms, a tied output."""

    def __init__(self, config: ModelConfig, dataset: Dataset) -> None:
        super().__init__()
        d = config.d_model
        self.source, self.target = nn.Embedding(dataset.source_vocab, d), nn.Embedding(dataset.target_vocab, d)
        self.transformer = nn.Transformer(
            d, config.heads, config.encoder_layers, config.decoder_layers, config.d_ffn, dropout=0.0, batch_first=True
        )
        self.transformer.encoder.norm = self.transformer.decoder.norm = None  # ours has none either, in Post-LN
        for embedding in (self.source, self.target):
            nn.init.normal_(embedding.weight, std=d**-0.5)

    def embed(self, embedding: nn.Embedding, tokens: Tensor) -> Tensor:
        x = embedding(tokens) * math.sqrt(embedding.embedding_dim)
        return x + positions(tokens.shape[1], x)

    def forward(self, batch: Batch) -> Tensor:
        source, target = batch.inputs["source"], batch.inputs["target"]
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        padding = ~batch.inputs["source_mask"]
        hidden = self.transformer(
            self.embed(self.source, source),
            self.embed(self.target, target),
            tgt_mask=causal.isinf(),
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return hidden @ self.target.weight.T


def torch_transformer(config: ModelConfig, dataset: Dataset) -> tuple[nn.Module, Forward]:
    model = TorchTransformer(config, dataset)
    return model, model


def marian(config: ModelConfig, dataset: Dataset) -> tuple[nn.Module, Forward]:
    transformers = importlib.import_module("transformers")
    model = transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=dataset.source_vocab,
            decoder_vocab_size=dataset.target_vocab,
            share_encoder_decoder_embeddings=False,
            d_model=config.d_model,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            encoder_attention_heads=config.heads,
            decoder_attention_heads=config.heads,
            encoder_ffn_dim=config.d_ffn,
            decoder_ffn_dim=config.d_ffn,
            activation_function="relu",
            dropout=0.0,
            scale_embedding=True,
            use_cache=False,
            pad_token_id=0,
            eos_token_id=2,
            forced_eos_token_id=None,
            decoder_start_token_id=1,
        )
    )

    def forward(batch: Batch) -> Tensor:
        return model(
            input_ids=batch.inputs["source"],
            attention_mask=batch.inputs["source_mask"],
            decoder_input_ids=batch.inputs["target"],
        ).logits

    return model, forward


PEERS = {"torch.nn.Transformer": torch_transformer, "Marian (transformers)": marian}


class Peer:
    """Another model under our loss, our optimizer and our batches, in the shortest loop that trains it."""

    def __init__(self, make: Callable[..., tuple[nn.Module, Forward]], plan: Plan) -> None:
        self.train: TrainConfig = plan.config.train
        self.dataset, self.device, self.row = plan.dataset, plan.device, 0
        self.model, self.logits = make(plan.config.model, plan.dataset)
        self.model.to(plan.device).train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = adamw(self.train, self.parameters)

    def update(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.train, self.row)
        batch = self.dataset.micro_batch(self.row).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.train.precision == "bf16"):
            logits = self.logits(batch)
        loss, _ = token_losses(logits, batch.labels, batch.weight, self.train.label_smoothing)
        (loss / batch.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.row += 1


@torch.no_grad()
def first_nll(logits: Forward, plan: Plan) -> float:
    """Per token of the first batch, without smoothing."""
    batch = plan.dataset.micro_batch(0).to(plan.device)
    return float(token_losses(logits(batch), batch.labels, batch.weight, 0.0)[1] / batch.tokens)


class Size:
    """All subjects of one size: what they hold, their first loss, and what their updates took."""

    def __init__(self, name: str, arguments: argparse.Namespace, folder: Path) -> None:
        self.title, depth, sets = SIZES[name]
        sets = [
            "model.arch=postln",
            f"train.device={arguments.device}",
            f"train.precision={arguments.precision}",
            *sets,
        ]
        plans = {OURS: (), "control": ()}
        if arguments.device != "cpu" and "cuda_graphs" in TrainConfig.model_fields:
            plans = {OURS: ("train.cuda_graphs=off",), "control": ("train.cuda_graphs=off",)}
            plans[f"{OURS}, CUDA graphs"] = ("train.cuda_graphs=on",)
        works, self.parameters, self.first = {}, {}, {}
        for subject, extra in plans.items():
            plan = prepared(depth, *sets, *UNWATCHED, *extra, *arguments.set)
            ours = trainer(plan, folder / f"{name}-{subject}")
            self.first[subject] = first_nll(lambda batch, model=ours.model: model(**batch.inputs), plan)
            self.parameters[subject] = sum(p.numel() for p in ours.model.parameters())
            works[subject] = lambda ours=ours: update(ours)
        self.tokens = np.mean([plan.dataset.micro_batch(warm(plan.device) + i).tokens for i in range(arguments.rounds)])
        self.vocabulary, self.device = plan.dataset.target_vocab, plan.device
        for subject, make in PEERS.items():
            try:
                peer = Peer(make, plan)
            except ImportError as error:
                print(f"{subject}: left out, {error}")
                continue
            self.first[subject] = first_nll(peer.logits, plan)
            self.parameters[subject] = sum(p.numel() for p in peer.parameters)
            works[subject] = lambda peer=peer: seconds(peer.update, peer.device)
        self.check()
        rounds(works, warm(plan.device))
        self.seconds = rounds(works, arguments.rounds)
        self.over = {subject: middle(taken / self.seconds[OURS]) for subject, taken in self.seconds.items()}

    def check(self) -> None:
        if len(set(self.parameters.values())) > 1:
            raise SystemExit(f"{self.title}: the models differ in size: {self.parameters}")
        if far := {name: nll for name, nll in self.first.items() if abs(nll - math.log(self.vocabulary)) > NEAR}:
            raise SystemExit(f"{self.title}: losses before the first update are not near log V: {far}")

    def rows(self) -> list[str]:
        return [
            f"| {self.title} | {name} | {self.parameters[name]:,} | {1e6 * np.median(taken) / self.tokens:.1f} "
            f"| {self.over[name]} | {self.first[name]:.2f} |"
            for name, taken in self.seconds.items()
        ]


def text(sizes: list[Size], arguments: argparse.Namespace) -> str:
    sets = "".join(f" --set {each}" for each in arguments.set)
    lines = [
        "# Our trainer beside others",
        "",
        f"`python benchmarks/peers.py --device {arguments.device} --precision {arguments.precision} "
        f"--rounds {arguments.rounds}{sets}`, {machine(sizes[0].device)}.",
        "",
        "| size | trained with | parameters | µs a target token | over ours [95 %] | nll before the first update |",
        "|---|---|---|---|---|---|",
        *(row for size in sizes for row in size.rows()),
        "",
        f"Vocabulary {sizes[0].vocabulary:,}, log V = {math.log(sizes[0].vocabulary):.2f}. Above 1: slower than ours. "
        "All have biases in every projection, one norm a sub-layer, sinusoidal positions and a tied output. Ours and "
        "nn.Transformer project q, k and v at once, Marian one by one.",
    ]
    return "\n".join(lines) + "\n"


def draw(sizes: list[Size], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in sizes[0].over if name != OURS]
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, panels = plt.subplots(
            1,
            len(sizes),
            figsize=(6.9, 0.7 + 0.32 * len(names)),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for axes, size in zip(panels[0], sizes, strict=True):
            found: list[Middle] = [size.over[name] for name in names]
            ends = [[m.value - m.low for m in found], [m.high - m.value for m in found]]
            axes.errorbar([m.value for m in found], range(len(names)), xerr=ends, fmt="o", color="#0072B2", capsize=3)
            axes.axvline(1, color="grey", linewidth=0.8)
            axes.set_yticks(range(len(names)), names)
            axes.set_title(size.title, fontsize=9)
            axes.grid(axis="x", alpha=0.25, linewidth=0.5)
        axes.set_ylim(len(names) - 0.5, -0.5)
        figure.supxlabel("time of an update over ours", fontsize=9)
        figure.savefig(path, dpi=300)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--set", action="append", default=[], help="any setting of the run, such as data.sentences=4")
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.png")
    arguments = parser.parse_args()
    if unknown := set(arguments.sizes.split(",")) - set(SIZES):
        parser.error(f"--sizes {', '.join(sorted(unknown))}: choose from {', '.join(SIZES)}.")
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch {torch.__version__} sees no CUDA device.")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        sizes = [Size(name, arguments, Path(folder)) for name in arguments.sizes.split(",")]
    print(text(sizes, arguments))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.with_suffix(".md").write_text(text(sizes, arguments), encoding="utf-8")
        draw(sizes, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
