"""What initialisation tells, against gradients, updates and perturbations taken independently in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recommend_cases import CPU, config_of, dataset, model_of

from stabilitylab.models import Transformer
from stabilitylab.models.initialisation import named_normal
from stabilitylab.recommend.initialisation import at_start, gradient_decades, worst
from stabilitylab.schema import Cells, Row, Table

ARCHS = ("postln", "preln", "admin", "branchnorm", "subln", "tfixup", "rezero")
MATRICES = {"q", "k", "v", "out", "fc1", "fc2"}


def backward(model: Transformer) -> dict[str, list[float]]:
    """Leaves dE/dtheta in the model; stack -> ||dE/dx|| at the output of each layer."""
    outputs: dict[str, list[torch.Tensor]] = {name: [] for name in model.stacks}

    def keep(name: str, out: object) -> None:
        x = out if isinstance(out, torch.Tensor) else out[0]  # type: ignore[index]
        x.retain_grad()
        outputs[name].append(x)

    handles = [
        layer.register_forward_hook(lambda _m, _i, out, name=name: keep(name, out))
        for name, stack in model.stacks.items()
        for layer in stack.layers
    ]
    batch = dataset().micro_batch(0)
    counted = batch.weight > 0
    F.cross_entropy(model(**batch.inputs)[counted], batch.labels[counted], label_smoothing=0.1).backward()
    for handle in handles:
        handle.remove()
    return {name: [0.0 if x.grad is None else float(x.grad.norm()) for x in own] for name, own in outputs.items()}


@torch.no_grad()
def output(model: Transformer) -> torch.Tensor:
    batch = dataset().micro_batch(0)
    return model.hidden(**batch.inputs)[batch.inputs["target_mask"]]


@pytest.mark.parametrize("arch", ARCHS)
def test_each_number_is_the_one_that_its_column_says(arch: str) -> None:
    config = config_of(arch)
    numbers, evidence = at_start(config, dataset(), CPU)

    model = model_of(config, torch.float64)
    norms = backward(model)
    expected = {
        stack: math.log10(max(values) / min(values))
        for stack, values in norms.items()
        if any(value > 0 for value in values)
    }
    assert evidence["gradient_by_stack"] == pytest.approx(expected, rel=1e-7, abs=1e-9)
    assert numbers["gradient"] == max(evidence["gradient_by_stack"].values())
    assert ("encoder" in expected) == (arch != "rezero")

    before, theta = output(model), [p.detach().clone() for p in model.parameters()]
    unit = math.sqrt(2) * float(before.norm(dim=-1).mean())
    if evidence["has_norms"] and arch != "admin":  # Admin's is of gain 1 too, but let one arch go without the claim
        assert unit == pytest.approx(math.sqrt(2 * 16), rel=1e-4)
    torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-8).step()
    assert numbers["update"] == pytest.approx(float((output(model) - before).norm(dim=-1).mean()) / unit, rel=1e-6)

    moved = [p.detach().clone() for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    roles = model.parameter_roles()
    inside = {names.index(name) for role, (name, _) in roles.items() if role.endswith(".embedding")}
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            parameter.copy_(moved[place] if place in inside else theta[place])
    change = float((output(model) - before).norm(dim=-1).mean())
    assert numbers["update_embedding"] == pytest.approx(change / unit, rel=1e-6)

    with torch.no_grad():
        for parameter, own in zip(model.parameters(), theta, strict=True):
            parameter.copy_(own)
        for role, (name, rows) in roles.items():
            if role.rpartition(".")[2] in MATRICES:
                weight = model.get_parameter(name)[slice(None) if rows is None else rows]
                weight += 1e-4 * named_normal(3, f"{role}.perturbation", weight.shape).double().sign()
    x, y = (out / out.std(dim=-1, correction=0, keepdim=True) for out in (before, output(model)))
    assert numbers["sensitivity"] == pytest.approx(float((y - x).square().mean().sqrt()), rel=1e-6)


def table(*values: tuple[str, int, str, float]) -> tuple[Table, Cells]:
    rows = tuple(Row(f"{stack}.{layer}.{sub}", stack, layer, sub) for stack, layer, sub, _ in values)
    numbers = np.array([[value] for *_, value in values])
    return Table("activation_grad_norm", ("value",), rows), Cells(numbers, np.zeros(len(rows), dtype=bool))


def test_decades_are_of_layer_outputs_and_tell_no_gradient_from_one_that_ends() -> None:
    own = table(
        *(("encoder", 0, "input", 1e-9), ("encoder", 1, "attn", 7.0), ("encoder", 1, "ffn", 1e-3)),
        *(("encoder", 2, "attn", 1e-7), ("encoder", 2, "ffn", 10.0)),
    )
    assert gradient_decades(own) == pytest.approx({"encoder": 4.0})
    assert gradient_decades(table(("encoder", 1, "ffn", 0.0), ("encoder", 2, "ffn", 0.0))) == {}
    assert gradient_decades(table(("decoder", 1, "ffn", 0.0), ("decoder", 2, "ffn", 2.0))) == {"decoder": math.inf}
    found = gradient_decades(table(("decoder", 1, "ffn", math.nan), ("decoder", 2, "ffn", 2.0)))
    assert math.isnan(found["decoder"])


def test_the_worst_stack_counts() -> None:
    assert worst({"encoder": 0.5, "decoder": 2.0}) == 2.0
    assert math.isnan(worst({"encoder": math.nan, "decoder": 2.0}))
    assert math.isnan(worst({}))
