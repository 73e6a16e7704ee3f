"""What probes move and hold of a wide model: copies where there is room, and no copy of everything on the way."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stabilitylab.environment import RUNS_PER_DEVICE
from stabilitylab.probes.library.activations import ActivationSparsity
from stabilitylab.probes.parameters import copies
from stabilitylab.probes.parameters.pieces import Parameters
from stabilitylab.probes.parameters.processes import ALONE
from stabilitylab.probes.parameters.squares import CHUNK, WideNorm, flattened

GIB = 2**30


class Traffic(TorchDispatchMode):
    """Bytes that operators read and write, and the largest tensor that one of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.largest = 0
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns):
            return result  # a view
        self.names.append(func._schema.name)
        made = [leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        read = [leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.bytes += sum(made) + sum(read)
        self.largest = max(self.largest, *made, 0)
        return result


def traffic(work: Callable[[], Any]) -> Traffic:
    with Traffic() as found:
        work()
    return found


def gpu(monkeypatch: pytest.MonkeyPatch, *, free: float, whole: float, held: float, now: float, most: float) -> None:
    """A GPU with so many GiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * GIB), int(whole * GIB)))
    for name, value in {"memory_reserved": held, "memory_allocated": now, "max_memory_allocated": most}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: int(value * GIB))


def weights(gib: float) -> Any:
    return [SimpleNamespace(is_cuda=True, nbytes=int(gib * GIB / 2), device=torch.device("cuda", 0))] * 2


def test_copies_lie_beside_the_weights_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """744 million parameters, 2.8 GiB, on 139 GiB: an update took 50 GiB so far, 6 of which stay."""
    gpu(monkeypatch, free=85, whole=139, held=52, now=6, most=50)
    assert not copies.on_host(weights(2.8))
    gpu(monkeypatch, free=25, whole=80, held=52, now=6, most=50)
    assert copies.on_host(weights(2.8))  # another shape of batch may take 44 more
    gpu(monkeypatch, free=70, whole=80, held=8, now=6, most=7)
    assert not copies.on_host(weights(2.8))
    monkeypatch.setenv(RUNS_PER_DEVICE, "4")  # then 20 GiB are this run's
    assert not copies.on_host(weights(2.8))
    monkeypatch.setenv(RUNS_PER_DEVICE, "5")
    assert copies.on_host(weights(2.8))


def test_a_cpu_keeps_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: pytest.fail("there is no GPU"))
    assert not copies.on_host([torch.ones(3), torch.empty(2**30, device="meta")])


def meta(entries: int, tensors: int) -> Parameters:
    found = Parameters.__new__(Parameters)
    own = [torch.nn.Parameter(torch.empty(entries, device="meta")) for _ in range(tensors)]
    for parameter in own:
        parameter.grad = torch.empty_like(parameter)
    found._own, found._ids, found._ranks, found._sharded = own, frozenset(map(id, own)), ALONE, False
    found.optimizers = (SimpleNamespace(param_groups=[{"params": own, "eps": 1e-8}]),)  # type: ignore[assignment]
    return found


@pytest.mark.parametrize(("entries", "tensors", "most"), [(1 << 26, 4, 20.1), (1 << 15, 512, 28.1)])
def test_the_share_under_eps_makes_no_copy_of_a_large_gradient(entries: int, tensors: int, most: float) -> None:
    """Bytes an entry, of float32: reading it takes 4; small gradients are gathered first."""
    parameters = meta(entries, tensors)
    found = traffic(parameters.share_under_eps)
    assert found.bytes / (entries * tensors) < most
    assert found.largest <= 4 * CHUNK["cuda"]


def test_entries_come_once_each_in_bounded_pieces() -> None:
    torch.manual_seed(0)
    limit = CHUNK["cpu"]
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.tensor([3.0, 4.0]), (9,), check_invariants=True)
    tensors = [torch.randn(n) for n in (3, limit, 2 * limit + 5, 7, limit - 1)] + [torch.randn(400, 300).T, sparse]
    pieces = list(flattened(tensors))
    assert max(len(piece) for piece in pieces) < 2 * limit
    entries = torch.cat([t.coalesce().values() if t.is_sparse else t.reshape(-1) for t in tensors])
    assert torch.equal(torch.cat(pieces).sort().values, entries.sort().values)
    assert not list(flattened([]))


def test_a_wide_norm_on_a_gpu_is_that_of_a_list() -> None:
    """The norm of one tensor with a dtype makes the whole copy in float64 first; that of a list does not."""
    norm, elsewhere = WideNorm(), torch.empty(1 << 20, device="meta")
    assert traffic(lambda: norm(elsewhere)).names == ["aten::_foreach_norm"]
    large = torch.randn(1 << 19) * 1e-30
    torch.testing.assert_close(norm(large), large.double().norm(), rtol=1e-12, atol=0)


def test_sparsity_counts_in_float32_and_is_exact() -> None:
    torch.manual_seed(0)
    y = torch.randn(2, 3, 1000).relu()
    numbers: Any = ActivationSparsity().measure(None, None, y, torch.ones(2, 3))  # type: ignore[arg-type]
    assert torch.equal(numbers["nonzero_fraction"], (y > 0).double().mean(dim=-1))
    rms = y.double().square().mean(dim=-1, keepdim=True).sqrt()
    assert torch.equal(numbers["active_fraction"], (y > 0.01 * rms).double().mean(dim=-1))
    assert numbers["nonzero_fraction"].dtype is torch.float64
    seen: list[torch.dtype] = []

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func._schema.name == "aten::sum":
                seen.append(result.dtype)
            return result

    with Sums():
        ActivationSparsity().measure(None, None, y, torch.ones(2, 3))  # type: ignore[arg-type]
    assert seen == [torch.float32] * 2
