"""Where two models part: planted faults are named, clean pairs are not flagged, and the answer says what is known."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from planted import (
    FAULTS,
    GPT,
    VOCAB,
    after,
    faulty,
    ids,
    loss_in_bf16,
    loss_of,
    noisy,
    reference_loss,
    reference_model,
    setting,
)
from rest_slow import rest_slow, slow
from torch import Tensor, nn

import stabilitylab as sl
from stabilitylab.bisect import Bisection, redrawn
from stabilitylab.bisect.model_pass import digest
from stabilitylab.bisect.rounding import RUNNING_SUM
from stabilitylab.errors import InputError, UsageError
from stabilitylab.reports.bisection import write
from stabilitylab.reports.measures.bisection import error_panels

LARGE = [name for name in FAULTS if name not in ("1 % error", "eps of a norm")]  # above three roundings of bfloat16


@pytest.fixture(scope="module")
def gpt() -> GPT:
    return GPT(3)


@pytest.mark.parametrize("name", rest_slow(FAULTS, {"sign flipped", "1 % error", "mask off by one"}))
def test_a_fault_is_named_and_confirmed(gpt: GPT, name: str) -> None:
    found = sl.bisect(gpt, faulty(gpt, name), ids(), loss_of)
    assert (found.verdict, found.confirmed, found.where) == ("different", True, FAULTS[name][1])
    assert found.exit_code == 1
    assert found.suspected is not None, "the sums alone suspect it too"
    assert found.suspected.factor > 1000, "rounding of float32 is far below"


@pytest.mark.parametrize("name", rest_slow(LARGE, {"channels rolled"}))
def test_a_fault_is_named_between_two_precisions(gpt: GPT, name: str) -> None:
    found = sl.bisect(gpt, faulty(gpt, name), ids(), (loss_of, loss_in_bf16))
    assert (found.verdict, found.confirmed, found.where) == ("different", True, FAULTS[name][1])


@pytest.mark.slow
def test_a_fault_below_the_rounding_of_a_precision_is_rounding_there(gpt: GPT) -> None:
    found = sl.bisect(gpt, faulty(gpt, "eps of a norm"), ids(), (loss_of, loss_in_bf16))
    assert found.verdict == "rounding"


@pytest.mark.slow
@pytest.mark.parametrize("seed", rest_slow([0, 1, 2], {0}))
def test_clean_pairs_are_not_flagged(seed: int) -> None:
    model = GPT(2, seed)
    pairs = {
        "bf16": (copy.deepcopy(model).to(torch.bfloat16), loss_of),
        "autocast": (copy.deepcopy(model), loss_in_bf16),
        "float64": (copy.deepcopy(model).double(), loss_of),
    }
    for name, (other, loss) in pairs.items():
        found = sl.bisect(model, other, ids(seed), (loss_of, loss))
        over = [(place.phase, place.name, place.factor) for place in (*found.places, *found.fed) if place.is_over(3.0)]
        assert (found.verdict, over) == ("rounding", []), name
        assert found.exit_code == 0
        assert len(found.places) > 90
        largest = found.largest
        assert largest is not None
        assert 0.1 < largest.factor < 2.5, "the control is of the size of the rounding"
    same = sl.bisect(model, copy.deepcopy(model), ids(seed), loss_of)
    assert same.verdict == "identical"
    agree = f"No difference: the second model and the first model agree bit for bit at all {len(same.places)} places."
    assert str(same) == agree


@pytest.mark.slow
@pytest.mark.parametrize("sentences", [64, 1024])
def test_sums_over_many_tokens_are_no_fault_of_a_model_in_bfloat16(
    sentences: int, caplog: pytest.LogCaptureFixture
) -> None:
    """CPU kernels of PyTorch add up the gradients of norms and embeddings in bfloat16."""
    model = GPT(2)
    many = torch.randint(VOCAB, (sentences, 12), generator=torch.Generator().manual_seed(3))
    found = sl.bisect(model, copy.deepcopy(model).to(torch.bfloat16), many, loss_of)
    over = [(place.phase, place.name, place.factor) for place in (*found.places, *found.fed) if place.is_over(3.0)]
    assert (found.verdict, over) == ("rounding", [])
    wrong = copy.deepcopy(model).to(torch.bfloat16)
    wrong.ln_f.bias.register_hook(lambda gradient: 1.5 * gradient)
    found = sl.bisect(model, wrong, many, loss_of)
    assert (found.verdict, found.where) == ("different", "ln_f")
    assert not caplog.records


@pytest.mark.parametrize("terms", [512, 4096])
def test_the_error_of_a_running_sum(terms: int) -> None:
    """Of numbers of random signs, added one after the other in bfloat16."""
    numbers = torch.randn(terms, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    sums = torch.zeros(1000, dtype=torch.bfloat16)
    for row in numbers:
        sums += row
    exact = numbers.double().sum(0)
    error = (sums.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error.item() == pytest.approx(RUNNING_SUM * torch.finfo(torch.bfloat16).eps * terms**0.5, rel=0.15)


def test_redrawn_sums_move_the_gradients_of_vectors_and_embeddings_by_their_terms() -> None:
    """The counts are those of the tokens; a matrix of a linear layer is no such sum."""
    torch.manual_seed(0)
    embedding, norm, linear = nn.Embedding(2, 4000), nn.LayerNorm(4000), nn.Linear(4000, 3)
    model = nn.Sequential(embedding, norm, linear)
    tokens = torch.tensor([0] * 100 + [1] * 25)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(tokens).square().sum().backward()
        return {name: own.grad.double() for name, own in model.named_parameters() if own.grad is not None}

    plain = gradients()
    with redrawn(model, 0.0, seed=1, sums_ulp=2**-7):
        moved = gradients()

    def moves(name: str, row: int | None = None) -> float:
        own, other = (g[name] if row is None else g[name][row] for g in (plain, moved))
        return ((other - own).norm() / own.norm()).item()

    one = RUNNING_SUM * 2**-7
    assert moves("1.weight") == pytest.approx(one * 125**0.5, rel=0.05)
    assert moves("1.bias") == pytest.approx(one * 125**0.5, rel=0.05)
    assert [moves("0.weight", row) for row in (0, 1)] == pytest.approx([one * 10, one * 5], rel=0.05)
    assert moves("2.weight") == 0
    assert all(torch.equal(gradients()[name], plain[name]) for name in plain), "the hooks are gone"


@pytest.mark.slow
@pytest.mark.parametrize("arch", rest_slow(["postln", "preln"], {"postln"}))
def test_the_reference_model_and_its_faults(arch: str) -> None:
    model = reference_model(2, arch)
    bf16 = sl.bisect(model, copy.deepcopy(model).to(torch.bfloat16), ids(), reference_loss)
    assert bf16.verdict == "rounding"
    for path, edit in (
        ("encoder.layers.1.self_attn.f", after("encoder.layers.1.self_attn.f", lambda x: x.roll(1, -1))),
        ("decoder.layers.0.cross_attn.norm", setting("decoder.layers.0.cross_attn.norm", "eps", 1e-1)),
        ("decoder.layers.1.ffn.f", after("decoder.layers.1.ffn.f", noisy(0.01))),
    ):
        other = copy.deepcopy(model)
        edit(other)
        found = sl.bisect(model, other, ids(), reference_loss)
        assert (found.where, found.confirmed) == (path, True)


@pytest.mark.slow
def test_the_residual_from_the_wrong_place_is_the_layers_fault(gpt: GPT) -> None:
    other = copy.deepcopy(gpt)
    block: Any = other.h[1]

    def forward(x: Tensor) -> Tensor:
        normed = block.ln_1(x)
        x = normed + block.attn(normed)
        return x + block.mlp(block.ln_2(x))

    block.forward = forward
    found = sl.bisect(gpt, other, ids(), loss_of)
    assert (found.where, found.confirmed) == ("h.1", True)
    assert found.first is not None
    assert found.first.name == "h.1.ln_2:in"


def test_other_parameters_are_found_before_anything_is_computed(gpt: GPT) -> None:
    other = copy.deepcopy(gpt)
    with torch.no_grad():
        weight = other.get_parameter("h.2.attn.c_proj.weight")
        weight.copy_(weight.T.clone())
    found = sl.bisect(gpt, other, ids(), loss_of)
    assert found.first is not None
    assert (found.first.phase, found.first.name) == ("weights", "h.2.attn.c_proj.weight")
    assert "parameter h.2.attn.c_proj.weight differs before anything is computed" in found.sentences()[0]


@pytest.mark.slow
def test_a_backward_that_differs_is_suspected_in_the_backward_pass(gpt: GPT) -> None:
    other = copy.deepcopy(gpt)
    inner: Any = other.get_submodule("h.2.mlp")
    forward = inner.forward
    inner.forward = lambda x: forward(2 * x - x.detach())  # x in all bits, with twice its gradient
    found = sl.bisect(gpt, other, ids(), loss_of)
    assert found.first is not None
    assert (found.verdict, found.confirmed, found.first.phase) == ("different", False, "backward")
    assert found.where == "h.2.mlp"
    assert "suspected" in found.sentences()[0]


def test_a_detached_branch_and_a_frozen_parameter_have_no_gradient(gpt: GPT) -> None:
    cut = copy.deepcopy(gpt)
    after("h.1.attn", lambda x: x.detach())(cut)
    found = sl.bisect(gpt, cut, ids(), loss_of)
    assert found.first is not None
    assert found.first.phase == "backward"
    assert found.where.startswith("h.1")
    frozen = copy.deepcopy(gpt)
    frozen.get_submodule("h.1.mlp.c_fc").bias.requires_grad_(False)
    found = sl.bisect(gpt, frozen, ids(), loss_of)
    assert found.first is not None
    assert (found.first.phase, found.first.name) == ("gradients", "h.1.mlp.c_fc.bias")


def test_nothing_of_the_models_is_changed(gpt: GPT) -> None:
    one, other = copy.deepcopy(gpt).train(), copy.deepcopy(gpt).eval()
    other.h[0].train()
    loss_of(one, ids()).backward()
    kept = [(p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in one.parameters()]
    flags = [[module.training for module in model.modules()] for model in (one, other)]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    sl.bisect(one, other, ids(), loss_of)
    assert torch.equal(torch.get_rng_state(), state)
    assert [[module.training for module in model.modules()] for model in (one, other)] == flags
    for parameter, (value, gradient) in zip(one.parameters(), kept, strict=True):
        assert torch.equal(parameter, value)
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
    assert all(parameter.grad is None for parameter in other.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in (*one.modules(), *other.modules()))


class Counting(GPT):
    """Counts its passes in a buffer and in a number, keeps its last output, and adds a little of the count to it."""

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("calls", torch.zeros(()))
        self.count, self.last = 0, None

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        self.last = super().forward(tokens) * (1 + 0.1 * self.calls)
        return self.last


def test_state_that_a_forward_pass_writes_is_put_back_after_each_pass() -> None:
    one, other = Counting(), Counting()
    assert sl.bisect(one, other, ids(), loss_of, controls=1).verdict == "identical"
    for model in (one, other):
        assert (float(model.calls), model.count, model.last) == (0.0, 0, None)


class Ported(nn.Module):
    """The same GPT in another's names, with its own order of registration."""

    def __init__(self, gpt: Any) -> None:
        super().__init__()
        self.tokens, self.positions = gpt.wte, gpt.wpe
        self.blocks = nn.ModuleList(gpt.h)
        self.final, self.unembed = gpt.ln_f, gpt.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.unembed(self.final(x))


