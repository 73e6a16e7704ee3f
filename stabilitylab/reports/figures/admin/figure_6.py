"""Admin, Figures 6 and 7: layer dependency of shallow encoders, and the claims on it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....experiments import Experiment, Recipe, command, sweep
from ...base import MissingRuns, figure
from ...claims import Effect, claim
from ...collection import LAYERS, Runs
from ...measures.comparison import both
from ...measures.initialisation import at_initialisation
from ...statistics import Region, slope
from ._dependency import TABLE, LayerDependency, own_share, trained_branches, trained_pairs, upper
from .figure_3 import DEPTH, FAST


@figure("admin:6", title="Layer dependency of a shallow encoder", source="Admin, Figures 6 and 7")
class ShallowDependency(LayerDependency):
    """The layer dependency beta_ij, for encoders of about 6 layers: the share (standard deviation) of residual branch j
    in the normalised output of sub-layer i.

    It is drawn at initialisation and, if a training run recorded branch_variance, after training. sum_j beta_ij^2 falls
    short of 1 by the embedding's share, or by correlation between branches, which the definition leaves out.
    """

    layers = 6
    papers = ("postln", "preln", "admin")
    shown = (*papers, "deepnorm", "branchnorm")


@claim(
    "C30",
    figure="admin:6",
    stage="initialisation",
    paper="Admin",
    sentence="Admin sets beta_ii^2 to about 1/i",
    source="Admin, Sec. 4.3",
    statistic="slope of log beta_ii^2 on log i over the encoder's sub-layers at initialisation, deepest model",
    threshold="R: in [-1.2, -.8]; X: > -.5 (the plan names no X: ours)",
    sweep=FAST,
)
def admin_shares(runs: Runs) -> list[Effect]:
    fit = runs.where(lambda run: run.layers[0] > 1, label="admin", table=TABLE)
    groups = fit.where(kind="onestep").groups(*LAYERS) or fit.where(kind="train").groups(*LAYERS)
    if not groups:
        raise MissingRuns("needs admin with branch_variance at initialisation")
    group = max(groups, key=lambda g: max(run.layers[0] for run in g))
    most = max(run.layers[0] for run in group)
    found = {}
    own = group.where(lambda run: run.layers[0] == most).by_seed()
    for seed, record in own.items():
        share = own_share(record, 0)
        found[seed] = slope(np.log(np.arange(1, len(share) + 1)).tolist(), np.log(share).tolist())
    return [Effect(f"slope, {most}L", found, Region(-1.2, -0.8), Region(low=-0.5), of=own.values())]


@claim(
    "C31",
    figure="admin:6",
    stage="after training",
    paper="Admin",
    sentence="Post-LN relies on its own branch more than Pre-LN, at initialisation and after training",
    source="Admin, Figs. 6 and 7",
    statistic="mean beta_ii^2 of the last half of the encoder's sub-layers, Post-LN / Pre-LN, in models that trained; "
    "beside it that of 18L models at initialisation",
    threshold="R: > 1.2 trained; X: < 1 (the plan names no X: ours)",
    sweep=FAST,
    pilot="4.2 at initialisation (18L)",
)
def own_branch(runs: Runs) -> list[Effect]:
    ended = trained_pairs(runs, "postln", "preln")
    if not ended:
        missing = f"one depth that trained, with {TABLE}"
        raise MissingRuns(f"needs postln and preln of the same seeds: {missing}", command("admin:6"))
    trained = {seed: upper(postln, None) / upper(preln, None) for seed, postln, preln in ended}
    return [
        Effect("trained", trained, Region(low=1.2), Region(high=1), log=True, of=both(ended)),
        *_at_initialisation(runs),
    ]


def _at_initialisation(runs: Runs) -> list[Effect]:
    """Return the same effects before training, if there are such runs."""
    try:
        postln, preln = (at_initialisation(runs, label, DEPTH, TABLE) for label in ("postln", "preln"))
    except MissingRuns:
        return []
    seeds = sorted(postln.keys() & preln.keys())
    ratio = {seed: upper(postln[seed], 0) / upper(preln[seed], 0) for seed in seeds}
    of = [own[seed] for own in (postln, preln) for seed in seeds]
    return [Effect("at initialisation, 18L", ratio, log=True, of=of)] if ratio else []


@sweep("admin:6", minutes=5)
def shallow_models(ask: Recipe) -> Iterator[Experiment]:
    """Trains Post-LN, Pre-LN and Admin, 6L-6L, 600 updates, recording the variance of every branch."""
    yield from trained_branches(ask, 6)
