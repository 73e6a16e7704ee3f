"""Updates of stored runs: precision alone is rounding under each optimizer, and another optimizer is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import GPT, ids, loss_in_bf16, loss_of

import stabilitylab as sl
from stabilitylab.bisect.judging import judged
from stabilitylab.bisect.matching import matched
from stabilitylab.bisect.prints import Fingerprint, load, of_run
from stabilitylab.bisect.stored import of_prints, of_stored

RATE = 3e-4
SKIPPED = "h.1.mlp.c_fc.weight"
Made = Callable[..., Path]
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=RATE),
    "adam, small eps": lambda parameters: torch.optim.Adam(parameters, lr=RATE, eps=1e-15),
    "adamw, large eps": lambda parameters: torch.optim.AdamW(parameters, lr=RATE, eps=1e-5, weight_decay=0.1),
    "adamw, first rate of a warm-up": lambda parameters: torch.optim.AdamW(parameters, lr=1e-7),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=RATE),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, known = tmp_path_factory.mktemp("updates"), {}

    def run(
        optimizer: str = "adam", loss: Any = loss_of, rows: int = 2, times: int = 1, skip: str = "", **changed: Any
    ) -> Path:
        key = repr((optimizer, loss.__name__, rows, times, skip, changed))
        if key in known:
            return known[key]
        model = GPT(2)
        steps = OPTIMIZERS[optimizer](model.parameters())
        for group in steps.param_groups:
            group.update(changed)
        out = known[key] = folder / str(len(known))
        with sl.watch(model, out=out, probes="fingerprint", every=1, reference=None, optimizer=steps) as watcher:
            for _ in range(rows):
                value = loss(model, ids())
                value.backward()
                watcher.step(loss=value)
                if skip:
                    model.get_parameter(skip).grad = None
                for _ in range(times):
                    steps.step()
                steps.zero_grad()
        return out

    return run


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_precision_alone_is_rounding(made: Made, optimizer: str) -> None:
    found = of_stored(made(optimizer), made(optimizer, loss_in_bf16))
    assert (found.verdict, found.exit_code) == ("rounding", 0), found.sentences()
    assert any(place.phase == "update" and place.error for place in found.places), "updates were compared"


FAULTS: Mapping[str, dict[str, Any]] = {
    "rate": {"lr": 1.1 * RATE},
    "decay": {"weight_decay": 0.1},
    "eps": {"eps": 1e-6},
    "step twice": {"times": 2},
    "parameter left out": {"skip": SKIPPED},
    "sign": {"maximize": True},
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("loss", [loss_of, loss_in_bf16])
def test_another_optimizer_is_found(made: Made, name: str, loss: Any) -> None:
    found = of_stored(made(), made(loss=loss, **FAULTS[name]))
    assert found.first is not None, found.sentences()
    assert (found.verdict, found.first.phase) == ("different", "update")
    if name == "parameter left out":
        assert found.first.name == SKIPPED
        over = [place.name for place in found.places if place.is_over(found.limit)]
        assert over == [SKIPPED]
    assert "compare the optimizers" in found.sentences()[-1]


def test_another_beta_is_found_in_the_second_row(made: Made) -> None:
    for betas in ((0.8, 0.999), (0.9, 0.9)):
        other = made(rows=3, betas=betas)
        assert of_stored(made(rows=3), other).verdict != "different", "bias correction hides it in the first update"
        found = of_stored(made(rows=3), other, step=1)
        assert found.first is not None
        assert (found.verdict, found.first.phase) == ("different", "update")


def without_directions(print_: Fingerprint) -> Fingerprint:
    passes = {name: places for name, places in print_.passes.items() if name != "directions"}
    return Fingerprint(print_.label, print_.step, passes)


def test_without_directions_an_update_is_compared_only_if_the_gradients_agree(made: Made) -> None:
    one, bf16, rate = (
        without_directions(of_run(sl.Run.open(path), 0))
        for path in (made(), made(loss=loss_in_bf16), made(lr=1.1 * RATE))
    )
    found = of_prints([one, bf16])
    assert found.verdict == "rounding"
    assert any("Without fingerprint_weight_direction" in sentence for sentence in found.sentences())
    assert of_prints([one, rate]).verdict == "different"


def test_directions_and_their_eps_are_kept_in_a_file(made: Made, tmp_path: Path) -> None:
    print_ = of_run(sl.Run.open(made("adamw, large eps")), 0)
    print_.save(tmp_path / "golden.json")
    kept = load(tmp_path / "golden.json").passes["directions"]
    assert {place.eps for place in kept.values()} == {1e-5}
    bf16 = of_run(sl.Run.open(made("adamw, large eps", loss_in_bf16)), 0)
    assert of_prints([load(tmp_path / "golden.json"), bf16]).verdict == "rounding"


def test_the_control_of_adams_first_update_is_its_error(made: Made) -> None:
    """Adam's first update is the direction times the rate, so that both have the same error."""
    prints = [of_run(sl.Run.open(path), 0) for path in (made(), made(loss=loss_in_bf16))]
    places = judged(matched(*prints), [], made=False)
    noisy = [place for place in places if place.phase == "update" and place.error > 0.04]
    assert len(noisy) > 5
    for place in noisy:
        assert place.control == pytest.approx(place.error, rel=0.02), place.name
