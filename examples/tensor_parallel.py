"""Tensor parallelism: each process has a part of every layer of a decoder that learns to count.

torchrun --nproc-per-node 2 examples/tensor_parallel.py [RUN]        (needs: pip install stabilitylab)
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import stabilitylab as sl

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument(
    "run", nargs="?", default="runs/tensor-parallel", help="folder of the run (default: %(default)s)"
)
OUT = arguments.parse_args().run
NUMBERS, WIDTH, HEAD = 24, 32, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.fc1, self.act, self.fc2 = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(NUMBERS, WIDTH), nn.ModuleList(Layer() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUMBERS)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def counting(seed):
    """Sequences that count up in steps of 1, 2 or 3: the same on every process."""
    draw = torch.Generator().manual_seed(seed)
    start, step = torch.randint(0, NUMBERS, (16, 1), generator=draw), torch.randint(1, 4, (16, 1), generator=draw)
    return (start + step * torch.arange(9)) % NUMBERS


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = Decoder()
for layer in model.layers:
    plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"attention.out": RowwiseParallel()}
    parallelize_module(layer, mesh, plan | {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
held_out = counting(seed=1)

with sl.watch(model, out=OUT, optimizer=optimizer, reference=lambda: {"held_out": loss_of(model, held_out)}) as w:
    for step in range(60):
        loss = loss_of(model, counting(seed=100 + step))
        loss.backward()
        w.step(loss=loss)
        optimizer.step()
        optimizer.zero_grad()

if dist.get_rank() == 0:
    metrics = sl.Run.open(OUT).metrics
    print(f"held-out loss {metrics['held_out'].iloc[0]:.3f} -> {metrics['held_out'].iloc[-1]:.3f}")
    print(f"next: stabilitylab diagnose {OUT}")
dist.destroy_process_group()
