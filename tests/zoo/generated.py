"""Random module graphs: names that mean something elsewhere, any order of registration, equal sizes, tied weights,
lists, dicts, shared and unused blocks, odd parameters. One seed makes one model, always the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

BATCH, TOKENS, ROWS = 2, 4, 7
# fmt: off
NAMES = (
    "module", "experts", "norm", "layers", "layer", "h", "block", "blocks", "gate", "router", "attn", "q", "k", "v",
    "o", "qkv", "mlp", "w1", "w2", "w3", "fc1", "fc2", "up", "down", "head", "stage", "stages", "_orig_mod",
    "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "input", "output", "residual", "branch", "shortcut",
    "scaled_branch", "act", "proj", "inner", "encoder", "decoder", "embed", "weight", "bias", "parameter_roles",
    "get_output_embeddings", "data_format", "shared_experts", "heads", "classifier", "switch", "logits", "dropout",
    "a", "b",
)
CLASSES = (
    "Block", "Layer", "Stage", "Expert", "Experts", "Router", "TopKGate", "Norm", "AttentionBlock", "Attention",
    "MultiHeadAttention", "AttentionDecoderLayer", "Mixer", "MLP", "MoE", "Wrapper", "DistributedDataParallel",
    "OptimizedModule", "Model", "GELU", "Encoder", "Head",
)
# fmt: on


Step = Callable[[Any, list[Tensor]], Tensor]  # of a graph and its registers


class Graph(nn.Module):
    """Runs its steps in turn; a register holds the value of each."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for step in self.steps:
            values.append(step(self, values))
        return values[-1]


class Tail(Graph):
    """Yields a tuple whose first floating tensor is its value."""

    def forward(self, x: Tensor) -> Any:
        return torch.arange(3), super().forward(x), None


class Attends(nn.Module):
    def __init__(self, width: int, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.add_module(name, nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._modules[name](x) for name in self.names[:3])  # pyright: ignore
        return self._modules[self.names[3]](F.scaled_dot_product_attention(q, k, v))  # pyright: ignore


class TorchAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, x, x, need_weights=False)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


class ScaleNorm(nn.Module):
    """One gain for all features, a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.norm(dim=-1, keepdim=True) + 1e-3)


class LayerNorm2d(nn.LayerNorm):
    """Of features that stand in dimension 1."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Maps(nn.Module):
    """Calls a module on (batch, features, tokens)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.conv = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class FeedForward(nn.Module):
    """``down(act(up(x)))``, or gated ``down(act(gate(x)) * up(x))``; registered in any order in
    which widths or numbers tell them apart."""

    def __init__(self, draw: random.Random, width: int, inner: int) -> None:
        super().__init__()
        names = draw.choice(
            [("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"), ("fc1", "", "fc2"), ("a", "", "b")]
        )
        self.gate, self.up, self.down = names
        sizes = {self.gate: (width, inner), self.up: (width, inner), self.down: (inner, width)}
        order = [name for name in names if name]
        draw.shuffle(order)
        for name in order if self.up or self.down == "fc2" else [self.gate, self.down]:
            self.add_module(name, nn.Linear(*sizes[name], bias=draw.random() < 0.5))
        if draw.random() < 0.5:
            self.act = draw.choice([nn.SiLU, nn.GELU, nn.ReLU])()

    @property
    def way_back(self) -> nn.Linear:
        return self._modules[self.down]  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        inner = getattr(self, "act", F.relu)(self._modules[self.gate](x))  # pyright: ignore
        inner = inner * self._modules[self.up](x) if self.up else inner  # pyright: ignore
        return self.way_back(inner)


class LowRank(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, 1), nn.Linear(1, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.right(self.left(x))


class Bag(nn.Module):
    """Parameters without modules: in a list, in a dict, without dimensions or entries, of whole and complex numbers."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(width)) for _ in range(draw.randint(1, 3))])
        self.named = nn.ParameterDict({"module": nn.Parameter(torch.randn(width, width))})
        self.single = nn.Parameter(torch.tensor(0.7))
        self.waves = nn.Parameter(torch.randn(width, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, width))
        self.fixed = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
        self.left_over = nn.Parameter(torch.randn(2, 3, 4)) if draw.random() < 0.5 else None

    def forward(self, x: Tensor) -> Tensor:
        mixed = (x * self.rows[0] + self.empty.sum()) @ self.named["module"] * self.single
        return (mixed * self.waves).real


