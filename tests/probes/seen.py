"""What modules of a model yield, and the tables of a reference or training pass over several batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from probe_toys import ListSink, Toy, batch, loss_of, masks
from torch import Tensor, nn

from stabilitylab.probes import Watcher

Batch = dict[str, Tensor]


def batches(count: int) -> list[Batch]:
    """Of different sizes, each with padding."""
    return [batch(seed, 3 + seed) for seed in range(count)]


def reference_of(model: nn.Module, several: Sequence[Batch], probe: str) -> ListSink:
    """Row 0 of a reference pass over these batches, each with its own masks."""
    sink, state = ListSink(), {"now": several[0]}

    def reference() -> None:
        for state["now"] in several:
            model(**state["now"])

    watcher = Watcher(model, sink, probes=probe, mask=lambda: masks(state["now"]), reference=reference)
    watcher.step()
    watcher.flush()
    watcher.close()
    return sink


def training_of(model: Toy, several: Sequence[Batch], probe: str) -> ListSink:
    """Row 0 of a training pass with these micro-batches."""
    sink, state = ListSink(), {"now": several[0]}
    watcher = Watcher(model, sink, probes=probe, every=1, mask=lambda: masks(state["now"]))
    for state["now"] in several:
        loss_of(model, state["now"]).backward()
    watcher.step()
    watcher.flush()
    watcher.close()
    return sink


def seen_by(
    model: nn.Module, several: Iterable[Batch], names: Mapping[str, str] | Iterable[str]
) -> dict[str, list[Tensor]]:
    """Of each module the float64 value of each call: its output, or its "input" where ``names`` says so."""
    takes: Mapping[str, str] = names if isinstance(names, Mapping) else dict.fromkeys(names, "output")
    values: dict[str, list[Tensor]] = {name: [] for name in takes}

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            values[name].append((args[0] if takes[name] == "input" else output).detach().double())

        return keep

    handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in takes]
    with torch.no_grad():
        for inputs in several:
            model(**inputs)
    for handle in handles:
        handle.remove()
    return values


def real(several: Iterable[Batch], stack: str) -> list[Tensor]:
    return [masks(inputs)[stack] for inputs in several]


def real_tokens(several: Iterable[Batch], stack: str, values: Sequence[Tensor]) -> list[list[float]]:
    """The vectors of all real tokens of all batches, as plain lists."""
    return [row for value, mask in zip(values, real(several, stack), strict=True) for row in value[mask].tolist()]
