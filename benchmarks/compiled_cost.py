"""What watching costs a compiled model, and the same one uncompiled: side by side, ABBA, with an A/A control.

    python benchmarks/compiled_cost.py                          # 6 layers, 256 wide, 4 x 256 tokens, inductor
    python benchmarks/compiled_cost.py --width 384 --tokens 128 --rounds 30
    python benchmarks/compiled_cost.py --backend eager          # nothing compiled

A decoder of GPT's kind (tests/compiled has a smaller one), AdamW, updates of one batch. "control": a second unwatched
one. "plain": watched, a row that is not probed. "standard", "default", "fingerprint": a probed row with these probes.
Every subject has its own model and optimizer; CPU time, of one thread; without reference passes, which train nothing.
Intervals: 95 %, bootstrap over rounds.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import Nowhere, machine, middle, rounds, seconds
from torch import Tensor, nn

from stabilitylab.probes import Watcher

VOCAB, NEVER, CPU = 2000, 1 << 40, torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = width // 64

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.ln_2(x))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(VOCAB, width), nn.LayerNorm(width), nn.Linear(width, VOCAB)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def subject(arguments: argparse.Namespace, probes: str, every: int = 1) -> Callable[[], float]:
    """One update of a model of its own; ``probes``: "" for an unwatched one."""
    torch.manual_seed(0)
    model = type("Own", (Decoder,), {})(arguments.layers, arguments.width)  # models of one class share compiled code
    run = model if arguments.backend == "eager" else torch.compile(model, backend=arguments.backend)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    watcher = Watcher(run, Nowhere(), probes=probes, every=every, optimizer=optimizer) if probes else None
    tokens = torch.randint(0, VOCAB, (arguments.batch, arguments.tokens + 1))

    def update() -> None:
        loss = F.cross_entropy(run(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if watcher is not None:
            watcher.step(loss=loss)
        optimizer.step()
        optimizer.zero_grad()

    return lambda: seconds(update, CPU)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager", "eager"])
    for name, default in (("layers", 6), ("width", 256), ("batch", 4), ("tokens", 256), ("rounds", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    subjects = {
        "unwatched": subject(arguments, ""),
        "control": subject(arguments, ""),
        "plain": subject(arguments, "default", NEVER),
        "standard": subject(arguments, "standard"),
        "default": subject(arguments, "default"),
        "fingerprint": subject(arguments, "fingerprint"),
    }
    rounds(subjects, 3)  # which compiles
    taken = rounds(subjects, arguments.rounds)
    size = f"{arguments.layers} layers, {arguments.width} wide, {arguments.batch} x {arguments.tokens} tokens"
    print(f"{size}, {arguments.backend}, {arguments.rounds} rounds; {machine(CPU)}")
    print(f"unwatched: {1000 * sorted(taken['unwatched'])[arguments.rounds // 2]:.0f} ms an update")
    for name in subjects:
        if name != "unwatched":
            print(f"{name:11s} / unwatched  {middle(taken[name] / taken['unwatched'])}")


if __name__ == "__main__":
    main()
