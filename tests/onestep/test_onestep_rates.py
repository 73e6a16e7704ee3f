"""``update_rate`` against optimizers of torch, an own finite difference and the Jacobian-vector product of F."""

from __future__ import annotations

import copy
import math
import re
from itertools import product

import pytest
import torch
from onestep_cases import column, real_tokens, subject_of, weights_of
from rest_slow import SOME_ARCHS, rest_slow
from torch import Tensor
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from stabilitylab.models import ARCHS, Transformer
from stabilitylab.onestep.initial_model import Subject
from stabilitylab.onestep.rates import directions, update_rate

MATRIX = r"\w+\.\d+\.\w+\."
GROUPS = {
    "all": ".*",
    "vo_ffn": rf"{MATRIX}(v|out|fc1|fc2)",
    "qk": rf"{MATRIX}[qk]",
    "bias": rf"{MATRIX}(q|k|v|out|fc1|fc2)\.bias",
    "ln": r".*norm\.([\d.]+\.)?([qkv]_)?(weight|bias)",
    "embedding": r"\w+\.embedding",
    "encoder": r"encoder\..*",
    "decoder": r"decoder\..*",
    "cross_attn": r"decoder\.\d+\.cross_attn\..*",
}
STILL = {  # what cannot move the output at once: it stands behind a factor or a matrix of zeros
    "rezero": {"vo_ffn", "qk", "bias", "encoder", "cross_attn"},
    "rfixup": {"qk", "encoder"},
}
CASES = [*((arch, "encoder-decoder") for arch in ARCHS), ("deepnorm", "encoder"), ("preln", "decoder")]
STREAMS = ("hyper-connections", "siamese-norm", "attnres", "keel")
MORE = [*((arch, "encoder-decoder") for arch in (*SOME_ARCHS, *STREAMS)), *CASES[-2:]]
SOME = [("preln", "decoder")]


def rates_of(subject: Subject) -> dict[str, float]:
    return column(update_rate(subject, directions(subject), subject.output()))


def last_stack(subject: Subject) -> str:
    return "encoder" if subject.config.model.stack == "encoder" else "decoder"


def per_token(subject: Subject, change: Tensor) -> float:
    """Mean over real tokens of the L2 norm, one by one."""
    tokens = change[real_tokens(subject, last_stack(subject))]
    return math.fsum(math.sqrt(float(row @ row)) for row in tokens) / len(tokens)


def updates(subject: Subject, optimizer: str) -> dict[str, Tensor]:
    gradients = {n: p.grad for n, p in subject.model.named_parameters() if p.grad is not None}
    if optimizer == "sgd":
        return gradients
    places = {str(residual.place): residual for residual in subject.model.residuals()}
    stacks, found = subject.model.stacks, {}
    for role, (name, _) in subject.model.parameter_roles().items():
        own, stack = places.get(".".join(role.split(".")[:3])), stacks.get(role.split(".")[0])
        stack = stack or subject.model.last_stack
        factors = own.factors(role) if own else stack.arch.outer_factors(stack.place, role, stack.options)
        if name in gradients:
            gradient = gradients[name]
            found[name] = factors.lr * gradient / (gradient.abs() + factors.eps * subject.config.train.eps)
    return found


def groups_of(subject: Subject) -> set[str]:
    roles = subject.model.parameter_roles()
    return {group for group, pattern in GROUPS.items() if any(re.fullmatch(pattern, role) for role in roles)}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own jvp uses it; of either category