class LookUp(nn.Module):
    """Adds an embedding of the position; a table may have as many rows as a list has layers."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1]) % self.table.num_embeddings)


class Generator:
    """Draws one model; ``blocks``: the feed-forward blocks in it."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.width = self.draw.choice([2, 3, 4, 6])
        self.depth = self.draw.choice([1, 2, 3, self.width])
        self.ids = self.draw.random() < 0.3
        self.sparse = self.ids and self.draw.random() < 0.2
        self.left = self.draw.randint(4, 24)  # how many modules may still be made
        self.made: list[nn.Module] = []
        self.blocks: list[FeedForward] = []

    def model(self) -> nn.Module:
        inner = self.graph(2, root=True)
        trained = [parameter for parameter in inner.parameters() if parameter.is_floating_point()]
        for parameter in trained[1:]:
            if self.draw.random() < 0.1:
                parameter.requires_grad_(False)
        self._tie(inner)
        how = self.draw.random()
        if how < 0.1:
            return checkpoint_wrapper(inner)
        return AveragedModel(inner) if how < 0.2 else inner

    def batch(self) -> Tensor:
        draw = torch.Generator().manual_seed(self.draw.randint(0, 9999))
        if self.ids:
            return torch.randint(0, ROWS, (BATCH, TOKENS), generator=draw)
        return torch.randn(BATCH, TOKENS, self.width, generator=draw)

    def graph(self, deep: int, root: bool = False) -> Graph:
        draw = self.draw
        kind = Tail if not root and draw.random() < 0.15 else Graph
        made: Graph = type(draw.choice(CLASSES), (kind,), {})()
        children: dict[str, nn.Module | None] = {}
        names = draw.sample(NAMES, len(NAMES))
        steps: list[Step] = []

        def held(child: nn.Module | None) -> str:
            children[name] = child
            return name

        if root and self.ids:
            name = names.pop()
            steps.append(called(held(nn.Embedding(ROWS, self.width, sparse=self.sparse)), -1))
        for _ in range(draw.randint(2, 5) if root else draw.randint(1, 3)):
            name, source = names.pop(), draw.randint(-min(3, len(steps) + (not (root and self.ids))), -1)
            source = source if len(steps) + 1 + source >= (1 if root and self.ids else 0) else -1
            step = draw.random()
            if step < 0.1:
                held(draw.choice([None, self.child(0), nn.Linear(self.width, self.depth), nn.ModuleList()]))  # unused
                continue
            if step < 0.4 and deep and self.left > 0:
                steps.append(in_turn(held(self.many(deep - 1)), source))
            elif 0.4 <= step < 0.5:
                gate = names.pop()
                experts = self.many(0, experts=True)
                children[gate] = nn.Linear(self.width, len(list(experts.children())) or 1)
                steps.append(mixed(held(experts), gate, source))
            else:
                steps.append(called(held(self.child(deep)), source, draw.random() < 0.15))
            if draw.random() < 0.5:
                other = draw.randint(0, len(steps) - 1) if not (root and self.ids) else draw.randint(1, len(steps))
                steps.append(lambda own, values, other=other: values[-1] + values[min(other, len(values) - 1)])
            elif draw.random() < 0.3:
                steps.append(lambda own, values: torch.tanh(values[-1]))
        if root:
            name = names.pop()
            classes = draw.choice([self.depth, self.width, ROWS])
            steps.append(called(held(nn.Linear(self.width, classes)), -1))
        order = list(children)
        draw.shuffle(order)
        for name in order:
            made.add_module(name, children[name])
        made.steps = steps
        self.made.append(made)
        return made

    def child(self, deep: int) -> nn.Module:
        """Something that leads from the width to the width; one that was made before now and then."""
        draw, width = self.draw, self.width
        if self.made and draw.random() < 0.12:
            return draw.choice(self.made)
        self.left -= 1
        if deep and self.left > 0 and draw.random() < 0.35:
            return self.graph(deep - 1)
        names = draw.choice([("q", "k", "v", "o"), ("to_q", "to_k", "to_v", "to_out"), ("w1", "w2", "w3", "w4")])
        makers: list[Callable[[], nn.Module]] = [
            lambda: nn.Linear(width, width),
            lambda: nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width)),
            lambda: nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
            ),
            lambda: self._feed_forward(),
            lambda: self._feed_forward(),
            lambda: LowRank(width),
            lambda: nn.LayerNorm(width, elementwise_affine=draw.random() < 0.8),
            lambda: RMSNorm(width),
            ScaleNorm,
            lambda: Maps(draw.choice([LayerNorm2d, nn.BatchNorm1d])(width)),
            lambda: Maps(nn.Conv1d(width, width, 1)),
            lambda: Maps(nn.GroupNorm(1, width)),
            lambda: Attends(width, names),
            lambda: TorchAttention(width),
            lambda: Bag(draw, width),
            lambda: LookUp(nn.Embedding(draw.choice([self.depth, ROWS]), width)),
            lambda: nn.GRU(width, width, batch_first=True),
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(width, width)),
            lambda: checkpoint_wrapper(nn.Sequential(nn.Linear(width, width), nn.SiLU())),
            lambda: nn.TransformerEncoderLayer(width, 1, 2 * width, 0.0, batch_first=True),
            nn.Identity,
            nn.SiLU,
        ]
        made = draw.choice(makers)()
        self.made.append(made)
        return made

    def many(self, deep: int, experts: bool = False) -> nn.Module:
        """A list, a dict or a Sequential of children, of one kind or of several; some of them twice."""
        draw = self.draw
        start = draw.getstate()
        alike = draw.random() < 0.7
        children = []
        for _ in range(draw.choice([self.depth, self.depth, draw.randint(1, 4)])):
            if alike and not experts:  # of one class, with weights of its own
                draw.setstate(start)
            if self.left < 0 and children:
                break
            children.append(self.graph(deep) if draw.random() < (0.7 if deep else 0.15) else self.child(deep))
        if draw.random() < 0.15:
            children.append(draw.choice(children))
        kind = draw.random()
        if kind < 0.6:
            return nn.ModuleList(children)
        if kind < 0.8:
            keys = [str(n) for n in range(len(children))] if draw.random() < 0.5 else draw.sample(NAMES, len(children))
            return nn.ModuleDict(dict(zip(keys, children, strict=True)))
        return nn.ModuleList(children) if experts else nn.Sequential(*children)

    def _feed_forward(self) -> FeedForward:
        block = FeedForward(self.draw, self.width, self.width * self.draw.choice([1, 2, 3]))
        self.blocks.append(block)
        return block

    def _tie(self, model: nn.Module) -> None:
        """Gives some linears one weight."""
        linears = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding)) and "weight" in m._parameters]
        for one in linears:
            if self.draw.random() < 0.15 and not self.sparse:
                alike = [other for other in linears if other.weight.shape == one.weight.shape]
                one.weight = self.draw.choice(alike).weight


