"""Pipeline parallelism: each process has some layers of a decoder that learns to count, and feeds the next process.

torchrun --nproc-per-node 2 examples/pipeline_parallel.py [RUN]        (needs: pip install stabilitylab)
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import stabilitylab as sl

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument(
    "run", nargs="?", default="runs/pipeline-parallel", help="folder of the run (default: %(default)s)"
)
OUT = arguments.parse_args().run
NUMBERS, WIDTH, LAYERS = 24, 32, 4


class Stage(nn.Module):
    """The layers of one process, under the numbers that they have in the whole model, and what stands around them."""

    def __init__(self, rank, size):
        super().__init__()
        torch.manual_seed(0)
        layers = {str(n): nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True, dropout=0) for n in range(LAYERS)}
        own = range(LAYERS * rank // size, LAYERS * (rank + 1) // size)
        self.embedding = nn.Embedding(NUMBERS, WIDTH) if rank == 0 else None
        self.layers = nn.ModuleDict({str(number): layers[str(number)] for number in own})
        self.head = nn.Linear(WIDTH, NUMBERS) if rank == size - 1 else None

    def forward(self, x):
        x = x if self.embedding is None else self.embedding(x)
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers.values():
            x = layer(x, src_mask=causal, is_causal=True)
        return x if self.head is None else self.head(x)


def counting(seed):
    """Sequences that count up in steps of 1, 2 or 3: the same on every process."""
    draw = torch.Generator().manual_seed(seed)
    start, step = torch.randint(0, NUMBERS, (16, 1), generator=draw), torch.randint(1, 4, (16, 1), generator=draw)
    return (start + step * torch.arange(9)) % NUMBERS


def loss_of(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = Stage(rank, size)
schedule = Schedule1F1B(PipelineStage(model, rank, size, torch.device("cpu")), n_microbatches=4, loss_fn=loss_of)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

with sl.watch(model, out=OUT, optimizer=optimizer, parallel=schedule) as w:
    for step in range(60):
        tokens, losses = counting(seed=100 + step), []
        inputs = [tokens[:, :-1]] if rank == 0 else []
        schedule.step(*inputs, target=tokens[:, 1:] if rank == size - 1 else None, losses=losses)
        w.step(loss=torch.stack(losses).mean() if losses else None)  # the last stage alone has one
        optimizer.step()
        optimizer.zero_grad()

if rank == 0:
    metrics = sl.Run.open(OUT).metrics
    print(f"loss {metrics['loss'].iloc[0]:.3f} -> {metrics['loss'].iloc[-1]:.3f}")
    print(f"next: stabilitylab diagnose {OUT}")
dist.destroy_process_group()