@pytest.mark.parametrize(("arch", "stack"), rest_slow(CASES, SOME, MORE))
def test_each_group_is_a_finite_difference_and_nearly_the_derivative(arch: str, stack: str) -> None:
    subject, lr = subject_of(arch, stack), 1e-6
    recorded = rates_of(subject)
    assert set(recorded) == {f"{optimizer}.{group}" for optimizer in ("sgd", "adam") for group in groups_of(subject)}
    theta = {name: p.detach() for name, p in subject.model.named_parameters()}

    def F(parameters: dict[str, Tensor]) -> Tensor:
        class Hidden(torch.nn.Module):
            def __init__(self, model: Transformer) -> None:
                super().__init__()
                self.model = model

            def forward(self) -> Tensor:
                return self.model.hidden(**subject.batch.inputs)

        return functional_call(Hidden(subject.model), {f"model.{name}": p for name, p in parameters.items()}, ())

    for optimizer in ("sgd", "adam"):
        step = updates(subject, optimizer)
        for group in groups_of(subject):
            inside = weights_of(subject, GROUPS[group])
            towards = {name: -inside[name] * step[name] for name in theta}
            with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
                moved = F({name: theta[name] + lr * towards[name] for name in theta}) - F(theta)
                _, derivative = jvp(F, (theta,), (towards,))
            value = recorded[f"{optimizer}.{group}"]
            assert value == pytest.approx(per_token(subject, moved) / lr, rel=1e-6), group
            assert value == pytest.approx(per_token(subject, derivative), rel=2e-2), group
            assert (value == 0) == (group in STILL.get(arch, ())), group


@pytest.mark.parametrize(
    ("name", "arch"),
    rest_slow(product(("sgd", "adam"), ("postln", "branchnorm", "admin")), {("adam", "branchnorm")}),
)
def test_all_is_the_first_step_of_the_optimizer_of_torch(arch: str, name: str) -> None:
    subject = subject_of(arch)
    recorded, twin = rates_of(subject), copy.deepcopy(subject.model)
    for mine, its in zip(subject.model.parameters(), twin.parameters(), strict=True):
        its.grad = None if mine.grad is None else mine.grad.clone()
    optimizer = {
        "sgd": lambda: torch.optim.SGD(twin.parameters(), lr=1e-6),
        "adam": lambda: torch.optim.Adam(twin.parameters(), lr=1e-6, betas=(0.9, 0.98), eps=1e-8),
    }[name]()
    with torch.no_grad():
        before = twin.hidden(**subject.batch.inputs)
        optimizer.step()
        change = twin.hidden(**subject.batch.inputs) - before
    assert recorded[f"{name}.all"] == pytest.approx(per_token(subject, change) / 1e-6, rel=1e-6)


def test_weights_and_gradients_are_afterwards_what_they_were() -> None:
    subject = subject_of("deepnorm")
    before = {n: (p.detach().clone(), p.grad) for n, p in subject.model.named_parameters()}
    rates_of(subject)
    for name, parameter in subject.model.named_parameters():
        assert torch.equal(parameter, before[name][0])
        assert parameter.grad is before[name][1]


@pytest.mark.slow
def test_at_alpha_0_no_branch_moves_the_output_and_the_decoder_does_not_see_the_encoder() -> None:
    rates = rates_of(subject_of("branchnorm", alpha=0.0))
    for optimizer in ("sgd", "adam"):
        for group in ("vo_ffn", "qk", "bias", "encoder"):
            assert rates[f"{optimizer}.{group}"] == 0
        assert rates[f"{optimizer}.ln"] > 0
        assert rates[f"{optimizer}.embedding"] > 0


@pytest.mark.slow
def test_alpha_is_that_of_row_0_and_a_constant_where_one_is_set() -> None:
    first, whole = subject_of("branchnorm"), subject_of("branchnorm", T=1)
    constant = subject_of("branchnorm", alpha=0.1)
    alphas = [s.model.schedule and s.model.schedule.alpha.item() for s in (first, whole, constant)]
    assert alphas == [0.1, 1.0, 0.1]  # 1 / T, in float64
    assert rates_of(first) == rates_of(constant)
    assert rates_of(first)["sgd.vo_ffn"] < 0.1 * rates_of(whole)["sgd.vo_ffn"]


@pytest.mark.slow
def test_an_untied_output_matrix_has_a_gradient_and_moves_nothing() -> None:
    subject = subject_of("postln", tie="none")
    gradient = subject.model.output.weight.grad
    assert gradient is not None
    assert gradient.norm() > 0
    before = rates_of(subject)
    gradient.zero_()
    assert rates_of(subject) == before
