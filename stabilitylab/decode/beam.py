"""Beam search, many sentences at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..data.corpus import BOS, EOS, PAD
from ..errors import UsageError
from ..models import Transformer
from .cache import stepping

PenaltyKind = Literal["fairseq", "gnmt"]
NEVER = (PAD, BOS)  # tokens that no translation holds


@dataclass(frozen=True)
class Hypothesis:
    """A translation: its tokens without EOS, its log-probability (EOS included), and that over the length penalty."""

    tokens: tuple[int, ...]
    log_probability: float
    score: float


def length_penalty(length: int, exponent: float, kind: PenaltyKind = "fairseq") -> float:
    """What a log-probability is divided by; ``length`` counts EOS.

    fairseq: length^p. gnmt: ((5 + length) / 6)^p (Wu et al. 2016, Eq. 14).
    """
    if kind not in get_args(PenaltyKind):
        raise UsageError(f"unknown length penalty {kind!r}; choose fairseq or gnmt.")
    return length**exponent if kind == "fairseq" else ((5 + length) / 6) ** exponent


def translate(
    model: Transformer,
    source: Tensor,
    source_mask: Tensor,
    *,
    beam: int = 4,
    exponent: float = 0.6,
    penalty_kind: PenaltyKind = "fairseq",
    max_length: int | None = None,
) -> list[list[Hypothesis]]:
    """The best ended hypotheses of each sentence of ``source`` (B, S), at most ``beam`` of them, best first.

    A sentence is done when ``beam`` hypotheses have ended in EOS (fairseq's rule: with a beam of 1, the greedy search).
    At ``max_length`` tokens, EOS included (default: twice the sentence's own length plus 10), EOS is forced.
    """
    length_penalty(1, exponent, penalty_kind)
    if beam < 1 or (max_length is not None and max_length < 1):
        raise UsageError(f"beam = {beam} and max_length = {max_length} must be at least 1.")
    lengths = source_mask.sum(1).tolist()
    limits = [max_length or 2 * length + 10 for length in lengths]
    ended: list[list[Hypothesis]] = [[] for _ in limits]
    live = list(range(len(limits)))  # sentences still searched
    device = source.device
    with stepping(model, source, source_mask) as steps:
        steps.select(torch.arange(len(live), device=device).repeat_interleave(beam))
        tokens = torch.empty(len(live) * beam, 0, dtype=torch.long, device=device)  # (R, t)
        last = torch.full((len(live) * beam,), BOS, device=device)
        scores = torch.full((len(live), beam), -torch.inf, dtype=torch.float64, device=device)
        scores[:, 0] = 0  # the beams of a sentence begin equal: only one counts
        while live:
            place = tokens.shape[1] + 1
            found = _candidates(steps.next(last), scores, beam, [limits[sentence] <= place for sentence in live])
            rows, kept_scores, kept_tokens, still = [], [], [], []
            for index, (sentence, (values, parents, words)) in enumerate(zip(live, found, strict=True)):
                going = []
                for rank, (value, parent, word) in enumerate(zip(values, parents, words, strict=True)):
                    row = index * beam + parent
                    if value == -torch.inf or len(ended[sentence]) >= beam:
                        break
                    if word != EOS:
                        going.append((value, row, word))
                    elif rank < beam:  # as in fairseq: an end further down is not among the best
                        score = value / length_penalty(place, exponent, penalty_kind)
                        ended[sentence].append(Hypothesis(tuple(tokens[row].tolist()), value, score))
                if len(ended[sentence]) >= beam or not going:
                    continue
                going = going[:beam]
                going += [(-torch.inf, going[0][1], PAD)] * (beam - len(going))
                still.append(sentence)
                kept_scores.append([value for value, _, _ in going])
                rows += [row for _, row, _ in going]
                kept_tokens += [word for _, _, word in going]
            live = still
            if live:
                chosen = torch.tensor(rows, device=device)
                steps.select(chosen)
                last = torch.tensor(kept_tokens, device=device)
                tokens = torch.cat([tokens.index_select(0, chosen), last[:, None]], 1)
                scores = torch.tensor(kept_scores, dtype=torch.float64, device=device)
    return [sorted(each, key=lambda hypothesis: -hypothesis.score) for each in ended]


def _candidates(
    logits: Tensor, scores: Tensor, beam: int, last_place: list[bool]
) -> list[tuple[list[float], list[int], list[int]]]:
    """For each sentence the best 2 x beam continuations, best first: log-probabilities, beams they extend, words.

    Twice the beam, since at most every second of them ends. One host read a step.
    """
    sentences, vocabulary = len(scores), logits.shape[1]
    log_probabilities = torch.log_softmax(logits.double(), dim=1).view(sentences, -1, vocabulary)  # (B, K, V)
    log_probabilities[:, :, list(NEVER)] = -torch.inf
    closing = torch.tensor(last_place, device=logits.device)
    not_end = torch.arange(vocabulary, device=logits.device) != EOS
    log_probabilities.masked_fill_(closing[:, None, None] & not_end, -torch.inf)
    total = (scores[:, :, None] + log_probabilities).flatten(1)  # (B, K V)
    best, index = total.topk(min(2 * beam, total.shape[1]), dim=1)
    values, flat = best.tolist(), index.tolist()
    return [
        (value, [i // vocabulary for i in where], [i % vocabulary for i in where])
        for value, where in zip(values, flat, strict=True)
    ]
