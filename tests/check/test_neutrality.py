"""``verify_neutral``: neutral, not neutral with the place, not decidable; it would notice; what it cannot work with."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stabilitylab as sl
from stabilitylab.check import Neutrality
from stabilitylab.errors import InputError, StabilityLabError, UsageError
from stabilitylab.probes.state import StateSnapshot
from stabilitylab.probes.state.snapshot import Found


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.norm(x)))


class Net(nn.Module):
    """``change(self)`` is called in each forward in eval mode."""

    def __init__(self, change: Callable[[Net], None] = lambda net: None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.drop, self.change, self.passes = nn.Dropout(0.1), change, itertools.count(1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        else:
            self.change(self)
        for layer in self.layers:
            x = layer(x)
        return self.drop(x)


def loop(net: Net, **options: Any) -> tuple[Any, ...]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def update(watcher: Any) -> float:
        loss = net(torch.randn(3, 5, 4)).square().mean()
        loss.backward()
        watcher.step(loss=loss)
        watcher.note(tokens=15)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.item()

    return (net, update, options) if options else (net, update)


def late(net: Net) -> None:
    """Writes past autograd, from the second pass on, of which no copy is kept."""
    if next(net.passes) >= 2:
        net.layers[1].out.weight.data.mul_(1.5)


def at_once(net: Net) -> None:
    net.layers[1].out.weight.data.mul_(1.5)


def test_a_loop_that_watching_leaves_alone_and_the_callers_random_states() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    found = sl.verify_neutral(lambda: loop(Net()))
    assert (found.verdict, found.neutral, found.exit_code) == ("neutral", True, 0)
    assert (found.updates, found.where, found.update, found.tensor) == (3, "", None, "")
    assert not found.ended
    assert not found.warned
    assert not found.left_out
    counts = {"parameter": 8, "buffer": 1, "gradient": 8, "loss": 2, "random-state": 3}
    assert {kind: found.compared[kind] for kind in counts} == counts
    assert found.compared["optimizer"] >= 3 * 8  # step and both moments of each parameter
    assert str(found).startswith("neutral: 3 updates, watched and unwatched, left the same bits behind (2 losses, ")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()  # noqa: NPY002


def test_a_change_that_cannot_be_undone_is_named_with_its_update() -> None:
    found = sl.verify_neutral(lambda: loop(Net(late)), updates=4)
    assert (found.verdict, found.neutral, found.exit_code) == ("not neutral", False, 1)
    # the pass of the second row comes after its backward and before its optimizer's step
    assert (found.update, found.tensor) == (2, "parameter layers.1.out.weight")
    assert found.where == "update 2: parameter layers.1.out.weight differs"
    lines = str(found).splitlines()
    assert lines[0] == "not neutral: update 2: parameter layers.1.out.weight differs."
    assert any("row 1: the reference pass changed layers.1.out.weight, of which no copy" in line for line in lines[1:])


def test_a_change_after_the_last_update_is_found() -> None:
    def change(net: Net) -> None:
        if next(net.passes) >= 3:
            net.layers[1].out.weight.data.mul_(1.5)

    found = sl.verify_neutral(lambda: loop(Net(change)), updates=2)
    assert found.verdict == "not neutral"
    assert found.where == "after update 2, when the watch had ended: parameter layers.1.out.weight differs"


def test_what_is_put_back_is_neutral_and_said() -> None:
    found = sl.verify_neutral(lambda: loop(Net(at_once)))
    assert found.verdict == "neutral"
    assert "the reference pass changed layers.1.out.weight, and it was put back" in str(found)
    assert sl.verify_neutral(lambda: loop(Net(late)), restore=True).verdict == "neutral"
    assert sl.verify_neutral(lambda: loop(Net(late), restore=True)).verdict == "neutral"
    assert sl.verify_neutral(lambda: loop(Net(late)), reference=None).verdict == "neutral"


def test_it_would_notice_what_nobody_puts_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateSnapshot, "compare", lambda self: Found((), (), (), (), 0, (), None))
    found = sl.verify_neutral(lambda: loop(Net(at_once)))
    assert (found.verdict, found.update, found.tensor) == ("not neutral", 1, "parameter layers.1.out.weight")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda net: net.seen.add_(1), "buffer seen"),
        (lambda net: setattr(net, "count", 1), "plain attribute count"),
        (lambda net: torch.manual_seed(3), "random state torch"),
        (lambda net: random.random(), "random state Python"),
        (lambda net: net.layers[0].out.bias.grad.add_(1), "parameter layers.0.out.bias"),
    ],
)
def test_each_kind_of_difference_is_named(change: Any, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a reference writes it, and nothing is put back."""
    monkeypatch.setattr(StateSnapshot, "compare", lambda self: Found((), (), (), (), 0, (), None))
    monkeypatch.setattr("stabilitylab.probes._engine.evaluation.random_states_kept", lambda *_: nullcontext())
    found = sl.verify_neutral(lambda: loop(Net(change)))
    assert (found.verdict, found.update) == ("not neutral", 1)
    assert found.tensor == named


