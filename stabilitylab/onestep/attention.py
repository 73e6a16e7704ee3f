"""The test of DeepNet's Lemma 4.1 at initialisation: attention preserves the magnitude of its input tokens."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ..models.initialisation import named_normal
from ..schema import Row
from .initial_model import Filled, filled

LENGTHS = (4, 16, 64, 256)
TOKENS = 1024  # number of tokens in all sequences of one length together
DEFINITION = """A x = softmax(x W_q (x W_k)^T / sqrt(d)) x over n independent tokens LN(N(0, 1)), with one head of full
width and Xavier-normal W_q, W_k; ratio: mean ||A x|| / ||x||; bound: the largest ||A x|| of a sequence over its largest
||x||, largest over sequences (at most 1, since A averages). 1024 tokens for each n, from train.seed. DeepNet, Lemma
4.1."""


def lemma41(width: int, seed: int) -> Filled:
    """Return the table of ratios and bounds by sequence length; it depends only on the width of the model and the
    seed."""
    ratio, bound = zip(*(_magnitudes(n, width, seed) for n in LENGTHS), strict=True)
    return filled(
        "lemma41",
        [Row(f"n={n}") for n in LENGTHS],
        {"ratio": ratio, "bound": bound},
        unit="ratio of L2 norms",
        definition=DEFINITION,
        phase="step",
        log=False,
    )


def _magnitudes(n: int, width: int, seed: int) -> tuple[float, float]:
    def draw(role: str, *shape: int) -> torch.Tensor:
        return named_normal(seed, f"lemma41.{role}", torch.Size(shape)).double()

    x = F.layer_norm(draw(f"x.{n}", TOKENS // n, n, width), (width,))  # (S, n, D)
    q, k = (x @ draw(matrix, width, width) / math.sqrt(width) for matrix in "qk")  # Xavier: std sqrt(2 / 2d)
    mixed = (q @ k.mT / math.sqrt(width)).softmax(dim=-1) @ x
    before, after = x.norm(dim=-1), mixed.norm(dim=-1)  # (S, n)
    return (after / before).mean().item(), (after.amax(dim=1) / before.amax(dim=1)).max().item()
