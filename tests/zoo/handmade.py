"""What people write themselves: torch's own layers, mixtures, shared layers, and values that it shows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from entries import BATCH, TOKENS, VOCAB, WIDTH, Entry, ids
from torch import Tensor, nn

from stabilitylab import tap


def states() -> dict[str, Any]:
    return {"x": torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).double()}


def two() -> dict[str, Any]:
    x = states()["x"]
    return {"src": x, "tgt": x.flip(1)}


def tokens() -> dict[str, Any]:
    return {"tokens": ids()}


class Sandwich(nn.Module):
    """An attention of torch, norms on both sides of each part."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind, self.front, self.back = (nn.LayerNorm(WIDTH) for _ in range(4))
        self.mha = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.net = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        x = x + self.behind(self.mha(h, h, h)[0])
        return x + self.back(self.net(self.front(x)))


class Macaron(nn.Module):
    """Half a feed-forward block on each side of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(3))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.first, self.second = (
            nn.Sequential(nn.Linear(WIDTH, 24), nn.SiLU(), nn.Linear(24, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(self.norms[0](x)) / 2
        h = self.norms[1](x)
        x = x + self.attention(h, h, h)[0]
        return x + self.second(self.norms[2](x)) / 2


class Gated(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, inner, bias=False), nn.Linear(WIDTH, inner, bias=False)
        self.w2, self.act = nn.Linear(inner, WIDTH, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class Routed(nn.Module):
    """Three gated experts in a list, each token to one of them; a shared one sees all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3, bias=False)
        self.experts, self.shared = nn.ModuleList(Gated(12) for _ in range(3)), Gated(20)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights = self.gate(h).softmax(-1)
        chosen, mixed = weights.argmax(-1), torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            mixed[mine] = expert(h[mine]) * weights[mine][:, number, None]
        return x + mixed + self.shared(h)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Gated(24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Mixing(nn.Module):
    """An MLP-Mixer's layer: one block over tokens, one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.over_tokens = nn.Sequential(nn.Linear(TOKENS, 10), nn.GELU(), nn.Linear(10, TOKENS))
        self.over_channels = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_tokens(self.norm1(x).mT).mT
        return x + self.over_channels(self.norm2(x))


class Stream(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class SandwichStream(Stream): ...


class MacaronStream(Stream): ...


class RoutedStream(Stream): ...


class MixerStream(Stream): ...


class TiedLanguageModel(nn.Module):
    """The embedding is the head, and there is no norm but torch's own in the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.body = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0, batch_first=True) for _ in range(2)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))


class Universal(nn.Module):
    """One layer, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0, batch_first=True, norm_first=True)])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block[0](x)
        return x


class Bare(nn.Module):
    """Its parameters stand in it, its norms are functions; what it multiplies it shows."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.gated, self.gain = gated, nn.Parameter(torch.ones(WIDTH))
        self.mix, self.up = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Parameter(torch.randn(WIDTH, 24) / 4)
        self.down = nn.Parameter(torch.randn(24, WIDTH) / 5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.rms_norm(tap(x, "norm", self, kind="norms"), (WIDTH,), self.gain)
        x = tap(x + h @ self.mix, "middle", self)
        inner = F.relu(F.layer_norm(x, (WIDTH,)) @ self.up)
        return x + tap(inner * inner if self.gated else inner, "inner", self, kind="activations") @ self.down


class BareStream(Stream): ...


class Scanned(nn.Module):
    """Layers that are slices of stacked parameters: no module at all, told apart by the names of what is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        for number, weight in enumerate(self.weights):
            h = F.layer_norm(tap(x, f"layers.{number}.norm", self, kind="norms"), (WIDTH,))
            x = tap(x + F.relu(h @ weight), f"layers.{number}.out", self)
        return x


def _layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0, batch_first=True, **options)


def _encoder() -> nn.Module:
    class Encoder(nn.TransformerEncoder):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    return Encoder(_layer(norm_first=True), 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)


def _decoder() -> nn.Module:
    layer = nn.TransformerDecoderLayer(WIDTH, 2, 24, 0.0, batch_first=True, activation="gelu")

    class Decoder(nn.TransformerDecoder):
        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            return super().forward(tgt, src)

    return Decoder(layer, 2)


HANDMADE: dict[str, Entry] = {
    "sandwich norms around torch's attention": Entry(
        lambda: SandwichStream(Sandwich(), Sandwich()),
        "layers.*",
        "layers.*.before layers.*.behind layers.*.front layers.*.back",
        "layers.*.net.1",
        "layers.1",
        "layers.*.mha",
        states,
    ),
    "macaron: two blocks a layer": Entry(
        lambda: MacaronStream(Macaron(), Macaron()),
        "layers.*",
        "layers.*.norms.{0,1,2}",
        "layers.*.first.1 layers.*.second.1",
        "layers.1",
        "layers.*.attention",
        states,
    ),
    "experts in a list, a shared one, a dense layer": Entry(
        lambda: RoutedStream(Dense(), Routed(), Routed()),
        "layers.*",
        "layers.*.norm",
        "<layers.0.mlp.w2 <layers.{1,2}.experts.{0,1,2}.w2 <layers.{1,2}.shared.w2",
        "layers.2",
        "",
        states,
        depth=3,
    ),
    "mixer: blocks over tokens and channels": Entry(
        lambda: MixerStream(Mixing(), Mixing()),
        "layers.*",
        "layers.*.norm{1,2}",
        "layers.*.over_tokens.1 layers.*.over_channels.1",
        "layers.1",
        "",
        states,
    ),
    "a tied head": Entry(
        TiedLanguageModel,
        "body.*",
        "body.*.norm{1,2}",
        "<body.*.linear2",
        "body.1",
        "body.*.self_attn",
        tokens,
    ),
    "one layer, three times": Entry(
        Universal, "block.0", "block.0.norm{1,2}", "<block.0.linear2", "block.0", "block.0.self_attn", states
    ),
    "torch's encoder, pre-norm": Entry(
        _encoder, "layers.*", "layers.*.norm{1,2} norm", "<layers.*.linear2", "norm", "layers.*.self_attn", states
    ),
    "torch's decoder": Entry(
        _decoder,
        "layers.*",
        "layers.*.norm{1,2,3}",
        "<layers.*.linear2",
        "layers.1",
        "layers.*.self_attn layers.*.multihead_attn",
        two,
    ),
    "norms as functions, parameters in the block": Entry(
        lambda: BareStream(Bare(), Bare(gated=True)), "layers.*", "", "", "layers.1", "", states,
        shown="layers.*.norm layers.*.middle layers.*.inner",
    ),
    "layers that are slices of one parameter": Entry(
        Scanned, "", "", "", "", "", states, depth=3, shown="layers.*.norm layers.*.out",
        probes="ln_input,activation_grad_norm,residual_norm",
    ),
}  # fmt: skip
