"""An architecture with two streams: attention writes to one of them, feed-forward blocks to the other."""

import torch
from pydantic import Field
from torch import nn

from stabilitylab.models import ArchOptions, Residual, Trunk, arch


class Pair(Trunk):
    """Two streams that start as the embedding; the stack ends in their mean, which probes read."""

    def enter(self, x):
        return x, x

    def leave(self, stream):
        return torch.stack(stream).mean(0)

    def shown(self, stream):
        return stream  # both: probes read their mean, and add their gradients


@arch("tracks", title="Two tracks", colour="#7B3294", marker="X", rank=910, gains="base", stream="mixed")
class Tracks(Residual):
    r"""a <- a + A(LN(k a + (1 - k) b)), b <- b + G(LN(k b + (1 - k) a)), A attention, G feed-forward.  An example."""

    final_norm = True
    trunk = Pair
    learns = "the final norm of each stack"

    class Options(ArchOptions):
        k: float = Field(default=0.75, ge=0, le=1)  # --set arch.k=0.5

    def __init__(self, f, place, **given):
        super().__init__(f, place, **given)
        self.scaled_branch = nn.Identity()

    def forward(self, stream, *context):
        k, feeds = self.options.k, self.place.sublayer == "ffn"
        own, other = reversed(stream) if feeds else stream
        branch = self.branch(self.f(self.norm(k * own + (1 - k) * other), *context))
        terms = (0 * branch, branch) if feeds else (branch, 0 * branch)
        # these two taps carry tuples, of which probes read the mean: what is kept of each stream, and what is added
        return tuple(x + term for x, term in zip(self.shortcut(stream), self.scaled_branch(terms), strict=True))
