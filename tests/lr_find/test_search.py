"""The search for a rate on made-up losses: which trials it asks for, and what it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from stabilitylab.errors import UsageError
from stabilitylab.lr_find import RateResult, RateTrial, Rungs, choose
from stabilitylab.lr_find.search import middle, valleys

RATES = (1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
FIRST, LAST = 2400, 6000


@dataclass
class Made:
    """A trainer whose losses are a function of the trial."""

    loss: Callable[[RateTrial], float]
    reads: Callable[[RateTrial], bool] = lambda trial: True
    asked: list[RateTrial] = field(default_factory=list)

    def run(self, trials: Sequence[RateTrial]) -> Mapping[RateTrial, RateResult]:
        self.asked += trials
        return {trial: RateResult(self.loss(trial), self.reads(trial)) for trial in trials}

    def rates(self, updates: int, seed: int = 100) -> list[float]:
        return sorted(trial.rate for trial in self.asked if trial.updates == updates and trial.seed == seed)


def rungs(**more: object) -> Rungs:
    settings = {"rates": RATES, "seeds": (100, 101), "first": FIRST, "last": LAST, "confirming": (102, 103, 104, 105)}
    return Rungs(**{**settings, **more})  # type: ignore[arg-type]


def bowl(best: float, depth: float = 1.0) -> Callable[[RateTrial], float]:
    return lambda trial: 2 + depth * math.log2(trial.rate / best) ** 2 - trial.updates / 1e4


def test_the_best_rate_inside_the_grid_is_found_in_two_rungs() -> None:
    made = Made(bowl(1.1e-3))
    choice = choose(rungs(), made)
    assert choice.rate == choice.lowest == 1e-3
    assert made.rates(FIRST) == sorted(RATES)
    assert made.rates(LAST) == [1e-3, middle(1e-3, 2e-3), 2e-3]
    assert [trial for trial in made.asked if trial.seed > 101] == [
        RateTrial(1e-3, s, FIRST) for s in (102, 103, 104, 105)
    ]
    assert len(made.asked) == len(set(made.asked)) == 12 + 6 + 4
    assert choice.notes == ()


@pytest.mark.parametrize(("best", "added"), [(3e-5, [6.25e-5, 3.125e-5, 1.5625e-5]), (1.5e-2, [8e-3, 1.6e-2, 3.2e-2])])
def test_an_edge_moves_the_grid(best: float, added: list[float]) -> None:
    made = Made(bowl(best))
    choice = choose(rungs(), made)
    assert made.rates(FIRST) == sorted([*RATES, *added])
    assert choice.rate in added
    assert sum("stood at the edge" in note for note in choice.notes) == 3


def test_an_edge_that_moves_away_ends_and_is_said() -> None:
    made = Made(lambda trial: trial.rate)
    choice = choose(rungs(), made)
    assert min(made.rates(FIRST)) == min(RATES) / 16
    assert choice.rate == min(RATES) / 16
    lowest = f"{min(RATES) / 16:g}"
    assert f"The grid was not extended beyond {lowest}, a factor of 16 from its first edge." in choice.notes
    assert "edge of the grid" in choice.notes[-1]


def test_two_valleys_are_refined_and_both_go_on() -> None:
    table = {1.25e-4: 4.0, 2.5e-4: 3.8, 5e-4: 3.232, 1e-3: 3.396, 2e-3: 3.218, 4e-3: 3.5}
    made = Made(lambda t: table.get(t.rate, 3.45) if t.updates == FIRST else 3.0 if t.rate < 1e-3 else 3.1)
    choice = choose(rungs(), made)
    assert valleys(table) == [5e-4, 2e-3]
    assert {middle(5e-4, 1e-3), middle(1e-3, 2e-3)} < {*made.rates(FIRST)}
    assert {5e-4, 2e-3} < {*made.rates(LAST)}
    assert choice.rate == 5e-4  # the last rung decides, and not the lower loss of the first
    assert any("2 valleys" in note for note in choice.notes)


def test_a_lower_loss_of_a_model_that_ignores_its_source_is_not_chosen() -> None:
    made = Made(bowl(2e-3), reads=lambda trial: trial.rate < 1e-3)
    choice = choose(rungs(), made)
    assert choice.lowest == 2e-3
    assert choice.rate == 5e-4
    assert 5e-4 in made.rates(LAST)
    assert any("goes on to the last rung" in note for note in choice.notes)


def test_one_seed_that_does_not_read_rejects_a_rate() -> None:
    """The next lower one of all rates that were tried is taken, which lies between two of the grid here; the seeds that
    read at its end are not run for fewer updates."""
    made = Made(bowl(1e-3), reads=lambda trial: not (trial.rate == 1e-3 and trial.seed == 104))
    choice = choose(rungs(), made)
    assert choice.rate == middle(5e-4, 1e-3)
    assert "At 0.001 seed 104 is not eligible." in choice.notes
    assert RateTrial(choice.rate, 104, FIRST) in made.asked
    assert RateTrial(choice.rate, 100, FIRST) not in made.asked


def test_two_rates_in_a_row_are_rejected() -> None:
    made = Made(bowl(1e-3), reads=lambda trial: trial.seed != 104 or trial.rate < 7e-4)
    choice = choose(rungs(), made)
    assert choice.rate == 5e-4
    assert RateTrial(5e-4, 104, FIRST) in made.asked


def test_a_ranking_that_moves_to_the_edge_of_the_last_rung_is_said() -> None:
    made = Made(lambda trial: bowl(1.1e-3 if trial.updates == FIRST else 3e-3)(trial))
    choice = choose(rungs(), made)
    assert choice.rate == 2e-3
    assert choice.notes == (
        "The rate 0.002 is the highest of the last rung but not the best of the first: a better one may lie beyond.",
    )


def test_no_rate_is_chosen_where_none_is_eligible() -> None:
    choice = choose(rungs(), Made(bowl(1e-3), reads=lambda trial: False))
    assert choice.rate is None
    assert choice.lowest == 1e-3
    assert "No rate is eligible with every seed." in choice.notes


def test_failed_trials_come_last() -> None:
    made = Made(lambda trial: math.nan if trial.rate > 5e-4 and trial.seed == 101 else bowl(2e-3)(trial))
    assert choose(rungs(), made).rate == 5e-4
    assert valleys({1e-3: math.inf, 2e-3: math.nan}) == []


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_failed_rate_between_two_minima_parts_them(lost: float) -> None:
    assert valleys({1e-3: 3.0, 2e-3: lost, 4e-3: 2.9}) == [1e-3, 4e-3]


def test_wrong_rules_are_refused() -> None:
    for wrong in ({"rates": (1e-3, 1e-3, 2e-3)}, {"seeds": ()}, {"confirming": (100,)}, {"first": 7000}):
        with pytest.raises(UsageError):
            rungs(**wrong)
