"""Every parameter of the model counts once, or the watch is refused with the names of those that would not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from probe_toys import ListSink
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from stabilitylab.errors import UsageError
from stabilitylab.probes import Watcher


class Named(nn.Module):
    """Children called as wrappers call what they hold."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in names:
            self.add_module(name, nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = torch.tanh(child(x))
        return x


def watched(model: nn.Module, **options: Any) -> tuple[ListSink, Watcher]:
    sink = ListSink()
    with Watcher(model, sink, probes="grad_norm", every=1, strict=True, **options) as watcher:
        loss = model(torch.randn(4, 3, dtype=torch.float64)).square().mean()
        loss.backward()
        watcher.step(loss=loss)
    return sink, watcher


@pytest.mark.parametrize("names", [["module", "other"], ["other", "module"], ["_orig_mod", "a"], ["a", "module", "b"]])
@pytest.mark.parametrize("around", [None, AveragedModel])
def test_a_child_called_module_hides_no_sibling(names: list[str], around: Any) -> None:
    model = Named(*names).double()
    model = model if around is None else around(model)
    sink, watcher = watched(model)
    total = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    assert total > 0
    assert sink.row(0)[0]["grad_norm_total"] == pytest.approx(total, rel=1e-12)
    assert set(sink.column(0, "grad_norm", "value")) == set(names)
    assert watcher.parameters.coverage == (2 * len(names), 2 * len(names))


class Hoarder(Named):
    """Has a module in a plain list, which torch does not see, and hands its parameters out all the same."""

    def __init__(self) -> None:
        super().__init__("a")
        self.hoard = [nn.Linear(3, 3)]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from super().parameters(recurse)
        for module in self.hoard:
            yield from module.parameters()


class Telling(Hoarder):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().named_parameters(*args, **kwargs)
        yield from self.hoard[0].named_parameters("hoard.0")


@pytest.mark.parametrize(("kind", "named"), [(Hoarder, "one without a name"), (Telling, r"hoard\.0\.weight")])
def test_parameters_that_no_module_registers_are_refused_by_name(kind: type[nn.Module], named: str) -> None:
    sink = ListSink()
    with pytest.raises(UsageError, match=rf"no module registers \({named}.*children of the model"):
        Watcher(kind(), sink, probes="grad_norm")
    assert sink.tables == {}


class WithRoles(Named):
    def __init__(self, roles: dict[str, tuple[str, Any]]) -> None:
        super().__init__("a")
        self.roles = roles

    def parameter_roles(self) -> dict[str, tuple[str, Any]]:
        return self.roles


BIAS = {"encoder.0.self_attn.out.bias": ("a.bias", None)}


@pytest.mark.parametrize(
    ("roles", "fault"),
    [
        ({"encoder.0.self_attn.q": ("a.weight", slice(0, 2))}, "leaves out a part of 'a.weight'"),
        (
            {"encoder.0.self_attn.q": ("a.weight", slice(0, 2)), "encoder.0.self_attn.k": ("a.weight", slice(1, 3))},
            "counts a part of 'a.weight' twice",
        ),
        (
            {"encoder.0.self_attn.q": ("a.weight", None), "encoder.0.ffn.fc1": ("a.weight", None)},
            "counts a part of 'a.weight' twice",
        ),
        ({}, "leaves out 'a.weight'"),
        ({"encoder.0.self_attn.q": ("b.weight", None)}, "names 'b.weight', which named_parameters"),
    ],
)
def test_roles_that_leave_out_or_double_entries_are_refused(roles: dict[str, Any], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        Watcher(WithRoles(roles | BIAS), ListSink(), probes="grad_norm")


def test_roles_that_cut_a_parameter_into_parts_are_fine() -> None:
    roles = {"encoder.0.self_attn.q": ("a.weight", slice(0, 2)), "encoder.0.self_attn.k": ("a.weight", slice(2, 3))}
    _, watcher = watched(WithRoles(roles | BIAS).double())
    assert watcher.parameters.coverage == (2, 2)


def test_a_child_called_parameter_roles_is_no_method() -> None:
    sink, _ = watched(Named("parameter_roles", "get_output_embeddings").double())
    assert set(sink.column(0, "grad_norm", "value")) == {"parameter_roles", "get_output_embeddings"}
