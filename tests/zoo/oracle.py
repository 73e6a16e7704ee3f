"""What the tables should say, from hooks and sums of its own: plain PyTorch, no code of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from animals import ZOO
from torch import Tensor, nn
from truth import product


def first(value: Any) -> Any:
    """The hidden state among what a module takes or yields; None for token ids."""
    if isinstance(value, Tensor):
        return value
    items = value.values() if isinstance(value, Mapping) else value
    return next((item for item in items if isinstance(item, Tensor) and item.is_floating_point()), None)


class Oracle:
    """The numbers of one row, one for each token or call, by (quantity, module)."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model, self.animal = model, ZOO[name]
        self.sums: dict[tuple[str, str], list[float]] = {}
        self.kept: list[tuple[str, Tensor]] = []

    @contextmanager
    def listening(self, batch: Mapping[str, Any], evaluation: bool = False) -> Iterator[None]:
        """Hooks for one forward (and its backward, which must end inside)."""
        animal, modules, handles = self.animal, dict(self.model.named_modules()), []
        masks = animal.masks(batch)

        def on(name: str, note: Callable[[Tensor, Tensor], None]) -> None:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
                if evaluation or (torch.is_grad_enabled() and self.model.training):
                    note(first(args if args else kwargs), first(out))

            handles.append(modules[name].register_forward_hook(hook, with_kwargs=True))

        for name in animal.names(animal.layers):
            on(name, lambda x, y, n=name: self._layer(n, x, y, masks, evaluation))
        if evaluation:
            for name in animal.names(animal.activations):
                place, entry = name.lstrip("<="), name.startswith("<")
                if name.startswith("="):
                    note = lambda m, args, n=place: self._activation(n, product(m, *args), {})  # noqa: E731
                    handles.append(modules[place].register_forward_pre_hook(note))
                    continue
                on(place, lambda x, y, n=place, entry=entry: self._activation(n, x if entry else y, masks))
            for name in animal.outputs:
                on(name, lambda x, y, n=name: self.kept.append((n, y.detach().clone())))
        else:
            for name in animal.names(animal.norms):
                on(name, lambda x, y, n=name: self._add("ln_input", n, x.detach().double().norm(dim=-1), masks))
        yield
        for handle in handles:
            handle.remove()
        for name, tensor in [] if evaluation else self.kept:
            if tensor.grad is not None:
                square = float(tensor.grad.double().square().sum())
                self.sums.setdefault(("activation_grad_norm", name), []).append(square)
        if not evaluation:
            self.kept = []

    def mean(self, table: str, name: str) -> float:
        numbers = self.sums[table, name]
        return sum(numbers) / len(numbers)

    def norm(self, table: str, name: str) -> float:
        return sum(self.sums[table, name]) ** 0.5

    def _layer(self, name: str, x: Tensor, y: Tensor, masks: Mapping[str, Tensor], evaluation: bool) -> None:
        if evaluation:
            a, b = x.double(), y.double()
            self._add("cosine_similarity", name, (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)), masks)
            return
        if y.requires_grad:
            y.retain_grad()
            self.kept.append((name, y))
        if name.endswith(".0") and x.requires_grad:
            x.retain_grad()
            self.kept.append((f"{stack_of(name)}.input", x))

    def _activation(self, name: str, a: Tensor, masks: Mapping[str, Tensor]) -> None:
        masks = {} if "experts" in name else masks
        self._add("nonzero_fraction", name, (a > 0).double().mean(-1), masks)
        rms = a.double().square().mean(-1, keepdim=True).sqrt()
        self._add("active_fraction", name, (a.abs() > 0.01 * rms).double().mean(-1), masks)

    def _add(self, table: str, name: str, values: Tensor, masks: Mapping[str, Tensor]) -> None:
        mask = next((m for place, m in masks.items() if name.startswith(place.split("*")[0])), None)
        if mask is None:  # outside the layers of any stack: that of the only stack, or the stack's it stands in
            own = [m for place, m in masks.items() if len(masks) == 1 or name.split(".")[0] == place.split(".")[0]]
            mask = own[0] if own else torch.ones_like(values, dtype=torch.bool)
        self.sums.setdefault((table, name), []).extend(values[mask].tolist())


def stack_of(layer: str) -> str:
    """``model.encoder`` of ``model.encoder.layers.3``."""
    return layer.rsplit(".", 2)[0]
