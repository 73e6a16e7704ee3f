"""``preflight`` and ``check`` with several optimizers: one update is the step of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from questioned import Decoder, adamw, cross_entropy, next_tokens
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from stabilitylab import preflight
from stabilitylab.check import Check, Preflight, verify_neutral
from stabilitylab.check.updates import optimizers_given
from stabilitylab.errors import UsageError


def check(result: Preflight, name: str) -> Check:
    (found,) = [one for one in result.checks if one.name == name]
    return found


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices of the blocks, and all other parameters."""
    own = dict(model.named_parameters())
    first = [name for name, parameter in own.items() if name.startswith("blocks.") and parameter.dim() == 2]
    return [own[name] for name in first], [parameter for name, parameter in own.items() if name not in first]


def pair(
    model: nn.Module, first: Callable[..., Optimizer], second: Callable[..., Optimizer], **second_options: Any
) -> list[Optimizer]:
    matrices, others = split(model)
    return [first(matrices), second(others, **second_options)]


def two_adamw(model: nn.Module, rate: float = 1e-3) -> list[Optimizer]:
    return [AdamW(own, lr=rate) for own in split(model)]


@pytest.mark.parametrize("given", ["list", "tuple", "function of the model", "function of the parameters"])
def test_an_optimizer_in_two_parts_is_that_optimizer(given: str) -> None:
    model, batch = Decoder(), next_tokens()
    one = preflight(model, batch, cross_entropy, adamw(model))
    made = two_adamw(model)

    def of_parameters(parameters: Any) -> tuple[Optimizer, ...]:
        matrices, others = [], []
        for parameter in parameters:
            (matrices if parameter.dim() == 2 else others).append(parameter)
        return AdamW(matrices, lr=1e-3), AdamW(others, lr=1e-3)

    ways: dict[str, Any] = {
        "list": made,
        "tuple": tuple(made),
        "function of the model": lambda model: two_adamw(model),
        "function of the parameters": of_parameters,
    }
    two = preflight(model, batch, cross_entropy, ways[given])
    assert two.numbers.pop("rates") == {"AdamW 1": 1e-3, "AdamW 2": 1e-3}  # type: ignore[attr-defined]
    assert one.numbers.pop("rates") == {"AdamW": 1e-3}  # type: ignore[attr-defined]
    assert two.numbers == one.numbers
    for mine, theirs in zip(two.layers, one.layers, strict=True):
        assert {k: v for k, v in mine.numbers.items() if v == v} == {k: v for k, v in theirs.numbers.items() if v == v}
    assert check(two, "not in the optimizer").measured == f"the 2 optimizers hold all {len(list(model.parameters()))}"
    assert all(not each.state for each in made), "the check stepped the caller's own optimizers"


def test_muon_and_adamw_make_one_update_at_their_own_rates() -> None:
    model, batch = Decoder(), next_tokens()
    result = preflight(model, batch, cross_entropy, pair(model, lambda p: Muon(p, lr=0.02), AdamW, lr=3e-4))
    assert result.ok, str(result)
    assert result.numbers["rates"] == {"Muon": 0.02, "AdamW": 3e-4}
    assert result.numbers["rate"] == 0.02
    assert " at lr 0.02 (Muon), 0.0003 (AdamW); output moved by" in str(result)
    twin = Decoder()
    both = pair(twin, lambda p: Muon(p, lr=0.02), AdamW, lr=3e-4)
    cross_entropy(twin, batch).backward()
    for each in both:
        each.step()
    assert result.numbers["loss_after"] == pytest.approx(cross_entropy(twin, batch).item(), rel=1e-6)


def test_a_parameter_in_no_optimizer_and_one_in_two_are_named() -> None:
    model = Decoder()
    matrices, others = split(model)
    left = [own for own in others if own is not model.places.weight]
    result = preflight(
        model, next_tokens(), cross_entropy, [SGD(matrices, lr=1e-2), SGD([*left, matrices[0]], lr=1e-2)]
    )
    missing, doubled = check(result, "not in the optimizer"), check(result, "optimizer doubles")
    assert (missing.state, missing.site) == ("warn", "places.weight")
    assert (doubled.state, doubled.site) == ("fail", "blocks.0.attention.qkv.weight")
    assert doubled.measured == f"1 of {len(list(model.parameters()))}: blocks.0.attention.qkv.weight"
    assert "give each parameter to one optimizer once" in str(result)


def test_the_warm_up_divides_each_rate_and_a_schedule_that_begins_at_zero_is_named() -> None:
    model, batch = Decoder(), next_tokens()
    both = pair(model, lambda p: Muon(p, lr=2.0), AdamW, lr=0.1)
    warmed = preflight(model, batch, cross_entropy, both, warmup=100)
    assert warmed.numbers["rates"] == pytest.approx({"Muon": 0.02, "AdamW": 1e-3})
    torch.optim.lr_scheduler.LambdaLR(both[0], lambda step: step / 100)
    asked = preflight(model, batch, cross_entropy, both)
    why = "the schedule of Muon begins at a rate of 0: say warmup=, the number of updates of its warm-up"
    assert check(asked, "output change").measured == why
    assert asked.ok, "parameters that a schedule of 0 leaves as they are were accused"
    assert preflight(model, batch, cross_entropy, both, warmup=100).numbers["rates"] == warmed.numbers["rates"]


