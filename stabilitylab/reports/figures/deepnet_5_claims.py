"""Claims on the size of a model update: C17 and C19 to C26, all from one-step runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from .. import style
from ..base import MissingRuns
from ..claims import Effect, claim
from ..collection import Record, Runs, pairs
from ..statistics import Region, signed_rank, slope
from .deepnet_5 import exponents, one_step_runs, rate

UNSATURATED = range(6, 26)  # layers a side between which Post-LN's update still grows
COMPARED = range(6, 51)
STEADY = Region(-0.15, 0.15)  # an exponent that counts as independence of depth
FAST = "claims:fast"


def _of(runs: Runs, label: str, table: str = "update_rate") -> Runs:
    found = one_step_runs(runs.where(table=table)).where(label=label)
    if not found:
        raise MissingRuns(f"needs one-step runs of {label}")
    return found


def _growth(runs: Runs, label: str, optimizer: str, group: str, depths: Iterable[int]) -> dict[int, float]:
    found = exponents(_of(runs, label), optimizer, group, depths)
    if not found:
        raise MissingRuns(f"needs one-step runs of {label} at several depths from {min(depths)} to {max(depths)}")
    return found


@claim(
    "C17",
    figure="deepnet:5",
    paper="DeepNet",
    sentence="Larger LayerNorm inputs go with smaller LayerNorm gradients: ||J|| ~ sqrt(d) / ||x||",
    source="DeepNet, Sec. 3; Xiong et al. 2020",
    statistic="slope of log Frobenius norm of the Jacobian (gain 1) on log centred input norm, over all norms, "
    "architectures and depths",
    threshold="R: in [-1.1, -.9]; X: > -.5 (the plan names no X: ours)",
    sweep=FAST,
)
def norm_jacobian(runs: Runs) -> list[Effect]:
    group = one_step_runs(runs.where(table="ln_jacobian"))
    found = {}
    for seed in group.seeds:
        tables = [run.at("ln_jacobian", 0, ["frobenius", "centred"]) for run in group if run.seed == seed]
        x, y = (np.log(np.concatenate([t[c].to_numpy(float) for t in tables])) for c in ("centred", "frobenius"))
        found[seed] = slope(x.tolist(), y.tolist())
    return [Effect("slope", found, Region(-1.1, -0.9), Region(low=-0.5))]


@claim(
    "C19",
    figure="deepnet:5",
    paper="DeepNet",
    sentence="Post-LN's model update grows with depth",
    source="DeepNet, Fig. 5",
    statistic="exponent of N in ||dF|| / lr of one Adam update of all parameters, 6 to 25 layers a side",
    threshold="R: > .5; X: < .15 (the plan names no X: ours)",
    sweep=FAST,
    pilot=".7 to 1.0; a plateau beyond 25 layers",
)
def postln_update_grows(runs: Runs) -> list[Effect]:
    return [Effect("exponent", _growth(runs, "postln", "adam", "all", UNSATURATED), Region(low=0.5), Region(high=0.15))]


@claim(
    "C20",
    figure="deepnet:5",
    paper="DeepNet",
    sentence="DeepNet's model update does not depend on depth",
    source="DeepNet, Fig. 5 and Theorem 4.3",
    statistic="exponent of N in ||dF|| / lr of one Adam update of all parameters, 6 to 50 layers a side",
    threshold="R: within .15 of 0; X: > .3",
    sweep=FAST,
    pilot=".56",
)
def deepnet_update_is_constant(runs: Runs) -> list[Effect]:
    return [Effect("exponent", _growth(runs, "deepnorm", "adam", "all", COMPARED), STEADY, Region(low=0.3))]


@claim(
    "C21",
    figure="deepnet:5",
    paper="DeepNet",
    sentence="... for SGD and the v, output and FFN weights: the scope of its theorem",
    source="DeepNet, Theorem 4.3",
    statistic="the same of one SGD update of the v, out, fc1 and fc2 weights",
    threshold="R: within .15 of 0; X: > .3",
    sweep=FAST,
    pilot="-.06",
)
def constant_in_the_theorems_scope(runs: Runs) -> list[Effect]:
    return [Effect("exponent", _growth(runs, "deepnorm", "sgd", "vo_ffn", COMPARED), STEADY, Region(low=0.3))]


@claim(
    "C22",
    figure="deepnet:5",
    paper="DeepNet",
    sentence="DeepNet's model update is much smaller than Post-LN's, at every depth",
    source="DeepNet, Fig. 5",
    statistic="||dF|| / lr of one Adam update of all parameters, Post-LN / DeepNorm, at each N from 6 to 50",
    threshold="R: > 3 at every N; X: < 1 at some (the plan names no X: ours)",
    sweep=FAST,
    pilot="10 to 20",
)
def much_smaller_update(runs: Runs) -> list[Effect]:
    first, second = _of(runs, "postln"), _of(runs, "deepnorm")
    found = []
    for depth in (n for n in first.depths if n in COMPARED):
        both = pairs(*(own.where(lambda run, n=depth: run.depth == n) for own in (first, second)))
        ratio = {seed: rate(a, "adam", "all") / rate(b, "adam", "all") for seed, a, b in both}
        if ratio:
            p = signed_rank([math.log(value) for value in ratio.values()])
            found.append(Effect(f"ratio at {depth}L", ratio, Region(low=3), Region(high=1), log=True, p=p))
    if len(found) < 2:
        raise MissingRuns("needs one-step runs of postln and deepnorm at two depths from 6 to 50, with the same seeds")
    return found


def _largest(runs: Runs, value: Callable[[Record], float]) -> dict[int, float]:
    """Seed -> the largest value over all its depths."""
    found: dict[int, float] = {}
    for record in runs:
        found[record.seed] = max(found.get(record.seed, -math.inf), value(record))
    return found


@claim(
    "C23",
    figure="deepnet:5",
    paper="DeepNet",
    sentence="Theorem 4.3 is an upper bound of the model update",
    source="DeepNet, Theorem 4.3",
    statistic="largest ratio over depths of ||dF|| / sqrt(d) to the theorem's estimate from the weights, after one "
    "update of the v, out and FFN weights; the estimate is ours, since the theorem has d = 1",
    threshold="R: < 1; X: > 1",
    sweep=FAST,
)
def theorem_is_a_bound(runs: Runs) -> list[Effect]:
    found = []
    for label in ("deepnorm", "postln"):
        own = _of(runs, label, "theorem43")
        for optimizer in ("sgd", "adam"):

            def ratio(record: Record, site: str = f"{optimizer}.vo_ffn") -> float:
                data = record.at("theorem43", 0, ["measured", "estimate"])
                row = data[data["site"] == site].iloc[0]
                return float(row["measured"] / row["estimate"])

            name = f"{style.title(label)}, {optimizer.upper() if optimizer == 'sgd' else 'Adam'}"
            found.append(Effect(name, _largest(own, ratio), Region(high=1), Region(low=1), log=True))
    return found


@claim(
    "C24",
    figure="deepnet:5",
    paper="DeepNet",
    sentence="Through cross-attention, the encoder's updates move a vanilla decoder the more the deeper it is",
    source="DeepNet, Sec. 4.2",
    statistic="exponent of N in ||dF|| / lr of one Adam update of the encoder's parameters alone, 6 to 25 layers",
    threshold="R: > .3 in Post-LN and < .3 in DeepNorm; X: < .3 in Post-LN, or > .3 in DeepNorm",
    sweep=FAST,
)
def encoder_moves_the_decoder(runs: Runs) -> list[Effect]:
    """With Adam, as in all of the paper's experiments; its argument is about any update of the encoder."""
    first, second = (_growth(runs, label, "adam", "encoder", UNSATURATED) for label in ("postln", "deepnorm"))
    return [
        Effect("exponent, Post-LN", first, Region(low=0.3), Region(high=0.3)),
        Effect("exponent, DeepNorm", second, Region(high=0.3), Region(low=0.3)),
    ]


