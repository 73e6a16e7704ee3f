"""Masks that a batch brings along, by stack; and integrations without their package."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from rest_slow import rest_slow

from stabilitylab.integrations.masks import BatchMasks

SOURCE = torch.tensor([[1, 1, 0], [1, 0, 0]])
TARGET = torch.tensor([[1, 0], [1, 1]])
LABELS = torch.tensor([[5, 6], [7, -100]])


def read(stacks: list[str], **batch: torch.Tensor) -> dict[str, list[list[bool]]]:
    masks = BatchMasks(stacks)
    masks.read({"attention_mask": torch.ones(9, 9)})  # of the batch before
    masks.read(batch)
    return {stack: mask.tolist() for stack, mask in masks().items()}


def test_one_stack_and_a_pair_take_their_own() -> None:
    own = SOURCE.bool().tolist()
    assert read(["decoder"], attention_mask=SOURCE, labels=LABELS) == {"decoder": own}
    pair = ["model.encoder", "model.decoder"]
    given = read(pair, attention_mask=SOURCE, decoder_attention_mask=TARGET, labels=LABELS)
    assert given == {"model.encoder": own, "model.decoder": TARGET.bool().tolist()}
    labelled = read(pair, attention_mask=SOURCE, labels=LABELS)
    assert labelled == {"model.encoder": own, "model.decoder": [[True, True], [True, False]]}


def test_what_is_not_a_mask_of_tokens_is_none() -> None:
    assert read(["a"], attention_mask=torch.ones(2, 1, 3, 3)) == {}
    assert read(["a"], input_ids=SOURCE) == {}
    assert read(["text", "vision"], attention_mask=SOURCE) == {}
    masks = BatchMasks(["a"])
    masks.read({"attention_mask": SOURCE})
    masks.read((SOURCE, LABELS))
    assert masks() == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "absent", "says"),
    [
        ("integrations.transformers", "transformers", "pip install transformers"),
        *rest_slow(
            [
                ("integrations.transformers", "accelerate", "pip install accelerate"),
                ("integrations.lightning", "lightning.pytorch", "pip install lightning"),
                ("integrations.accelerate", "accelerate", "pip install accelerate"),
            ],
            [],
        ),
        ("trackers", "accelerate.tracking", "pip install 'stabilitylab[trackers]'"),
    ],
)
def test_a_missing_package_is_one_sentence(module: str, absent: str, says: str) -> None:
    program = f"""
import sys
sys.modules[{absent!r}] = None
from stabilitylab.errors import ResourceError
try:
    import stabilitylab.{module}
except ResourceError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert says in ended.stdout


def test_the_package_itself_needs_nothing() -> None:
    check = "import sys, stabilitylab.integrations; sys.exit('torch' in sys.modules or 'accelerate' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