@pytest.mark.parametrize(
    "maps",
    [
        (),
        slow((r"^blocks=h", r"^tokens=wte", r"^positions=wpe", r"^final=ln_f", r"^unembed=head")),
    ],
)
def test_other_names_are_paired_by_structure_or_by_a_map(gpt: GPT, maps: tuple[str, ...]) -> None:
    found = sl.bisect(gpt, Ported(faulty(gpt, "wrong scale")), ids(), loss_of, maps=maps)
    assert (found.where, found.confirmed, found.by) == ("h.1.attn", True, "map" if maps else "structure")
    assert found.first is not None
    assert found.first.other == "blocks.1.attn.c_proj:in"
    assert (found.only_a, found.only_b) == ({}, {})


def test_wrong_options_are_refused(gpt: GPT) -> None:
    with pytest.raises(UsageError, match="no regular expression"):
        sl.bisect(gpt, gpt, ids(), loss_of, maps=("(=x",))
    with pytest.raises(UsageError, match="must be above 0"):
        sl.bisect(gpt, gpt, ids(), loss_of, limit=0)
    with pytest.raises(InputError, match=r"loss_fn\(model, batch\) failed: KeyError"):
        sl.bisect(gpt, gpt, ids(), lambda model, batch: {}["loss"])
    with pytest.raises(UsageError, match="one number with a gradient"):
        sl.bisect(gpt, gpt, ids(), lambda model, batch: model(batch))


