"""Theorems 4.2 and 4.3 by hand on one layer a side, and the constant of each residual formula."""

from __future__ import annotations

import math

import pytest
import torch
from onestep_cases import column, subject_of
from rest_slow import rest_slow
from torch import Tensor

from stabilitylab.onestep.initial_model import Filled, Subject, hooked
from stabilitylab.onestep.measurement import everything
from stabilitylab.onestep.theorem import Connections, applies

ONE = {"encoder_layers": 1, "decoder_layers": 1}
POST_LN = ("postln", "postln-init", "deepnorm", "branchnorm", "admin")


def tables(subject: Subject) -> dict[str, Filled]:
    subject.model.zero_grad()
    return {table[0].name: table for table in everything(subject)[1]}


def matrix(subject: Subject, role: str, values: dict[str, Tensor]) -> Tensor:
    name, rows = subject.model.parameter_roles()[role]
    return values[name] if rows is None else values[name][rows]


def constant(subject: Subject, role: str) -> float:
    """1 / alpha from the formula of the architecture."""
    stack, layer, sublayer = role.split(".")
    residual = getattr(subject.model.stacks[stack].layers[int(layer) - 1], sublayer)
    n, m = subject.config.model.encoder_layers, subject.config.model.decoder_layers
    match subject.config.model.arch:
        case "deepnorm" if n and m:
            return 1 / (0.81 * (n**4 * m) ** (1 / 16) if stack == "encoder" else (3 * m) ** 0.25)
        case "deepnorm":
            return 1 / (2 * (n + m)) ** 0.25
        case "branchnorm":
            return 1 / subject.config.model.T  # t0 = 1
        case "admin":
            return 1 / residual.omega.mean().item()
    return 1.0


def by_hand(subject: Subject, optimizer: str, spectral: bool) -> float:
    weights = {n: p.detach() for n, p in subject.model.named_parameters()}
    gradients = {n: p.grad for n, p in subject.model.named_parameters() if p.grad is not None}
    steps = gradients if optimizer == "sgd" else {n: g / (g.abs() + 1e-8) for n, g in gradients.items()}

    def size(role: str, values: dict[str, Tensor], update: bool) -> float:
        w = matrix(subject, role, values)
        rows, columns = w.shape
        if spectral:
            return float(torch.linalg.svdvals(w)[0])
        if update:
            return math.sqrt(float((w**2).sum())) / math.sqrt(2 * rows * columns / (rows + columns))
        return math.sqrt(float((w**2).mean())) / math.sqrt(2 / (rows + columns))

    def term(place: str) -> tuple[float, float]:
        """(v w / alpha, sqrt(v^2 + w^2) / alpha ||dtheta||)"""
        pair = [f"{place}.fc1", f"{place}.fc2"] if place.endswith("ffn") else [f"{place}.v", f"{place}.out"]
        v, w = (size(role, weights, False) for role in pair)
        dv, dw = (size(role, steps, True) for role in pair)
        c = constant(subject, place)
        return v * w * c, math.sqrt(v**2 + w**2) * c * math.sqrt(dv**2 + dw**2)

    places = {
        stack: [f"{stack}.{i}.{s}" for i in range(1, len(m.layers) + 1) for s in ("self_attn", "cross_attn", "ffn")]
        for stack, m in subject.model.stacks.items()
    }
    both = len(places) == 2
    encoder = sum(term(place)[1] for place in places.get("encoder", ()) if "cross" not in place)
    decoder = sum(term(place)[1] for place in places.get("decoder", ()) if both or "cross" not in place)
    cross = sum(term(place)[0] for place in places.get("decoder", ()) if both and "cross" in place)
    return cross * encoder + decoder if both else encoder + decoder


@pytest.mark.slow
@pytest.mark.parametrize("arch", rest_slow(POST_LN, ["branchnorm"]))
def test_theorem_43_of_one_layer_a_side_and_of_more(arch: str) -> None:
    for layers in (ONE, {}):
        subject = subject_of(arch, **layers)
        found = tables(subject)
        table = found["theorem43"]
        assert [row.site for row in table[0].rows] == ["sgd.vo_ffn", "adam.vo_ffn"]
        for optimizer in ("sgd", "adam"):
            site = f"{optimizer}.vo_ffn"
            assert column(table, "estimate")[site] == pytest.approx(by_hand(subject, optimizer, False), rel=1e-9)
            assert column(table, "spectral")[site] == pytest.approx(by_hand(subject, optimizer, True), rel=1e-9)
            assert column(table, "measured")[site] == column(found["update_rate"])[site] / math.sqrt(16)


@pytest.mark.parametrize("stack", rest_slow(["encoder", "decoder"], ["encoder"]))
@pytest.mark.parametrize("arch", rest_slow(["deepnorm", "admin"], ["deepnorm"]))
def test_theorem_42_of_a_single_stack(arch: str, stack: str) -> None:
    subject = subject_of(arch, stack)
    found = tables(subject)
    assert "theorem43" not in found
    for optimizer in ("sgd", "adam"):
        estimate = column(found["theorem42"], "estimate")[f"{optimizer}.vo_ffn"]
        assert estimate == pytest.approx(by_hand(subject, optimizer, False), rel=1e-9)


@pytest.mark.parametrize("arch", rest_slow(POST_LN, {"admin"}))
def test_the_constant_of_every_residual_is_measured(arch: str) -> None:
    subject = subject_of(arch)
    connections = Connections(subject)
    with hooked(connections.hooks()):
        subject.output()
    for residual in subject.model.residuals():
        role = str(residual.place)
        assert connections[role] == pytest.approx(constant(subject, role), rel=1e-12)


@pytest.mark.parametrize(
    ("alpha", "arch", "expected"),
    rest_slow([(0.0, "branchnorm", 0.0), (0.0, "deepnorm", math.inf)], [(0.0, "deepnorm", math.inf)]),
)
def test_a_constant_of_0_is_no_division_by_0(alpha: float, arch: str, expected: float) -> None:
    subject = subject_of(arch, alpha=alpha)
    connections = Connections(subject)
    with hooked(connections.hooks()):
        subject.output()
    assert {connections[str(residual.place)] for residual in subject.model.residuals()} == {expected}


@pytest.mark.slow
def test_no_theorem_where_a_stack_normalises_before_its_branches() -> None:
    assert applies(subject_of("postln"))
    for subject in (subject_of("preln"), subject_of("postln", decoder_arch="preln")):
        assert not applies(subject)
        assert not {"theorem42", "theorem43"} & set(tables(subject))
