"""Beam search against greedy search, exhaustive search and itself one sentence at a time."""

from __future__ import annotations

import itertools

import pytest
import torch
from rest_slow import SOME_ARCHS, rest_slow

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


@pytest.mark.parametrize("arch", rest_slow(sorted(ARCHS), SOME_ARCHS | {"mhc"}))
def test_beam_1_is_greedy_search(arch, translator, sources) -> None:
    source, mask = sources
    model = translator(arch, seed={"resi-dual": 1}.get(arch, 0))  # one whose translations differ
    found = translate(model, source, mask, beam=1, max_length=12)
    expected = [greedy(model, row[real], 12) for row, real in zip(source, mask, strict=True)]
    assert [hypothesis.ids for hypothesis in found] == expected
    assert len({tuple(ids) for ids in expected}) > 1


@pytest.mark.parametrize("kind", rest_slow(["fairseq", "gnmt"], ["fairseq"]))
@pytest.mark.parametrize("penalty", rest_slow([-0.5, 0.0, 0.6, 2.0], [0.6]))
@pytest.mark.parametrize("seed", rest_slow([1, 2], [1]))
def test_a_beam_that_holds_everything_is_exhaustive_search(seed, penalty, kind, translator, shifted, sources) -> None:
    source, mask = sources
    model = shifted(translator(vocab=TINY, seed=seed), EOS, -2)
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


def test_the_length_penalty_decides(translator, shifted, sources) -> None:
    """What the test above compares differs with the exponent and with the kind."""
    model = shifted(translator(vocab=TINY, seed=2), EOS, -2)
    found = {
        (kind, penalty): tuple(
            len(hypothesis.ids)
            for hypothesis in translate(
                model, *sources, beam=256, penalty_kind=kind, length_penalty=penalty, max_length=4
            )
        )
        for kind in ("fairseq", "gnmt")
        for penalty in (0.0, 0.6, 2.0)
    }
    assert found["fairseq", 0.0] == found["gnmt", 0.0]
    assert len(set(found.values())) == 5
    assert sum(found["fairseq", 0.0]) < sum(found["fairseq", 0.6]) < sum(found["fairseq", 2.0])


@pytest.mark.parametrize("asked", [None, 40])
def test_learned_positions_limit_the_length(asked, translator, shifted, sources) -> None:
    model = shifted(translator(positions="learned", context=12), EOS, -100)
    found = translate(model, *sources, max_length=asked)
    assert [len(hypothesis.ids) for hypothesis in found] == [12] * 6
    assert all(hypothesis.ids.index(EOS) == 11 for hypothesis in found)


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


@torch.no_grad()
def plain_beam_search(model, source, beam, penalty, kind, max_length, stop_early) -> tuple[list[int], int]:
    """The rules with lists, one sentence, the whole model at every step; and after how many ids it stopped.

    Without ``stop_early`` it never stops before ``max_length``.
    """
    live, ended = [(0.0, [])], []
    for length in range(1, max_length + 1):
        candidates = []
        for log_p, ids in live:
            row = model(source=source[None], target=torch.tensor([[BOS, *ids]]))[0, -1].log_softmax(-1).tolist()
            words = [EOS] if length == max_length else [i for i in range(len(row)) if i not in (PAD, BOS, MASK)]
            candidates += [(log_p + row[word], [*ids, word]) for word in words]
        candidates = sorted(candidates, key=lambda candidate: -candidate[0])[: 2 * beam]
        ended += [(penalised(log_p, length, penalty, kind), ids) for log_p, ids in candidates[:beam] if ids[-1] == EOS]
        live = [candidate for candidate in candidates if candidate[1][-1] != EOS][:beam]
        if stop_early and len(ended) >= beam:
            break
    return max(ended, key=lambda each: each[0])[1], length


@pytest.mark.parametrize("stop_early", [True, False])
@pytest.mark.parametrize(("kind", "penalty"), [("fairseq", 0.6), ("gnmt", 1.0), ("fairseq", -0.7)])
@pytest.mark.parametrize("beam", rest_slow([2, 3, 5], [2]))
def test_it_finds_what_the_rules_say(beam, kind, penalty, stop_early, translator, sources) -> None:
    """Which also shows that the bound, where it ends a search, changes nothing."""
    source, mask = sources
    model = translator("preln", sharp=4.0)
    found = translate(
        model,
        source,
        mask,
        beam=beam,
        length_penalty=penalty,
        penalty_kind=kind,
        max_length=9,
        stop_early=stop_early,
    )
    expected = [
        plain_beam_search(model, row[real], beam, penalty, kind, 9, stop_early)[0]
        for row, real in zip(source, mask, strict=True)
    ]
    assert [hypothesis.ids for hypothesis in found] == expected


def test_the_bound_ends_a_search_before_the_longest_hypothesis(translator, shifted, sources) -> None:
    """After an end of probability nearly 1 nothing open can catch up, and the decoder is not asked again."""
    model = shifted(translator(), EOS, 60)
    steps = []
    model.decoder.layers[0].ffn.register_forward_hook(lambda *_: steps.append(1))
    found = translate(model, *sources, beam=3, max_length=50, stop_early=False)
    assert [hypothesis.ids for hypothesis in found] == [[EOS]] * 6
    assert len(steps) == 1


