"""A loop of your own: GPT-2 with random weights on made-up text, watched by ``stabilitylab.watch``.

python examples/plain_loop.py [RUN]        (needs: pip install stabilitylab transformers)
"""

import argparse
import random

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import stabilitylab as sl

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("run", nargs="?", default="runs/plain-loop", help="folder of the run (default: %(default)s)")
OUT = arguments.parse_args().run
WORDS = ["the", "old", "deep", "model", "learns", "forgets", "a", "small", "layer", "quickly", "slowly", "again"]


def text(lines: int, seed: int) -> list[list[str]]:
    """Sentences of 4 to 9 words, in which each word decides which three may follow."""
    draw, sentences = random.Random(seed), []
    for _ in range(lines):
        place, words = draw.randrange(len(WORDS)), []
        for _ in range(draw.randint(4, 9)):
            place = (3 * place + draw.randrange(3)) % len(WORDS)
            words.append(WORDS[place])
        sentences.append(words)
    return sentences


def batch(sentences: list[list[str]]) -> dict[str, torch.Tensor]:
    """Word numbers from 1, padded with 0; what is padding is neither attended to nor predicted."""
    numbers = [[WORDS.index(word) + 1 for word in words] + [0] * (9 - len(words)) for words in sentences]
    ids = torch.tensor(numbers)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(n_embd=32, n_layer=4, n_head=2, n_positions=9, vocab_size=13, bos_token_id=0, eos_token_id=0)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
held_out = batch(text(16, seed=1))

with sl.watch(
    model,
    out=OUT,
    optimizer=optimizer,
    mask=lambda: inputs["attention_mask"],
    reference=lambda: {"held_out": model(**held_out).loss},
    reference_mask=held_out["attention_mask"],
) as w:
    for step in range(60):
        inputs = batch(text(16, seed=100 + step))
        loss = model(**inputs).loss
        loss.backward()
        w.step(loss=loss, lr=3e-3)  # after backward, before clipping: raw gradients
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

metrics = sl.Run.open(OUT).metrics
print(f"held-out loss {metrics['held_out'].iloc[0]:.3f} -> {metrics['held_out'].iloc[-1]:.3f}")
print(f"next: stabilitylab diagnose {OUT}")
