"""The Trainer of Hugging Face with one callback: BERT with random weights fills gaps in made-up text.

python examples/huggingface_trainer.py [RUN]        (needs: pip install stabilitylab transformers accelerate)
"""

import argparse
import random
import tempfile

import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

import stabilitylab as sl
from stabilitylab.integrations.transformers import HuggingFaceCallback

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("run", nargs="?", default="runs/huggingface", help="folder of the run (default: %(default)s)")
OUT = arguments.parse_args().run
PAD, GAP, WORDS, LENGTH = 0, 1, 30, 12


def sentence(seed: int) -> dict[str, torch.Tensor]:
    """Each word follows from the one before; one in five is a gap that the model fills."""
    draw = random.Random(seed)
    words = [draw.randrange(WORDS)]
    while len(words) < draw.randint(6, LENGTH):
        words.append((words[-1] * 7 + 3) % WORDS)
    words = [word + 2 for word in words]
    gaps = [draw.random() < 0.2 for _ in words]
    padding = LENGTH - len(words)
    return {
        "input_ids": torch.tensor(
            [GAP if gap else word for word, gap in zip(words, gaps, strict=True)] + [PAD] * padding
        ),
        "attention_mask": torch.tensor([1] * len(words) + [0] * padding),
        "labels": torch.tensor([w if gap else -100 for w, gap in zip(words, gaps, strict=True)] + [-100] * padding),
    }


held_out = [sentence(seed) for seed in range(16)]
torch.manual_seed(0)
model = BertForMaskedLM(
    BertConfig(vocab_size=WORDS + 2, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64)
)
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            folder, max_steps=60, per_device_train_batch_size=16, learning_rate=3e-3,
            max_grad_norm=1.0, save_strategy="no", report_to="none", use_cpu=True, dataloader_pin_memory=False,
        ),
        train_dataset=[sentence(seed) for seed in range(100, 1060)],
        callbacks=[
            HuggingFaceCallback(
                out=OUT, reference={key: torch.stack([s[key] for s in held_out]) for key in held_out[0]}
            )
        ],
    )  # fmt: skip
    trainer.train()

print(f"largest raw gradient norm {sl.Run.open(OUT).metrics['grad_norm_total'].max():.2f}, clipped at 1.0")
print(f"next: stabilitylab diagnose {OUT}")