@claim(
    "C25",
    figure="deepnet:5",
    paper="DeepNet",
    sentence="Attention keeps the magnitude of its input (Lemma 4.1)",
    source="DeepNet, Lemma 4.1",
    statistic="||A x|| / ||x|| at 64 tokens, iid LayerNorm'ed tokens, Xavier q and k; largest ||A x|| / max ||x_i||",
    threshold="R: > .5, and the bound <= 1; X: < .5",
    sweep=FAST,
    pilot=".14",
)
def lemma_of_magnitude(runs: Runs) -> list[Effect]:
    group = runs.where(kind="onestep", table="lemma41")
    if not group:
        raise MissingRuns("needs one-step runs")
    ratio: dict[int, float] = {}
    bound: dict[int, float] = {}
    for seed, record in group.by_seed().items():
        data = record.at("lemma41", 0)
        ratio[seed] = float(data.loc[data["site"] == "n=64", "ratio"].iloc[0])
        bound[seed] = float(data["bound"].max())
    return [
        Effect("ratio at n = 64", ratio, Region(low=0.5), Region(high=0.5), log=True),
        Effect("largest output / largest input", bound, Region(high=1 + 1e-9), Region(low=1), log=True),
    ]


@claim(
    "C26",
    figure="deepnet:5",
    paper="DeepNet",
    sentence="q and k do not change the magnitude of the update",
    source="DeepNet, Sec. 4.2",
    statistic="||dF|| / lr of one update of q and k over that of v, out and FFN, DeepNorm, largest over depths",
    threshold="R: < .1 for SGD and Adam; X: > .1 for either",
    sweep=FAST,
    pilot="< .04",
)
def q_and_k_do_not_matter(runs: Runs) -> list[Effect]:
    own = _of(runs, "deepnorm")
    return [
        Effect(
            f"ratio, {name}",
            _largest(own, lambda run, o=optimizer: rate(run, o, "qk") / rate(run, o, "vo_ffn")),
            Region(high=0.1),
            Region(low=0.1),
            log=True,
        )
        for optimizer, name in (("sgd", "SGD"), ("adam", "Adam"))
    ]
