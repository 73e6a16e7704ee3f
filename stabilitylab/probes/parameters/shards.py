"""Activations under tensor parallelism: the part of a value that this rank has, and the gathering of the whole value.

A DTensor says which part it is. Plain tensors do not. Behind ColwiseParallel a value holds a part of the features: the
placements of the weights around the value tell which. Under SequenceParallel the residual stream holds a part of the
tokens: the norms of its layers tell which, since they get a DTensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..places.attending import attends
from ..places.copied import Calling
from ..places.naming import lies_in
from ..places.sites import Site, Sites
from .layouts import Cut, whole

KEPT = 256  # shapes of shards that are remembered


class ActivationShards:
    """The activations of a tensor-parallel model. ``sites``: its places. ``cuts``: the cuts of its weights."""

    def __init__(self, sites: Sites, cuts: Mapping[torch.Tensor, Cut]) -> None:
        self._modules = sites.modules
        self._cuts = {path: cut for path, module in sites.modules.items() if (cut := _cut(module, cuts))}
        self._paths = {module: path for path, module in sites.modules.items()}
        self._stacks = {site.module: site.stack for site in sites.norms}
        self._activations = {site.module for site in sites.activations}
        self._tokens: dict[tuple[str, torch.Size], tuple[torch.Size, Any]] = {}  # shard -> whole shape, DTensor
        self._handed = set(self._heads(sites.attentions))
        norms = list(self._norms(cuts))
        self._hooks = [module.register_forward_hook(Calling(self._note)) for module in norms]
        self._telling = {module for module in norms if not lies_in(self._paths[module], self._handed)}
        self._told = False

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def unsure(self, value: Any) -> bool:
        """True if the tokens of a plain tensor may be spread over the ranks, and no norm was called yet that tells."""
        return bool(self._telling) and not self._told and not hasattr(value, "placements")

    def by_heads(self, name: str) -> bool:
        """True if each rank has other attention heads at a site of that name."""
        return lies_in(name, self._handed)

    def whole(self, module: nn.Module, stack: str, value: Any, take: str) -> Any:
        """Return all of a value that enters (``take="input"``) or leaves a module, or of its gradient. The parts of
        other ranks are fetched, so every rank must call this."""
        if not isinstance(value, torch.Tensor):
            return value
        with torch.no_grad():
            tensor: Any = value.detach()
            if (layout := self._layout(module, stack, tensor, take)) is not None:
                tensor = _joined(tensor, *layout)
            return whole(tensor)

    def shape(self, module: nn.Module, stack: str, value: torch.Tensor, take: str) -> torch.Size:
        """Return the shape of the whole value."""
        layout = self._layout(module, stack, value, take)
        return value.shape if layout is None else layout[0]

    def all_heads(self, site: Site, numbers: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the heads of all ranks, (heads, ...), given those of this rank's heads."""
        cut = next((cut for path, cut in self._cuts.items() if path.startswith(f"{site.name}.")), None)
        if cut is None or not self.by_heads(site.name):
            return numbers
        return _joined(numbers, torch.Size((numbers.shape[0] * cut.mesh.size(), *numbers.shape[1:])), cut.mesh, 0)

    def _layout(self, module: nn.Module, stack: str, value: Any, take: str) -> tuple[torch.Size, Any, int] | None:
        """Return, for a plain tensor that is a part, the shape of the whole, the mesh, and the dimension that is cut;
        else None."""
        if hasattr(value, "placements"):
            return None
        path = self._paths.get(module, "")
        width = value.shape[-1] if value.dim() else 0
        for cut, full, part in self._widths(path, module, take):
            if width == part != full:
                return torch.Size((*value.shape[:-1], full)), cut.mesh, value.dim() - 1
            if width == full:
                break
        if (known := self._tokens.get((stack, value.shape))) is not None:
            return known[0], known[1].device_mesh, known[1].placements[-1].dim
        return None

    def _widths(self, path: str, module: nn.Module, take: str) -> Iterator[tuple[Cut, int, int]]:
        """Yield the widths, over all ranks and on this rank, that a value at a module may have. At a linear they are
        its own: that of its input if the columns of the weight are cut, that of its output if the rows are. At an
        activation they are the widths that the linears around it in the same block lead to and from."""
        if isinstance(module, nn.Linear):
            if (cut := self._cuts.get(path)) is not None and cut.dim == (1 if take == "input" else 0):
                yield _width(cut, module, cut.dim)
            return
        home = path if module in self._activations else ""
        while home:
            home = home.rpartition(".")[0]
            inside = [p for p, cut in self._cuts.items() if p.startswith(f"{home}.") and cut.dim in (0, 1)]
            inside = [p for p in inside if isinstance(self._modules[p], nn.Linear)]
            if inside:
                for linear in sorted(inside, key=lambda p: self._cuts[p].dim != 1):  # the way back comes first
                    yield _width(self._cuts[linear], self._modules[linear], self._cuts[linear].dim)
                return

    def _norms(self, cuts: Mapping[torch.Tensor, Cut]) -> Iterable[nn.Module]:
        """Return the norms that parallelize_module has made part of its plan."""
        return [module for module in self._stacks if any(parameter in cuts for parameter in module.parameters())]

    def _heads(self, attentions: Iterable[Site]) -> Iterator[str]:
        for site in attentions:
            inside = [cut for path, cut in self._cuts.items() if path.startswith(f"{site.name}.")]
            if attends(site.module) and any(cut.dim in (0, 1) for cut in inside):
                yield site.name

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        """Remember the input of a norm of which each rank has some tokens: a plain value of the same local shape is the
        same part."""
        self._told |= module in self._telling
        given: Any = args[0] if args else None
        placements = getattr(given, "placements", ())
        if placements and placements[-1].is_shard() and placements[-1].dim < given.dim() - 1:
            if len(self._tokens) > KEPT:
                self._tokens.clear()
            self._tokens[self._stacks[module], given.to_local().shape] = given.shape, given


def _cut(module: nn.Module, cuts: Mapping[torch.Tensor, Cut]) -> Cut | None:
    weight = module._parameters.get("weight")
    return None if weight is None else cuts.get(weight)


def _width(cut: Cut, linear: Any, dim: int) -> tuple[Cut, int, int]:
    """Return the cut, and the features of a linear along the dimension that is cut: over all ranks, and on this
    rank."""
    whole = linear.out_features if dim == 0 else linear.in_features
    size, rank = cut.mesh.size(), cut.mesh.get_local_rank()
    length = -(-whole // size)  # torch.chunk cuts like this
    return cut, whole, max(0, min(length, whole - rank * length))


def _joined(tensor: torch.Tensor, shape: torch.Size, mesh: Any, dim: int) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Shard

    stride = torch.empty(shape, device="meta").stride()
    with torch.no_grad():
        part = DTensor.from_local(tensor.contiguous(), mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
        return part.full_tensor()
