"""Models whose forward changes them, in eval mode too, each in a way of its own; and a loop around any of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from probe_toys import ListSink
from torch import Tensor, nn

from stabilitylab.probes import Watcher

WIDTH = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.norm(x)))


class Plain(nn.Module):
    """Layers, and a place where a subclass changes something at each forward."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:  # (B, D)
        x = x + self.change(x.detach())
        for layer in self.layers:
            x = layer(x)
        return x

    @torch.no_grad()
    def change(self, x: Tensor) -> Tensor | float:
        return 0.0


class Rescaled(Plain):
    """As RWKV: in eval mode it divides weights of later layers in place, and multiplies them at the next training."""

    def __init__(self) -> None:
        super().__init__(layers=8)
        self.rescale_every, self.are_rescaled = 6, False

    @torch.no_grad()
    def change(self, x: Tensor) -> float:
        if self.training == self.are_rescaled:
            for number, layer in enumerate(self.layers):
                factor = 3.0 ** (number // self.rescale_every)
                layer.out.weight.mul_(factor) if self.training else layer.out.weight.div_(factor)
            self.are_rescaled = not self.training
        return 0.0


class Queue(Plain):
    """As MoCo: keys are written into a buffer, and the position is a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(6, WIDTH), persistent=False)
        self.at = 0

    @torch.no_grad()
    def change(self, x: Tensor) -> Tensor:
        self.queue[self.at] = x.mean(0)
        self.at = (self.at + 1) % len(self.queue)
        return self.queue.mean(0)


class Momentum(Plain):
    """A momentum encoder that no module registers, since it stands in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [nn.Linear(WIDTH, WIDTH)]

    @torch.no_grad()
    def change(self, x: Tensor) -> Tensor:
        self.teacher[0].weight.mul_(0.9).add_(self.layers[0].out.weight, alpha=0.1)
        return self.teacher[0](x)


class Data(Plain):
    """A write that autograd's version counter does not see."""

    @torch.no_grad()
    def change(self, x: Tensor) -> float:
        self.layers[0].out.weight.data.mul_(1.01)
        return 0.0


class Outside(Plain):
    """Tensors outside the state dict: an attribute, in a list of a dictionary, of an object, and an array of numpy."""

    class Average:
        def __init__(self) -> None:
            self.mean, self.count = torch.zeros(WIDTH), 0

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(WIDTH)
        self.box: dict[str, Any] = {"old": [torch.zeros(WIDTH), torch.ones(2)]}
        self.average = self.Average()
        self.array = np.zeros(WIDTH, dtype=np.float32)

    @torch.no_grad()
    def change(self, x: Tensor) -> Tensor:
        self.average.count += 1
        for tensor in (self.memory, self.box["old"][0], self.average.mean, torch.from_numpy(self.array)):
            tensor.lerp_(x.mean(0), 1 / (1 + self.average.count))
        return (self.memory + self.box["old"][0] + self.average.mean + torch.from_numpy(self.array)) / 4


class Inference(Plain):
    """A tensor that was made in inference mode, which counts no versions."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.scale = torch.ones(WIDTH)

    def change(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            self.scale.mul_(1.05)
        return self.scale.clone()


class Rebound(Plain):
    """Nothing is written in place: attributes are bound anew, a list grows, a generator moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.calls, self.first = torch.zeros(WIDTH), 0, None
        self.history: list[Any] = []
        self.recent: deque[Any] = deque(maxlen=2)
        self.noise = torch.Generator().manual_seed(5)
        self.drawn = np.random.default_rng(5)

    @torch.no_grad()
    def change(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.first = x.mean(0) if self.first is None else self.first
        self.mean = self.mean + x.mean(0) / self.calls
        self.history.append(self.mean)
        self.recent.append(self.calls)
        noise = torch.randn(WIDTH, generator=self.noise) * float(self.drawn.random())
        return self.first + torch.stack(self.history).mean(0) + noise + sum(self.recent)


class ReboundBuffer(Plain):
    """A buffer is bound anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    @torch.no_grad()
    def change(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.mean


# what the first pass changes in place, and that ends the pass
CHANGING: dict[str, tuple[type[Plain], list[str]]] = {
    "weights rescaled, as RWKV does": (Rescaled, ["layers.6.out.weight", "layers.7.out.weight"]),
    "a queue": (Queue, ["queue"]),
    "a momentum encoder in a list": (Momentum, ["teacher[0].weight"]),
    ".data": (Data, ["layers.0.out.weight"]),
    "tensors outside buffers": (Outside, ["memory", "box['old'][0]", "average.mean", "array"]),
    "an inference tensor": (Inference, ["scale"]),
    "a buffer bound anew": (ReboundBuffer, ["mean"]),
}


def inputs(step: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))


def train(
    model: Plain,
    watch: Callable[[torch.optim.Optimizer], Watcher] | None,
    steps: int = 6,
    feed: Callable[[int], Any] = inputs,
) -> dict[str, Any]:
    """A loop, watched or not; returns what both must have alike."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    watcher = watch(optimizer) if watch else None
    for step in range(steps):
        loss = model(feed(step)).square().mean()
        loss.backward()
        if watcher is not None:
            watcher.step(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if watcher is not None:
        watcher.finish()
        watcher.close()
    model.train()
    with torch.no_grad():
        after = [model(inputs(100 + more)) for more in range(2)]  # which shows any state that is not compared by name
    return {"losses": losses, "state": model.state_dict(), "after": after, "random": torch.get_rng_state()}


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if both runs left the same bits."""
    pairs = [*zip(one["losses"], other["losses"], strict=True), *zip(one["after"], other["after"], strict=True)]
    pairs += [(one["state"][name], other["state"][name]) for name in one["state"].keys() | other["state"].keys()]
    return all(torch.equal(a, b) for a, b in [*pairs, (one["random"], other["random"])])


def watching(model: Plain, sink: ListSink, **options: Any) -> Callable[[torch.optim.Optimizer], Watcher]:
    given: dict[str, Any] = {"probes": "output_norm,grad_norm", "every": 1, "update_every": 1}
    given["reference"] = "first batch"
    return lambda optimizer: Watcher(model, sink, optimizer=optimizer, **(given | options))
