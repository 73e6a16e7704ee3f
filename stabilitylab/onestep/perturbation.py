"""The change of every sub-layer's output when the weights change: Admin's stability plot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..models.initialisation import named_normal
from ..probes import Site
from ..probes.places.sites import read
from .initial_model import Filled, Hook, Subject, filled, hooked, moved, part_of

RANDOM, GRADIENT = 1e-4, 1e-6  # the amount that is added to each weight, times a sign
DEFINITION = """Mean over real tokens and d of the squared difference of x / std(x) between perturbed and unperturbed
weights, x a sub-layer's output (Post-LN: after its norm) or, in layer 0, the stack's; std over the d of each token. All
q, k, v, out, fc1 and fc2 weights change together: W + 1e-4 sign(N(0, 1)) (random; a seed's signs are the same for all
architectures) or W + 1e-6 sign(dE/dW) (gradient). Admin, Fig. 4; a mean where the authors sum, and std per token, are
Inferred."""


class Outputs:
    """The normalised output x / std(x) at the real tokens of every site, from the last forward pass."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.sites: Sequence[Site] = (*subject.sites.branches, *subject.sites.outputs)
        self.values: dict[Site, Tensor] = {}

    def hooks(self) -> Iterator[tuple[nn.Module, Hook]]:
        return ((site.module, partial(self._hear, site)) for site in self.sites)

    def _hear(self, site: Site, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        x = read(site.module, output)  # what probes read, of several streams
        assert x is not None
        real = x[self._subject.real(site.stack)]  # (tokens, D)
        self.values[site] = real / real.std(dim=-1, correction=0, keepdim=True)


def perturbation(subject: Subject, before: Outputs) -> Filled:
    """Return the table of changes of every output. ``before``: the outputs under the unchanged weights."""
    roles = subject.matrices()
    parameters = dict(subject.model.named_parameters())
    weights = [part_of(parameters[name].data, rows) for name, rows in roles.values()]
    seed = subject.config.train.seed
    noise = (  # one tensor at a time: all together would take the model's memory
        named_normal(seed, f"{role}.perturbation", weight.shape).to(weight).sign()
        for role, weight in zip(roles, weights, strict=True)
    )
    slopes = (part_of(parameters[name].grad, rows).sign() for name, rows in roles.values())  # pyright: ignore
    columns = {
        "random": _change(subject, before, weights, noise, RANDOM),
        "gradient": _change(subject, before, weights, slopes, GRADIENT),
    }
    return filled(
        "perturbation",
        [site.row for site in before.sites],
        columns,
        unit="mean squared difference of x / std(x)",
        definition=DEFINITION,
        phase="forward",
        log=True,
    )


def _change(
    subject: Subject, before: Outputs, weights: list[Tensor], towards: Iterable[Tensor], size: float
) -> list[Tensor]:
    after = Outputs(subject)
    with moved(weights, towards, size), hooked(after.hooks()):
        subject.output()
    return [(after.values[site] - before.values[site]).square().mean() for site in before.sites]
