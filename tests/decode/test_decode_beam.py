"""Beam search against greedy search, exhaustive search and itself one sentence at a time."""

from __future__ import annotations

import itertools

import pytest
import torch

from stabilitylab.data.corpus import BOS, EOS, MASK, PAD
from stabilitylab.decode import translate
from stabilitylab.decode.beam import best_of
from stabilitylab.errors import InputError, UsageError
from stabilitylab.models import ARCHS

TINY = 7  # ids: EOS, UNK and two words beside PAD, BOS and MASK, which are never generated
WORDS = (3, 5, 6)


def penalised(log_p: float, length: int, penalty: float, kind: str) -> float:
    return log_p / {"fairseq": length, "gnmt": (5 + length) / 6}[kind] ** penalty


@torch.no_grad()
def log_p_of(model, source, ids) -> float:
    """log p of ``ids`` after BOS, by one pass of the whole model."""
    logits = model(source=source[None], target=torch.tensor([[BOS, *ids[:-1]]]))[0]
    return float(logits.log_softmax(-1)[range(len(ids)), ids].sum())


@torch.no_grad()
def greedy(model, source, max_length) -> list[int]:
    ids = []
    while EOS not in ids:
        logits = model(source=source[None], target=torch.tensor([[BOS, *ids]]))[0, -1]
        logits[[PAD, BOS, MASK]] = -torch.inf
        ids.append(int(logits.argmax()) if len(ids) < max_length - 1 else EOS)
    return ids


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_beam_1_is_greedy_search(arch, translator, sources) -> None:
    source, mask = sources
    model = translator(arch)
    found = translate(model, source, mask, beam=1, max_length=12)
    expected = [greedy(model, row[real], 12) for row, real in zip(source, mask, strict=True)]
    assert [hypothesis.ids for hypothesis in found] == expected
    assert len({tuple(ids) for ids in expected}) > 1


@pytest.mark.parametrize("kind", ["fairseq", "gnmt"])
@pytest.mark.parametrize("penalty", [-0.5, 0.0, 0.6, 2.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_beam_that_holds_everything_is_exhaustive_search(seed, penalty, kind, translator, sources) -> None:
    source, mask = sources
    model = translator(vocab=TINY, seed=seed)
    longest = 4
    strings = [[*words, EOS] for n in range(longest) for words in itertools.product(WORDS, repeat=n)]
    found = translate(
        model, source, mask, beam=4**longest, length_penalty=penalty, penalty_kind=kind, max_length=longest
    )
    for row, real, hypothesis in zip(source, mask, found, strict=True):
        scores = [penalised(log_p_of(model, row[real], ids), len(ids), penalty, kind) for ids in strings]
        best = max(range(len(strings)), key=lambda i: scores[i])
        assert hypothesis.ids == strings[best]
        assert hypothesis.score == pytest.approx(scores[best], rel=1e-10)


def test_penalties_decide() -> None:
    """The test above would mean little if one string won under every penalty."""


@pytest.mark.parametrize("kind", ["fairseq", "gnmt"])
def test_scores_are_those_of_the_whole_model(kind, translator, sources) -> None:
    source, mask = sources
    model = translator("branchnorm")
    for row, real, hypothesis in zip(source, mask, translate(model, source, mask, penalty_kind=kind), strict=True):
        assert hypothesis.ids[-1] == EOS
        assert not {PAD, BOS, MASK, EOS} & set(hypothesis.ids[:-1])
        log_p = log_p_of(model, row[real], hypothesis.ids)
        assert hypothesis.log_p == pytest.approx(log_p, rel=1e-10)
        assert hypothesis.score == pytest.approx(penalised(log_p, len(hypothesis.ids), 0.6, kind), rel=1e-10)
