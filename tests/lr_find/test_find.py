"""``sl.lr_find`` from its arguments to its answer and its folder: budgets, stops, resumes, and the sentences."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import INPUTS, Quadratic, class_loss, clusters, ones, perceptron, quadratic_loss
from torch import nn

import stabilitylab as sl
from stabilitylab.errors import InputError, UsageError
from stabilitylab.lr_find.folder import ANSWER, TRIALS
from stabilitylab.lr_find.result import Bracket, RateAnswer
from stabilitylab.lr_find.scale import ScaledRates, exponent
from stabilitylab.lr_find.subject import BatchStore
from stabilitylab.lr_find.trials import Silence
from stabilitylab.store import load_runs


class Heard(Silence):
    """Keeps the sentences, and sends this process a signal after so many updates."""

    def __init__(self, stop_at: int = 10**9) -> None:
        self.sentences: list[str] = []
        self.updates, self.stop_at = 0, stop_at

    def said(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def moved(self, trial, update: int, loss: float) -> None:
        self.updates += 1
        if self.updates == self.stop_at:
            os.kill(os.getpid(), signal.SIGINT)


def descent(out: Path, **more) -> RateAnswer:
    model = Quadratic()
    found = sl.lr_find(
        model, ones(2), quadratic_loss, torch.optim.SGD(model.parameters(), 0.1), held_out=ones(2), out=out,
        **{"horizon": 60, "warmup": 0, "seeds": (0, 1), **more},
    )  # fmt: skip
    assert isinstance(found, RateAnswer)
    return found


def perceptrons(out: Path, **more) -> RateAnswer:
    model = perceptron(dropout=0.0)
    found = sl.lr_find(
        model, clusters(10), class_loss, torch.optim.AdamW(model.parameters(), 1e-2), held_out=clusters(3, seed=4),
        out=out, **{"horizon": 40, "seeds": (0, 1), **more},
    )  # fmt: skip
    assert isinstance(found, RateAnswer)
    return found


def test_what_a_model_draws_when_it_is_evaluated_is_the_same_for_all_rates(tmp_path: Path) -> None:
    """A diffusion model draws its noise there, too: differences of losses are then those of the weights alone."""

    def noisy(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return quadratic_loss(model, batch) + torch.rand((), dtype=torch.float64)

    model = Quadratic()
    found = sl.lr_find(
        model, ones(2), noisy, torch.optim.SGD(model.parameters(), 0.1), held_out=ones(2), out=tmp_path / "out",
        horizon=40, warmup=0, seeds=(0,),
    )  # fmt: skip
    h = np.array([4.0, 1.0, 0.25])
    noise = [
        loss - 0.5 * float(h @ (1 - rate * h) ** (2 * rung))
        for rung, losses in found.losses.items()
        for rate, loss in losses.items()
        if math.isfinite(loss)
    ]
    assert len(noise) > 4
    assert noise == pytest.approx([noise[0]] * len(noise), abs=1e-9)


@pytest.mark.slow
def test_the_losses_and_the_stable_rates_of_gradient_descent(tmp_path: Path) -> None:
    found = descent(tmp_path / "out", horizon=300, seeds=(0,))
    h = np.array([4.0, 1.0, 0.25])
    for rung, losses in found.losses.items():
        for rate, loss in losses.items():
            own = 0.5 * float(h @ (1 - rate * h) ** (2 * rung))
            if rate < 0.5:  # 2 / 4
                assert loss == pytest.approx(own, abs=1e-9)
            else:
                assert math.isinf(loss)
    assert found.safe is not None
    assert found.safe.value == 0.4
    assert found.safe.high == 0.8
    assert found.best is not None
    assert found.best.value == 0.4  # the slowest direction decides after 300 updates: (1 - .4 / 4)^600


def test_every_trial_is_a_run_and_the_answer_is_json(tmp_path: Path) -> None:
    found = perceptrons(tmp_path / "out")
    runs = load_runs(tmp_path / "out")
    assert {run.config["lr"] for run in runs} >= set(found.losses[40])
    assert all(run.kind == "watched" for run in runs)
    assert all(run.status.state in ("finished", "diverged") for run in runs)
    written = json.loads((tmp_path / "out" / ANSWER).read_text())
    assert found.best is not None
    assert written["best"]["value"] == found.best.value
    assert not list((tmp_path / "out").glob("*/checkpoints/*.pt"))
    assert found.cost == sum(int(run.metrics["loss"].notna().sum()) for run in runs)


@pytest.mark.slow
def test_a_signal_keeps_what_is_known_and_resume_goes_on_to_the_same_answer(tmp_path: Path) -> None:
    whole = perceptrons(tmp_path / "whole")
    first_rung = 40 * len(whole.losses[40])
    cut = perceptrons(tmp_path / "cut", audience=Heard(stop_at=first_rung + 17))
    assert cut.signal == signal.SIGINT
    assert "SIGINT stopped the search" in cut.stopped
    assert (cut.updates, cut.seeds, whole.seeds) == (40, 1, 2)
    assert cut.best is not None
    assert cut.cost == first_rung + 17
    rest = perceptrons(tmp_path / "cut", resume=True)
    drop = ("seconds", "out")
    assert {k: v for k, v in rest.as_dict().items() if k not in drop} == {
        k: v for k, v in whole.as_dict().items() if k not in drop
    }


@pytest.mark.slow
def test_a_torn_line_of_a_killed_search_is_left_out(tmp_path: Path) -> None:
    whole = perceptrons(tmp_path / "out")
    path = tmp_path / "out" / TRIALS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    again = perceptrons(tmp_path / "out", resume=True)
    assert again.losses == whole.losses
    assert len(path.read_text().splitlines()) == len(lines)
    path.write_text("nonsense\n" + "".join(lines))
    with pytest.raises(InputError, match="line 1"):
        perceptrons(tmp_path / "out", resume=True)


def test_a_folder_that_holds_something_is_not_overwritten(tmp_path: Path) -> None:
    perceptrons(tmp_path / "out", updates=100)
    with pytest.raises(UsageError, match="holds a search: go on with --resume"):
        perceptrons(tmp_path / "out")
    with pytest.raises(UsageError, match="has horizon = 40, not 50"):
        perceptrons(tmp_path / "out", horizon=50, resume=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds no search"):
        perceptrons(tmp_path / "other")


def test_what_the_budget_is_for_is_said_beforehand(tmp_path: Path) -> None:
    heard = Heard()
    found = perceptrons(tmp_path / "out", updates=300, audience=heard)
    assert "About" in heard.sentences[0]
    assert "The budget (300 updates) is smaller" in heard.sentences[0]
    assert found.cost <= 300
    assert found.stopped.startswith("The budget (300 updates) ended the search")


def test_a_deadline_ends_the_search(tmp_path: Path) -> None:
    found = perceptrons(tmp_path / "out", horizon=10_000, minutes=0.002)
    assert found.stopped
    assert found.updates < 10_000


@pytest.mark.slow
def test_one_batch_and_no_held_out_data_are_said(tmp_path: Path) -> None:
    heard, model = Heard(), perceptron()
    found = sl.lr_find(
        model, clusters(1), class_loss, torch.optim.AdamW, horizon=30, updates=400, out=tmp_path, audience=heard
    )
    assert "There is one batch" in heard.sentences[0]
    assert "smoothed training loss" in str(found)


def test_a_loss_function_that_forgets_its_model_is_told(tmp_path: Path) -> None:
    model, other = perceptron(dropout=0.0).eval(), perceptron(dropout=0.0, seed=1)
    with pytest.raises(UsageError, match="the loss has no gradient"):
        sl.lr_find(model, clusters(4), lambda m, b: class_loss(other, b).detach(), horizon=30, out=tmp_path / "a")
    found = sl.lr_find(
        model,
        clusters(4),
        lambda m, b: class_loss(other.eval(), b),
        held_out=clusters(2),
        horizon=30,
        out=tmp_path / "b",
    )
    assert isinstance(found, RateAnswer)
    assert found.outcome == "constant"
    assert "check that loss_fn calls the model" in str(found)


def test_a_loader_and_a_function_leave_the_random_states_alone(tmp_path: Path) -> None:
    def stream():
        while True:
            labels = torch.randint(0, 6, (16,))
            yield torch.randn(16, INPUTS) + labels[:, None], labels

    torch.manual_seed(8)
    before = torch.get_rng_state()
    found = sl.lr_find(
        lambda: nn.Sequential(nn.Linear(INPUTS, 6), nn.Dropout(0.2)), stream(), class_loss,
        lambda model: torch.optim.SGD(model.parameters(), 0.1), horizon=25, seeds=(0,), updates=300, out=tmp_path,
    )  # fmt: skip
    assert torch.equal(before, torch.get_rng_state())
    assert isinstance(found, RateAnswer)
    assert found.outcome == "found"


def test_the_trial_that_reads_a_stream_draws_as_the_others_do() -> None:
    def stream():
        for _ in range(10):
            yield torch.randn(3)

    store = BatchStore(stream(), 10, (0,))
    torch.manual_seed(1)
    drawn = [float(torch.rand(())) for t in range(4) if store(t, 0) is not None]
    kept = [store(t, 0) for t in range(4)]
    torch.manual_seed(1)
    assert drawn == [float(torch.rand(())) for _ in range(4)]
    assert len({float(one.sum()) for one in kept}) == 4


@pytest.mark.slow
def test_widths_give_the_exponent_of_the_best_rate(tmp_path: Path) -> None:
    class Wide(nn.Module):
        """A quadratic whose curvature grows with the width, so that the best rate falls as 1 / width."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.x, self.width = nn.Parameter(torch.ones(1, dtype=torch.float64)), width

        def forward(self, one: torch.Tensor) -> torch.Tensor:
            return 0.5 * one * (0.05 * self.width * self.x**2).sum()

    found = sl.lr_find(
        lambda scale: Wide(scale), ones(2), quadratic_loss, lambda p: torch.optim.SGD(p, 0.01), held_out=ones(2),
        horizon=20, warmup=0, seeds=(0,), widths=(64, 256, 1024), out=tmp_path,
    )  # fmt: skip
    assert isinstance(found, ScaledRates)
    assert found.exponent is not None
    assert found.exponent.value == pytest.approx(-1.0, abs=0.26)
    assert found.moves
    at = found.at(4096)
    assert at is not None
    best = found.answers[1024].best
    assert best is not None
    assert at.value == pytest.approx(best.value * 4**found.exponent.value, abs=1e-12)
    assert "moves with the width" in str(found)