def test_two_unwatched_runs_that_differ_decide_nothing() -> None:
    def make() -> tuple[Any, ...]:
        torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
        return loop(Net())

    found = sl.verify_neutral(make)
    assert (found.verdict, found.neutral, found.exit_code) == ("not decidable here", False, 5)
    assert found.update == 1
    assert str(found).startswith(
        "not decidable here: two runs that nobody watched differ; update 1: loss differs. Seed"
    )


def test_a_time_that_a_model_keeps_is_left_out_and_said() -> None:
    def make() -> tuple[Any, ...]:
        net = Net()
        net.born = time.perf_counter()
        return loop(net)

    found = sl.verify_neutral(make)
    assert found.verdict == "neutral"
    assert found.left_out == ("born, which differs between unwatched runs",)
    assert "not compared: born" in str(found)


def test_an_update_without_parameters_is_watched_at_the_optimizers_step() -> None:
    def make(change: Any = at_once) -> tuple[Any, Any]:
        net = Net(change)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)

        def update() -> None:
            optimizer.zero_grad()
            net(torch.randn(3, 5, 4)).square().mean().backward()
            optimizer.step()

        return net, update

    found = sl.verify_neutral(make)
    assert found.verdict == "neutral"
    assert "model_update" in found.ended  # it was watched
    assert sl.verify_neutral(lambda: make(late)).verdict == "not neutral"


def test_a_loop_that_fails_only_when_watched_is_not_neutral() -> None:
    def make() -> tuple[Any, Any]:
        net, update = loop(Net())

        def other(watcher: Any) -> Any:
            if watcher.watcher is not None and watcher.watcher.t == 1:
                raise ArithmeticError("odd")
            return update(watcher)

        return net, other

    found = sl.verify_neutral(make)
    assert found.verdict == "not neutral"
    assert found.where == "update 2: the watched run raised ArithmeticError: odd, the unwatched did not"


def of(update: Any) -> Callable[[], Any]:
    return lambda: (nn.Linear(2, 2), update)


def breaking() -> Any:
    raise KeyError("weights.pt")