def test_a_batch_that_differs_is_said(gpt: GPT) -> None:
    found = sl.bisect(gpt, copy.deepcopy(gpt), ids(), loss_of, b_batch=ids(1))
    assert found.verdict == "different"
    assert any("different batches" in sentence for sentence in found.sentences())


@pytest.mark.slow
@pytest.mark.parametrize("held", [np.array([[1.0, 2.0]]), torch.tensor([[1.0, 2.0]]), 0.5, 3, True])
def test_the_digest_of_a_batch_sees_its_numbers_whatever_holds_them(held: Any) -> None:
    other = held * 2 if isinstance(held, float | int) else -held
    assert digest({"x": [held]}) == digest({"x": (held,)}) != digest({"x": [other]})
    if isinstance(held, np.ndarray):
        assert digest(held) == digest(torch.from_numpy(held))


def test_the_answer_is_one_json_object_and_a_picture(gpt: GPT, tmp_path: Any) -> None:
    found = sl.bisect(gpt, faulty(gpt, "sign flipped"), ids(), loss_of)
    assert isinstance(found, Bisection)
    read = json.loads(json.dumps(found.as_dict()))
    assert read["where"] == "h.1.mlp"
    assert read["first"]["over"] is True
    assert len(read["places"]) == len(found.places)
    for kind in ("png", "svg"):
        write(found, tmp_path / f"depth.{kind}")
    text = (tmp_path / "depth.svg").read_text(encoding="utf-8")
    assert "first: h.1.mlp:out" in text
    assert "error of a module that is fed" in text
    write(sl.bisect(gpt, copy.deepcopy(gpt), ids(), loss_of), tmp_path / "same.png")  # nothing differs


@pytest.mark.slow
def test_the_module_that_is_fed_has_its_mark(gpt: GPT) -> None:
    """It may be a single place among many, which no thinning of marks may leave out."""
    forward, _ = error_panels(sl.bisect(gpt, faulty(gpt, "sign flipped"), ids(), loss_of))
    [fed] = [line for line in forward.series if line.label == "error of a module that is fed"]
    assert fed.kind == "crosses"
    assert int(min(fed.x)) == 2, "the fault is in the second layer"
    assert len(fed.x) < 6, "and what is fed elsewhere is as it was"
    assert all(math.isfinite(y) for y in fed.y)
