"""Three tables of an entry, from plain hooks on the modules that were named by hand; no code of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import handmade
import torch
from entries import Entry
from torch import Tensor, nn

Table = dict[str, float]


def _tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    items = value.values() if hasattr(value, "values") else value if isinstance(value, (tuple, list)) else ()
    return next((found for item in items if (found := _tensor(item)) is not None), None)


class Truth:
    """What one forward and backward in training mode, and one in eval mode, show."""

    def __init__(self, entry: Entry) -> None:
        self.entry, self.model = entry, entry.born()
        self.norms: dict[str, list[Tensor]] = {}
        self.inner: dict[str, list[Tensor]] = {}
        self.flowing: dict[str, list[Tensor]] = {}
        modules = dict(self.model.named_modules())
        self._paths = {module: name for name, module in modules.items()}
        handles = [modules[n].register_forward_hook(self._norm(n), with_kwargs=True) for n in entry.names(entry.norms)]
        ends = zip(entry.names(entry.layers), entry.names(entry.ends or entry.layers), strict=True)
        handles += [modules[end].register_forward_hook(self._layer(name)) for name, end in ends]
        with mock.patch.object(handmade, "tap", self._shown):
            entry.loss(self.model).backward()
        self.gradients = {n: None if p.grad is None else p.grad for n, p in self.model.named_parameters()}
        for handle in handles:
            handle.remove()
        places = entry.names(entry.activations)
        handles = [h for name in places for h in self._activation(modules[name.lstrip("<=")], name)]
        self.model.eval()
        with torch.no_grad(), mock.patch.object(handmade, "tap", self._shown):
            entry.loss(self.model)
        for handle in handles:
            handle.remove()

    @property
    def tables(self) -> dict[str, Table]:
        assert set(self.entry.names(self.entry.shown)) <= {*self.norms, *self.inner, *self.flowing}
        norm = {name: torch.cat([x.norm(dim=-1).flatten() for x in seen]) for name, seen in self.norms.items()}
        return {
            "ln_input": {name: float(values.mean()) for name, values in norm.items()},
            "activation_grad_norm": {
                name: float(sum(y.grad.double().square().sum() for y in seen if y.grad is not None)) ** 0.5
                for name, seen in self.flowing.items()
            },
            "activation_sparsity": {
                name.lstrip("<="): float(torch.cat([(a > 0).double().mean(-1).flatten() for a in seen]).mean())
                if seen and sum(map(torch.Tensor.numel, seen))
                else float("nan")  # an expert that got no token
                for name, seen in self.inner.items()
            },
        }

    def _shown(self, x: Tensor, name: str, owner: nn.Module, kind: str = "stream") -> Tensor:
        """In place of ``stabilitylab.tap``."""
        name = f"{self._paths[owner]}.{name}".lstrip(".")
        if kind == "norms" and self.model.training:
            self.norms.setdefault(name, []).append(x.detach().double())
        elif kind == "activations" and not self.model.training:
            self.inner.setdefault(name, []).append(x)
        elif kind == "stream" and self.model.training:
            x.retain_grad()
            self.flowing.setdefault(name, []).append(x)
        return x

    def _norm(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            x = _tensor(args if args else list(kwargs.values()))
            assert x is not None
            x = x.movedim(1, -1) if getattr(module, "data_format", "") == "channels_first" else x
            self.norms.setdefault(name, []).append(x.detach().double())

        return note

    def _layer(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, out: Any) -> None:
            y = _tensor(out)
            assert y is not None
            if y.requires_grad:
                y.retain_grad()
                self.flowing.setdefault(name, []).append(y)

        return note

    def _activation(self, module: nn.Module, name: str) -> list[Any]:
        seen = self.inner.setdefault(name, [])
        maps = any(isinstance(part, nn.Conv2d) for part in self.model.modules())

        def keep(value: Tensor) -> None:
            seen.append(value.movedim(1, -1) if maps and value.dim() == 4 and not name.startswith("<") else value)

        if name.startswith("="):
            return [module.register_forward_pre_hook(lambda m, args: keep(product(m, *args)))]
        if name.startswith("<"):
            return [module.register_forward_pre_hook(lambda m, args: keep(args[0]))]
        return [module.register_forward_hook(lambda m, args, out: keep(out))]


def product(experts: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """What enters the down projections, by its formula, for each token and each expert that it is sent to."""
    found = []
    for token, chosen in zip(x.flatten(0, -2), index, strict=True):
        for expert in chosen.tolist():
            if hasattr(experts, "gate_up_proj_bias"):  # gpt-oss
                inner = token @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
                gate, up = inner[::2].clamp(max=7.0), inner[1::2].clamp(-7.0, 7.0)
                found.append((up + 1) * gate * torch.sigmoid(1.702 * gate))
            else:
                gate, up = (experts.gate_up_proj[expert] @ token).chunk(2)
                found.append(torch.nn.functional.silu(gate) * up)
    return torch.stack(found)


@contextmanager
def unfused() -> Iterator[None]:
    """``nn.Transformer`` without its fused path in eval mode, which goes past its modules."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
