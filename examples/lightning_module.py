"""A LightningModule with one callback: T5 with random weights learns to reverse made-up words.

python examples/lightning_module.py [RUN]        (needs: pip install stabilitylab transformers lightning)
"""

import argparse
import random
import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

import stabilitylab as sl
from stabilitylab.integrations.lightning import LightningCallback

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("run", nargs="?", default="runs/lightning", help="folder of the run (default: %(default)s)")
OUT = arguments.parse_args().run
PAD, END, LONGEST = 0, 1, 8


def word(seed: int) -> dict[str, torch.Tensor]:
    draw = random.Random(seed)
    letters = [draw.randrange(2, 28) for _ in range(draw.randint(3, LONGEST - 1))]
    source, target = [*letters, END], [*reversed(letters), END]
    padding = LONGEST - len(source)
    return {
        "input_ids": torch.tensor(source + [PAD] * padding),
        "attention_mask": torch.tensor([1] * len(source) + [0] * padding),
        "labels": torch.tensor(target + [-100] * padding),
    }


class Reverser(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = T5Config(
            vocab_size=28, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
        self.model = T5ForConditionalGeneration(config)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


seed_everything(0)
module = Reverser()
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        max_steps=40, accumulate_grad_batches=2, gradient_clip_val=1.0, accelerator="cpu", default_root_dir=folder,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[LightningCallback(out=OUT)],
    )  # fmt: skip
    trainer.fit(module, DataLoader([word(seed) for seed in range(640)], batch_size=8))

run = sl.Run.open(OUT)
norms = run.frame("grad_norm", by="layer").query("step == 0 and layer > 0")
print(norms[["stack_name", "layer", "value"]].to_string(index=False))
print(f"next: stabilitylab diagnose {OUT}")
