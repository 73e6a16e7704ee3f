"""Short trials: the search over rates, one trial against a loop of its own, what ends it, what is said of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from forecast_cases import CPU, candidate_of, config_of, dataset, model_of, own

from stabilitylab.forecast import measure, measuring, of_yours, trials
from stabilitylab.forecast.planning import MOST
from stabilitylab.forecast.trials import Trial, Trials, search, trial, trial_lines
from stabilitylab.train.recipe import token_losses


def test_the_search_finds_every_edge_and_asks_nothing_twice() -> None:
    low, high = -5, 8
    for edge in range(low - 1, high + 1):
        for start in range(low, high + 1):
            asked: list[int] = []

            def learns(k: int, asked: list[int] = asked, edge: int = edge) -> bool:
                asked.append(k)
                return k <= edge

            assert search(learns, start, low, high) == max(edge, low)
            assert all(low <= k <= high for k in asked)
            assert len({*asked}) == len(asked)
            if start == 0:
                more = next(n for n in (edge - 2, edge, edge + 2) if low - 1 <= n <= high)
                search(lambda k, asked=asked, more=more: bool(asked.append(k)) or k <= more, max(edge, low), low, high)
                assert len(asked) <= MOST


def test_the_edge_of_trials_lies_half_way() -> None:
    def told(*outcomes: tuple[float, str]) -> Trials:
        return Trials(40, tuple(Trial(rate, state, 0.0, 150) for rate, state in outcomes))  # type: ignore[arg-type]

    own = told((1e-3, "trained"), (4e-3, "diverged"), (2e-3, "learning"), (8e-3, "descending"))
    assert (own.low, own.high) == (2e-3, 4e-3)  # what learns above one that does not is no edge
    assert own.edge == pytest.approx(math.log10(2e-3 * math.sqrt(2)))
    every, none = told((1e-3, "trained"), (2e-3, "descending")), told((2e-3, "stuck"), (1e-3, "cannot tell"))
    assert (every.low, every.high, none.low, none.high) == (2e-3, math.inf, 0.0, 1e-3)
    assert every.edge == pytest.approx(math.log10(2e-3 * math.sqrt(2)))
    assert none.edge == pytest.approx(math.log10(1e-3 / math.sqrt(2)))
    assert [one.sentence for one in (own, every, none)] == [
        "its trials learn up to a rate of 0.002 and not at 0.004",
        "its trials learn up to a rate of 0.002, the highest that was tried",
        "its trials learn at no rate, the lowest being 0.001",
    ]
    assert [*trial_lines({40: own, 0: none}, "training")] == [
        "trials of 150 updates with a warm-up of 40, by the training loss: learn at 0.001, 0.002, 0.008, "
        "not at 0.004 (diverged, +0.00)",
        "trials of 150 updates with no warm-up, by the training loss: learn at none of 2 rates, "
        "not at 0.001 (cannot tell, +0.00), 0.002 (stuck, +0.00)",
    ]


@pytest.mark.parametrize("warmup", [0, 8])
def test_a_trial_is_the_first_updates_at_a_constant_rate(warmup: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "UPDATES", 40)
    config = config_of("preln")
    model, train = model_of(config), config.train
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=(train.beta1, train.beta2), eps=train.eps, weight_decay=train.weight_decay
    )
    for t in range(40):
        batch = dataset().micro_batch(t).to(CPU)
        optimizer.param_groups[0]["lr"] = 1e-3 * (min(1.0, (t + 1) / warmup) if warmup else 1.0)
        optimizer.zero_grad()
        (
            token_losses(model(**batch.inputs), batch.labels, batch.weight, train.label_smoothing)[0] / batch.tokens
        ).backward()
        optimizer.step()
    held_out = dataset().held_out
    real = held_out.weight > 0
    model.eval()
    with torch.no_grad():
        last = float(F.cross_entropy(model(**held_out.inputs)[real], held_out.labels[real]))
    found = trial(candidate_of("preln"), 1e-3, warmup)
    assert found.gap == pytest.approx(last - dataset().unigram.cross_entropy, abs=1e-4)
    assert (found.rate, found.updates, found.state) == (1e-3, 40, "descending")


def test_a_trial_ends_early_where_its_end_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = trial(candidate_of("rezero"), 1e8, 0)
    assert broken.state == "diverged"
    assert not broken.learns
    assert broken.updates < trials.UPDATES
    easy = trial(replace(candidate_of("preln"), baseline=9.0), 1e-3, 0)  # any model stands below it
    assert (easy.state, easy.updates) == ("trained", trials.EVERY)
    monkeypatch.setattr(trials, "UPDATES", 60)
    still = trial(candidate_of("preln"), 1e-12, 0)  # does not move, above the baseline
    assert (still.state, still.learns, still.updates) == ("stuck", False, 60)


def test_trials_are_made_with_the_warm_up_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, int]] = []

    def made(candidate: object, rate: float, warmup: int) -> Trial:
        asked.append((rate, warmup))
        return Trial(rate, "trained" if rate < (0.003 if warmup else 0.0015) else "stuck", 0.0, 150)

    monkeypatch.setattr(trials, "trial", made)
    found = trials.trials(candidate_of("preln"), (40, 0))
    assert asked == [(1e-3, 40), (2e-3, 40), (8e-3, 40), (4e-3, 40), (2e-3, 0), (1e-3, 0)]  # goes on where it was
    assert {warmup: (own.low, own.high) for warmup, own in found.items()} == {40: (2e-3, 4e-3), 0: (1e-3, 2e-3)}
    with pytest.raises(ValueError, match="baseline"):
        trials.trials(replace(candidate_of("preln"), baseline=None), (40, 0))


def test_without_a_baseline_there_are_no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = replace(of_yours("mine:own", own()), baseline=None)
    found = measure(candidate)
    assert found.evidence[0] == measuring.NO_BASELINE
    assert found.trials == {}
    assert "trial" not in found.numbers