@pytest.mark.parametrize("arch", rest_slow(sorted(ARCHS), {"dlcl"}))
def test_a_batch_is_its_sentences_one_by_one(arch, translator, sources) -> None:
    source, mask = sources
    model = translator(arch, sharp=4.0, seed={"tfixup": 1}.get(arch, 0))  # one whose translations differ in length
    together = translate(model, source, mask)
    longer = translate(model, torch.nn.functional.pad(source, (0, 4), value=7), torch.nn.functional.pad(mask, (0, 4)))
    assert len({len(hypothesis.ids) for hypothesis in together}) > 1  # they do not end together
    for row, real, one, padded in zip(source, mask, together, longer, strict=True):
        (alone,) = translate(model, row[real][None])
        assert one.ids == alone.ids == padded.ids
        assert one.score == pytest.approx(alone.score, rel=1e-9)
        assert padded.score == pytest.approx(alone.score, rel=1e-9)


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("max_length", [1, 2, 5])
def test_the_longest_hypothesis_is_ended_and_its_end_is_scored(max_length, beam, translator, shifted, sources) -> None:
    source, mask = sources
    model = shifted(translator(), EOS, -60)
    for row, real, found in zip(
        source, mask, translate(model, source, mask, beam=beam, max_length=max_length), strict=True
    ):
        assert len(found.ids) == max_length
        assert found.ids.index(EOS) == max_length - 1
        assert found.log_p == pytest.approx(log_p_of(model, row[real], found.ids), rel=1e-10)


def test_the_default_length_follows_each_source(translator, shifted, sources) -> None:
    source, mask = sources
    lengths = [len(hypothesis.ids) for hypothesis in translate(shifted(translator(), EOS, -60), source, mask)]
    assert lengths == (mask.sum(dim=1) + 50).tolist()


def test_equal_scores_are_broken_by_the_smaller_id_and_the_earlier_hypothesis(translator, sources) -> None:
    model = translator()
    torch.nn.init.zeros_(model.output.weight)  # every continuation is as likely as every other
    uniform = -torch.tensor(23.0, dtype=torch.float64).log().item()
    for hypothesis in translate(model, *sources, beam=3, length_penalty=0.0):
        assert hypothesis.ids == [EOS]
        assert hypothesis.log_p == pytest.approx(uniform)
    # with an exponent of 1 all lengths are worth the same, and the first to end stays the best
    assert {tuple(h.ids) for h in translate(model, *sources, length_penalty=1.0)} == {(EOS,)}
    # with 2, longer is better, and ids of equal worth are the smallest ones: UNK
    longest = translate(model, *sources, beam=3, length_penalty=2.0, max_length=4, stop_early=False)
    assert {tuple(h.ids) for h in longest} == {(3, 3, 3, EOS)}


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_best_of_is_a_stable_sort(count) -> None:
    values = torch.randint(0, 4, (50, 9), generator=torch.Generator().manual_seed(0)).double()
    values[values == 0] = -torch.inf
    best, place = best_of(values.clone(), count)
    expected, order = values.sort(dim=1, descending=True, stable=True)
    assert torch.equal(best, expected[:, :count])
    real = best.isfinite()  # what is not there has no order
    assert torch.equal(place[real], order[:, :count][real])
    assert torch.equal(values.gather(1, place), best)


def test_dropout_is_off_and_the_mode_comes_back(translator, sources) -> None:
    plain, dropping = translator(), translator(dropout=0.5, attention_dropout=0.5)
    expected = translate(plain, *sources)
    assert translate(dropping.train(), *sources) == expected
    assert dropping.training
    assert dropping.decoder.layers[0].self_attn.f.training
    translate(dropping.eval(), *sources)
    assert not dropping.training


@pytest.mark.slow
def test_translating_in_single_precision_finds_nearly_the_same(translator, sources) -> None:
    model = translator(sharp=4.0)
    expected = translate(model, *sources)
    for one, two in zip(translate(model.float(), *sources), expected, strict=True):
        assert one.score == pytest.approx(two.score, rel=1e-3)


def test_an_empty_batch_has_no_translations(translator) -> None:
    nothing = torch.ones(0, 4, dtype=torch.int64)
    assert translate(translator(), nothing, nothing.bool()) == []


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_model_that_is_not_finite_is_refused(value, translator, sources) -> None:
    model = translator()
    with torch.no_grad():
        model.output.weight[9] = value
    with pytest.raises(InputError, match="not finite"):
        translate(model, *sources)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"beam": 0}, "beam = 0"), ({"penalty_kind": "wu"}, "fairseq, gnmt"), ({"max_length": 0}, "max_length = 0")],
)
def test_wrong_arguments_are_refused(wrong, words, translator, sources) -> None:
    with pytest.raises(UsageError, match=words):
        translate(translator(), *sources, **wrong)