@pytest.mark.parametrize(
    ("make", "options", "kind", "said"),
    [
        (3, {}, UsageError, r"make = 3 must be a function that returns \(model, update\)"),
        (lambda: 3, {}, UsageError, r"make\(\) returned int: it must return \(model, update\)"),
        (lambda: (3, 4), {}, UsageError, r"make\(\) returned \(int, int\): it must return"),
        (lambda: (nn.Linear(2, 2), print, 5), {}, UsageError, r"make\(\) returned \(Linear, .*int\): it must return"),
        (breaking, {}, InputError, r"make\(\) failed: KeyError: 'weights.pt'"),
        (of(lambda: breaking()), {}, InputError, r"update 1 failed unwatched: KeyError: 'weights.pt'"),
        (of(lambda: None), {}, UsageError, r"no optimizer of torch had stepped: let the update function take the"),
        (of(lambda watcher: None), {}, UsageError, r"never called step\(loss=loss\) of the watcher"),
        (of(lambda a, b: None), {}, UsageError, r"takes 2 arguments: it must take the watcher, or nothing"),
        (lambda: loop(Net()), {"updates": 0}, UsageError, r"updates = 0 must be a whole number of at least 1"),
        (lambda: loop(Net()), {"updates": True}, UsageError, r"updates = True must be a whole number"),
        (lambda: loop(Net()), {"out": "runs/x"}, UsageError, r"'out' is set by the verification itself"),
        (lambda: loop(Net(), out="runs/x"), {}, UsageError, r"'out' is set by the verification itself"),
        (lambda: loop(Net()), {"probs": "all"}, UsageError, r"'probs' is no argument of watch"),
        (lambda: loop(Net(), probs="all"), {}, UsageError, r"'probs' is no argument of watch"),
        (lambda: loop(Net()), {"probes": "nosuch"}, UsageError, r"nosuch"),
    ],
)
def test_bad_input_is_one_sentence(make: Any, options: Any, kind: type[StabilityLabError], said: str) -> None:
    with pytest.raises(kind, match=said) as raised:
        sl.verify_neutral(make, **options)
    assert "\n" not in str(raised.value)


MODULE = """
import itertools, os
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, late):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2)))
        self.late, self.passes = late, itertools.count(1)
    def forward(self, x):
        if self.late and not self.training and next(self.passes) >= 2:
            self.layers[0][1].bias.data.add_(1)
        return self.layers(x)

def make(late=False):
    net = Net(late)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    def update(watcher):
        loss = net(torch.randn(3, 4)).square().mean()
        loss.backward()
        watcher.step(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
    return net, update

def changed():
    return make(late=True)

def unseeded():
    torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
    return make()

def wrong():
    return 3

def failing():
    raise KeyError("weights.pt")
"""


@pytest.fixture
def mine(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ownloop.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["ownloop:make"], 0, "neutral: 3 updates, watched and unwatched, left the same bits behind ("),
        (
            ["ownloop:make", "--updates", "1"],
            0,
            "neutral: 1 update, watched and unwatched, left the same bits behind (",
        ),
        (["ownloop:changed"], 1, "not neutral: update 2: parameter layers.0.1.bias differs.\n"),
        (["ownloop:unseeded"], 5, "not decidable here: two runs that nobody watched differ; update 1: "),
    ],
)
def test_the_command_tells_each_verdict_by_its_code(run: Any, arguments: list[str], code: int, said: str) -> None:
    found, out, err = run("check", "--neutral", *arguments)
    assert (found, err) == (code, "")
    assert out.startswith(said)


@pytest.mark.usefixtures("mine")
def test_the_command_prints_one_object(run: Any) -> None:
    code, out, _ = run("check", "--neutral", "ownloop:changed", "--json")
    found = json.loads(out)
    assert code == 1
    assert set(found) == set(Neutrality.__dataclass_fields__)
    assert (found["verdict"], found["update"], found["tensor"]) == ("not neutral", 2, "parameter layers.0.1.bias")


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--neutral", "ownloop:wrong"], 2, "make() returned int: it must return (model, update)"),
        (["--neutral", "ownloop:failing"], 4, "make() failed: KeyError: 'weights.pt'"),
        (["--neutral", "nowhere:make"], 4, "no module 'nowhere' here"),
        (["--neutral", "ownloop:none"], 2, "ownloop has no function 'none'"),
        (["--neutral", "--all", "ownloop:make"], 2, "--all shows layers, of which --neutral has none"),
        (["--updates", "4", "ownloop:make"], 2, "--updates belongs to --neutral"),
        (["--neutral", "--updates", "0", "ownloop:make"], 2, "updates"),
    ],
)
def test_the_command_refuses_in_one_sentence(run: Any, arguments: list[str], code: int, said: str) -> None:
    found, out, err = run("check", *arguments)
    assert (found, out) == (code, "")
    assert said in " ".join(err.split())