def test_a_lower_rate_is_named_for_each_optimizer() -> None:
    model, batch = Decoder(), next_tokens()
    found = check(preflight(model, batch, cross_entropy, two_adamw(model, 3.0)), "output change")
    assert found.state == "fail"
    head, _, rest = found.remedy.partition("(")
    assert head == "lower the rates of step one "
    assert rest.startswith("that of AdamW 1 from 3 to about ")
    rate = float(rest.split("about ")[1].split(",")[0])
    assert check(preflight(model, batch, cross_entropy, two_adamw(model, rate)), "output change").state == "ok"


def test_entries_are_compared_with_the_eps_of_the_optimizer_that_updates_them() -> None:
    def small(model: nn.Module, batch: Any) -> Tensor:
        return 1e-14 * cross_entropy(model, batch)

    def shares(optimizer: Any) -> list[float]:
        result = preflight(model, next_tokens(), small, optimizer)
        return [one["eps"] for one in result.layers if one.number]

    model = Decoder()
    assert shares(AdamW(model.parameters())) == [1.0, 1.0]
    assert shares(pair(model, lambda p: SGD(p, lr=0.1), AdamW)) == [1.0, 1.0]
    for first in (lambda p: SGD(p, lr=0.1), lambda p: Muon(p, lr=0.1)):  # Muon's eps is added to a norm
        assert all(math.isnan(share) for share in shares(pair(model, first, SGD)))
    assert all(math.isnan(share) for share in shares(torch.optim.Adafactor(model.parameters())))  # it has two


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "optimizer is empty: give a torch optimizer, a list of several"),
        (3, "optimizer is int: give"),
        ([lambda parameters: None], "optimizer holds a function: give"),
        (lambda parameters: None, "the result of the function that makes the optimizer is NoneType: give"),
        (lambda parameters: [], "the result of the function that makes the optimizer is empty: give"),
        (lambda model: model.nothing, "the function that makes the optimizer failed: AttributeError"),
    ],
)
def test_what_is_no_optimizer_is_refused(given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        preflight(Decoder(), next_tokens(), cross_entropy, given)


def test_one_of_several_that_needs_a_closure_is_named() -> None:
    model = Decoder()
    both = pair(model, lambda p: torch.optim.LBFGS(p), AdamW)
    with pytest.raises(UsageError, match=r"LBFGS needs a closure, which .*: leave all optimizers out"):
        preflight(model, next_tokens(), cross_entropy, both)


def test_the_check_of_several_processes_takes_the_same_argument() -> None:
    model = Decoder()
    assert optimizers_given(None, model) == []
    both = two_adamw(model)
    assert optimizers_given(both, model) == both
    made = optimizers_given(two_adamw, model)
    assert [len(one.param_groups[0]["params"]) for one in made] == [len(own) for own in split(model)]


def test_a_loop_with_two_optimizers_is_shown_to_be_neutral() -> None:
    def make() -> tuple[nn.Module, Callable[[], Tensor]]:
        model, batch = Decoder(), next_tokens()
        both = pair(model, lambda p: Muon(p, lr=0.02), AdamW, lr=1e-3)

        def update() -> Tensor:
            loss = cross_entropy(model, batch)
            loss.backward()
            for each in both:
                each.step()
                each.zero_grad()
            return loss

        return model, update

    found = verify_neutral(make, 2)
    assert found.exit_code == 0, str(found)


READY = """
import torch
from torch import nn

def ready():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    matrices = [own for own in model.parameters() if own.dim() == 2]
    others = [own for own in model.parameters() if own.dim() != 2]
    both = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=1e-3)]
    return model, torch.randn(2, 5, 8), lambda model, x: model(x).square().mean(), both

def twice():
    model, x, loss, (muon, adamw) = ready()
    adamw.add_param_group({"params": muon.param_groups[0]["params"][:1]})
    return {"model": model, "batch": x, "loss_fn": loss, "optimizer": [muon, adamw]}

def leave():
    return twice() | {"skip": ["optimizer doubles", "replicas"]}
"""


def test_the_command_takes_a_list(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "several.py").write_text(READY)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, err = run("check", "several:ready")
    assert (code, err) == (0, "")
    assert "at lr 0.01 (Muon), 0.001 (AdamW)" in out
    code, out, _ = run("check", "several:twice")
    assert code == 1
    assert "FAIL  optimizer doubles: layers.0.self_attn.in_proj_weight: 1 of " in out
    code, out, _ = run("check", "several:leave")
    assert code == 0
    assert "not checked: optimizer doubles: skip= leaves it out" in out
