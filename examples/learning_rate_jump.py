"""A broken run: the learning rate of a GPT-2 of 12 layers jumps a hundredfold at step 40.

python examples/learning_rate_jump.py [RUN]        (needs: pip install stabilitylab transformers)
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import stabilitylab as sl

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("run", nargs="?", default="runs/gpt2", help="folder of the run (default: %(default)s)")
OUT = arguments.parse_args().run
WORDS, LENGTH = 64, 32


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Made-up text: three words may follow each word."""
    draw = torch.Generator().manual_seed(seed)
    words = [torch.randint(WORDS, (16,), generator=draw)]
    for _ in range(LENGTH - 1):
        words.append((5 * words[-1] + torch.randint(3, (16,), generator=draw)) % WORDS)
    ids = torch.stack(words, dim=1)
    return {"input_ids": ids, "labels": ids}


torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(n_embd=64, n_layer=12, n_head=2, n_positions=LENGTH, vocab_size=WORDS, bos_token_id=0, eos_token_id=0)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
fixed = batch(seed=1)

with sl.watch(model, out=OUT, every=1, optimizer=optimizer, reference=lambda: model(**fixed)) as w:
    for step in range(60):
        if step == 40:
            optimizer.param_groups[0]["lr"] *= 100
        loss = model(**batch(seed=100 + step)).loss
        loss.backward()
        w.step(loss=loss, lr=optimizer.param_groups[0]["lr"])  # after backward, before clipping and optimizer.step
        optimizer.step()
        optimizer.zero_grad()

print(f"next: stabilitylab diagnose {OUT}")
