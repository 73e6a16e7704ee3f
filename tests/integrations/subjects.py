"""A tiny causal model of Hugging Face with random weights, padded batches, and its gradients by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
transformers.logging.set_verbosity_error()

VOCAB, TOKENS, LR = 23, 7, 0.05


def model(seed: int = 3, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=TOKENS, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).to(dtype)


def sentence(number: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    ids = torch.randint(3, VOCAB, (TOKENS,), generator=draw)
    mask = (torch.arange(TOKENS) < 3 + number % (TOKENS - 2)).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    return [sentence(number) for number in range(count)]


def batch(numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    taken = [sentence(number) for number in numbers]
    return {key: torch.stack([one[key] for one in taken]) for key in taken[0]}


def token_loss(subject: nn.Module, numbers: Sequence[int]) -> tuple[torch.Tensor, int]:
    """The summed cross-entropy of the next tokens that are real, and the number by which the Trainer divides it (of all
    labels, the first of a sentence included, which nothing predicts): the definition, not the model's."""
    content: Any = batch(numbers)
    logits = subject(input_ids=content["input_ids"], attention_mask=content["attention_mask"]).logits[:, :-1]
    labels = content["labels"][:, 1:]
    real = labels != -100
    chosen = torch.log_softmax(logits[real], dim=-1).gather(-1, labels[real][:, None])
    return -chosen.sum(), int((content["labels"] != -100).sum())


def norm(gradients: Sequence[torch.Tensor]) -> float:
    return float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt())
