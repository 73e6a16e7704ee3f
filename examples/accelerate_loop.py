"""A loop with an Accelerator: LLaMA with random weights continues made-up arithmetic.

python examples/accelerate_loop.py [RUN]        (needs: pip install stabilitylab transformers accelerate)
"""

import argparse
import random

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import stabilitylab as sl
from stabilitylab.integrations.accelerate import watch

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("run", nargs="?", default="runs/accelerate", help="folder of the run (default: %(default)s)")
OUT = arguments.parse_args().run
SIGNS = "_0123456789+="  # the first is padding


def sum_of_two(seed: int) -> dict[str, torch.Tensor]:
    draw = random.Random(seed)
    one, two = draw.randrange(50), draw.randrange(50)
    ids = torch.tensor([SIGNS.index(sign) for sign in f"{one}+{two}={one + two}".ljust(8, "_")])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=13, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader([sum_of_two(seed) for seed in range(960)], batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

with watch(model, optimizer, out=OUT):  # the loop below stays as it was
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

if accelerator.is_main_process:
    metrics = sl.Run.open(OUT).metrics
    print(f"{len(metrics)} updates of 2 batches; loss {metrics['loss'].iloc[0]:.3f} -> {metrics['loss'].iloc[-1]:.3f}")
    print(f"next: stabilitylab diagnose {OUT}")
