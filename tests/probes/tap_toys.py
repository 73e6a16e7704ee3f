"""A decoder without modules for its norms and its feed-forward block: it shows what probes cannot see by ``tap``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stabilitylab import tap

VOCAB, D, INNER = 11, 8, 12


class Bare(nn.Module):
    """Parameters in the block. ``owner``: whether it says whose values it shows; ``shows``: whether it does."""

    def __init__(self, owner: bool = True, shows: bool = True) -> None:
        super().__init__()
        self.owner, self.shows = owner, shows
        self.gain1, self.gain2 = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D))
        self.mix = nn.Parameter(torch.randn(D, D) / 3)
        self.up, self.down = nn.Parameter(torch.randn(D, INNER) / 3), nn.Parameter(torch.randn(INNER, D) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.rms_norm(self.show(x, "norm1", "norms"), (D,), self.gain1) @ self.mix
        x = self.show(x, "middle", "stream")
        inner = F.relu(F.rms_norm(self.show(x, "norm2", "norms"), (D,), self.gain2) @ self.up)
        return x + self.show(inner, "inner", "activations") @ self.down

    def show(self, x: Tensor, name: str, kind: str) -> Tensor:
        if not self.shows:
            return x
        return tap(x, name, self, kind=kind) if self.owner else tap(x, name, kind=kind)


class BareDecoder(nn.Module):
    """``recompute``: "", "reentrant" or "not", how its layers are checkpointed."""

    def __init__(self, recompute: str = "", owner: bool = True, shows: bool = True) -> None:
        super().__init__()
        self.recompute, self.shows = recompute, shows
        self.embed, self.head = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB)
        self.blocks = nn.ModuleList(Bare(owner, shows) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            if self.recompute and self.training:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        return self.head(tap(x, "final", self, kind="outputs") if self.shows else x)


class Functional(nn.Module):
    """No module at all inside: two layers of parameters, told apart by the names of what they show."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        for number, weight in enumerate((self.first, self.second)):
            x = tap(x + F.layer_norm(tap(x, f"layers.{number}.norm", kind="norms"), (D,)) @ weight, f"layers.{number}")
        return x


class Oracle:
    """What a :class:`BareDecoder` holds in one forward and backward, from its formula, in float64."""

    def __init__(self, model: nn.Module, ids: Tensor) -> None:
        p = {name: value.detach().double().requires_grad_() for name, value in model.named_parameters()}
        self.held: dict[str, Tensor] = {}
        x = F.embedding(ids, p["embed.weight"])
        for n in range(3):
            home = f"blocks.{n}"

            def norm(x: Tensor, gain: str, home: str = home) -> Tensor:
                return (
                    x
                    / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()
                    * p[f"{home}.{gain}"]
                )

            self.held[f"{home}.norm1"] = x
            x = x + norm(x, "gain1") @ p[f"{home}.mix"]
            self.held[f"{home}.middle"] = self.held[f"{home}.norm2"] = x
            x.retain_grad()
            inner = (norm(x, "gain2") @ p[f"{home}.up"]).clamp(min=0)
            self.held[f"{home}.inner"] = inner
            x = x + inner @ p[f"{home}.down"]
        self.held["final"] = x
        self.loss = (x @ p["head.weight"].T + p["head.bias"]).square().mean()
        self.loss.backward()

    def mean_norm(self, name: str) -> float:
        return float(self.held[name].detach().norm(dim=-1).mean())

    def gradient(self, name: str) -> Tensor:
        found = self.held[name].grad
        assert found is not None
        return found


def ids(seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(seed))
