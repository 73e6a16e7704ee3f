"""Admin's maps of 18 layers: a deep encoder begins as a Pre-LN and comes to rely on its own branches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....experiments import Experiment, Recipe, sweep
from ...base import MissingRuns, figure
from ...claims import Effect, claim
from ...collection import Record, Runs
from ...measures.comparison import both
from ...measures.initialisation import at_initialisation
from ...statistics import Region
from ._dependency import TABLE, LayerDependency, own_share, trained_branches, trained_pairs, upper
from .figure_3 import DEPTH

BOTH = ("admin", "preln")


@figure("admin:7", title="Layer dependency of a deep encoder", source="Admin, maps of 18-layer models")
class DeepDependency(LayerDependency):
    """The layer dependency beta_ij, as in admin:6, for encoders of about 18 layers: Admin, Pre-LN, and Post-LN if it
    trained.

    It is drawn at initialisation and after training. The paper maps Admin and Pre-LN. Post-LN, which does not train
    there at that depth, is ours.
    """

    layers = DEPTH
    papers = ("admin", "preln")
    shown = (*papers, "postln")


@claim(
    "C53",
    figure="admin:7",
    stage="after training",
    paper="Admin",
    sentence="18 layers deep, Admin depends on its own branches as Pre-LN does at initialisation, and more after "
    "training",
    source="Admin, dependency maps of 18-layer models",
    statistic="18L encoders, Admin against Pre-LN of the same seed: trained the ratio of the mean beta_ii^2 of the "
    "last half of the sub-layers; beside it, at initialisation, the factor between their beta_ii, whichever is larger, "
    "geometric mean over sub-layers",
    threshold="R: ratio > 1.2 trained; X: < 1 (ours; the paper gives maps, not numbers)",
    sweep="admin:7",
    pilot="sum of beta_ii^2 at initialisation 3.0 (Admin) and 3.3 (Pre-LN)",
)
def starts_as_preln(runs: Runs) -> list[Effect]:
    deep = runs.where(layers=(DEPTH, DEPTH))
    ended = trained_pairs(deep, *BOTH)
    if not ended:
        raise MissingRuns(f"needs admin and preln of the same seeds, {DEPTH} layers a side, that trained, with {TABLE}")
    ratio = {seed: upper(a, None) / upper(b, None) for seed, a, b in ended}
    more = Effect("Admin / Pre-LN trained", ratio, Region(low=1.2), Region(high=1), log=True, of=both(ended))
    return [more, *_at_initialisation(deep)]


def _at_initialisation(deep: Runs) -> list[Effect]:
    """Return the difference before training, if there are such runs."""
    try:
        admin, preln = (at_initialisation(deep, label, DEPTH, TABLE) for label in BOTH)
    except MissingRuns:
        return []
    alike = {seed: _factor(admin[seed], preln[seed]) for seed in sorted(admin.keys() & preln.keys())}
    of = [own[seed] for own in (admin, preln) for seed in alike]
    return [Effect("apart at initialisation", alike, log=True, of=of)] if alike else []


def _factor(first: Record, second: Record) -> float:
    logs = np.log(own_share(first, 0) / own_share(second, 0)) / 2  # of beta_ii, the root of the share
    return float(np.exp(np.abs(logs).mean()))


@sweep("admin:7", minutes=10, folder="admin:6")
def deep_models(ask: Recipe) -> Iterator[Experiment]:
    """Trains Post-LN, Pre-LN and Admin, 18L-18L, 600 updates, recording the variance of every branch."""
    yield from trained_branches(ask, DEPTH)
