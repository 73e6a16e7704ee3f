"""The headroom of a run: the multiple of the learning rate at which the loss of a GPT-2 with random weights would rise.

python examples/headroom.py [RUN]        (needs: pip install stabilitylab transformers)
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import stabilitylab as sl

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("run", nargs="?", default="runs/headroom", help="folder of the run (default: %(default)s)")
OUT = arguments.parse_args().run

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=32, n_embd=32, n_layer=3, n_head=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with sl.watch(model, out=OUT, optimizer=optimizer, probes="grad_norm,critical_sharpness", curvature_every=10) as w:
    for _ in range(60):
        ids = (torch.randint(32, (9, 1)) + torch.arange(24)) % 32  # counting, from anywhere on
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        w.step(loss=loss)
        optimizer.step()
        optimizer.zero_grad()

for row in sl.Run.open(OUT).frame("critical_sharpness").itertuples():
    print(
        f"step {row.step:2}: the loss would rise at {row.headroom:.3g} times the rate, "
        f"at {row.least:.3g} to {row.most:.3g} times on three parts of the batch ({row.forwards:g} forwards)"
    )
print(f"next: stabilitylab diagnose {OUT}")