def test_the_interval_of_the_exponent_is_the_range_over_the_corners() -> None:
    from itertools import product

    made = {64: Bracket(4e-3, 2e-3, 6e-3), 128: Bracket(2e-3, 1e-3, 4e-3), 256: Bracket(2e-3, 1.5e-3, 2.5e-3)}

    class Answer:
        def __init__(self, best: Bracket) -> None:
            self.best = best

    found = exponent({width: Answer(best) for width, best in made.items()})  # type: ignore[misc]
    x = np.log(list(made))
    slopes = [np.polyfit(x, np.log(ends), 1)[0] for ends in product(*((one.low, one.high) for one in made.values()))]
    assert found is not None
    assert (found.low, found.high) == pytest.approx((min(slopes), max(slopes)), abs=1e-9)


def test_an_interval_with_zero_says_how_far_off_a_carried_rate_may_be() -> None:
    found = ScaledRates({}, Bracket(0.0, -0.5, 0.25))
    assert not found.moves
    assert "do not show that the best rate moves" in str(found)
    assert "Carried to 4 times the largest width, it may be off by a factor of 2." in str(found)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"horizon": 2.5}, "horizon"),
        ({"updates": 0}, "updates"),
        ({"minutes": -1}, "minutes"),
        ({"seeds": (0.5,)}, "seeds"),
        ({"widths": (64, 128)}, "function of scale="),
        ({"warmup": 60}, "warmup"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, more, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        perceptrons(tmp_path / "out", **more)


def test_one_width_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one width"):
        sl.lr_find(lambda scale: perceptron(), clusters(2), class_loss, horizon=30, widths=(64, 64), out=tmp_path)


def test_the_package_is_the_function() -> None:
    import inspect

    import stabilitylab.lr_find
    from stabilitylab.lr_find.find import lr_find

    assert inspect.signature(sl.lr_find) == inspect.signature(lr_find)
    assert stabilitylab.lr_find is sl.lr_find
    assert callable(sl.lr_find)
    assert INPUTS == 8
