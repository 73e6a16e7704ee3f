"""The callbacks under torchrun: two processes record what one records of the same global batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stabilitylab as sl

pytestmark = pytest.mark.slow


def hugging_face(out: Path, ranks: int) -> None:
    from subjects import batch, model
    from test_hf_trainer import train

    from stabilitylab.integrations.transformers import StabilityCallback

    shares: dict[str, Any] = {"per_device_train_batch_size": 4 // ranks, "gradient_accumulation_steps": 1}
    if ranks > 1:
        shares["ddp_backend"] = "gloo"
    callback = StabilityCallback(out, every=1, reference=batch([20, 21]))
    train(model(), out.parent / f"of-{ranks}", callback, max_steps=3, save_strategy="steps", save_steps=2, **shares)
    callback = StabilityCallback(out, every=1, reference=batch([20, 21]))
    checkpoint = str(out.parent / f"of-{ranks}" / "checkpoints" / "checkpoint-2")
    train(model(seed=9), out.parent / f"of-{ranks}", callback, max_steps=3, resume=checkpoint, **shares)


def accelerated(out: Path, ranks: int) -> None:
    from accelerate import Accelerator
    from subjects import LR, batch, model

    from stabilitylab.integrations.accelerate import watch

    accelerator, subject = Accelerator(cpu=True), model()
    prepared, optimizer = accelerator.prepare(subject, torch.optim.SGD(subject.parameters(), lr=LR))
    with watch(prepared, optimizer, out=out, every=1, reference=batch([20, 21])):
        for step in range(3):
            whole: Any = batch(range(4 * step, 4 * step + 4))
            own = slice(accelerator.process_index * 4 // ranks, (accelerator.process_index + 1) * 4 // ranks)
            loss = prepared(**{key: value[own] for key, value in whole.items()}).loss
            tokens = [(part[:, 1:] != -100).sum() for part in (whole["labels"][own], whole["labels"])]
            accelerator.backward(loss * tokens[0] * ranks / tokens[1])  # the mean over ranks is that over all tokens
            accelerator.clip_grad_norm_(prepared.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()


CASES = {"hugging_face": hugging_face, "accelerated": accelerated}


def launch(case: str, out: Path, ranks: int) -> None:
    here, tests, root, *_ = Path(__file__).resolve().parents
    path = os.pathsep.join(map(str, (root, tests, here)))
    command = [sys.executable, __file__, case, str(out), str(ranks)]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"PYTHONPATH": path, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("case", CASES)
def test_two_processes_record_what_one_does(case: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for ranks in (1, 2):
        launch(case, tmp_path / f"run-{ranks}", ranks)
    one, two = sl.Run.open(tmp_path / "run-1"), sl.Run.open(tmp_path / "run-2")
    assert one.status.state == two.status.state == "finished"
    assert list(one.metrics["step"]) == list(two.metrics["step"]) == [0, 1, 2, 3]
    assert set(one.tables) == set(two.tables)
    for table in ("metrics", *one.tables):
        expected, found = one.frame(table), two.frame(table)
        for column in expected.select_dtypes("float"):
            np.testing.assert_allclose(
                found[column], expected[column], rtol=2e-5, atol=1e-9, err_msg=f"{table}.{column}"
            )


if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