def called(name: str, source: int, again: bool = False) -> Step:
    """Calls a child; ``again``: what it keeps is computed anew in the backward pass."""

    def step(own: Any, values: list[Tensor]) -> Tensor:
        child, x = own._modules[name], values[source]
        return first(checkpoint(child, x, use_reentrant=False) if again and own.training else child(x))

    return step


def in_turn(name: str, source: int) -> Step:
    """A residual stream through the children of a list."""

    def step(own: Any, values: list[Tensor]) -> Tensor:
        x = values[source]
        for child in own._modules[name]._modules.values():
            x = x + 0.5 * torch.tanh(first(child(x)))
        return x

    return step


def mixed(name: str, gate: str, source: int) -> Step:
    """The sum of what the children of a list yield, in shares that a linear gives."""

    def step(own: Any, values: list[Tensor]) -> Tensor:
        x = values[source]
        shares = own._modules[gate](x).softmax(-1).unbind(-1)
        outs = [first(child(x)) for child in own._modules[name].children()]
        return torch.stack([share[..., None] * out for share, out in zip(shares, outs, strict=True)]).sum(0)

    return step


def first(value: Any) -> Tensor:
    """The first floating tensor of what a module yields."""
    if isinstance(value, Tensor):
        return value
    return next(item for item in value if isinstance(item, Tensor) and item.is_floating_point())
