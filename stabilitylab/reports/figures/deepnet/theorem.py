"""Claims on DeepNet's theory, shown below Figure 5: its theorem and lemma, norms, cross-attention, q and k."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ... import style
from ...base import MissingRuns
from ...claims import NAMED_LATER, Effect, Share, claim, together
from ...collection import Record, Runs
from ...measures.gains import by_gain
from ...measures.one_step import growth, largest_by_seed, of_label, one_step_runs, rate
from ...statistics import Region, slope
from .figure_5 import FAST, GAIN, UNSATURATED


@claim(
    "C17",
    figure="deepnet:5",
    stage="initialisation",
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
        tables = [run.at("ln_jacobian", 0, ["frobenius", "centred"]) for run in group.where(seed=seed)]
        x, y = (np.log(np.concatenate([t[c].to_numpy(float) for t in tables])) for c in ("centred", "frobenius"))
        found[seed] = slope(x.tolist(), y.tolist())
    return [Effect("slope", found, Region(-1.1, -0.9), Region(low=-0.5), of=group)]


@claim(
    "C23",
    figure="deepnet:5",
    stage="first updates",
    paper="DeepNet",
    sentence="Theorem 4.3 is an upper bound of the model update",
    source="DeepNet, Theorem 4.3",
    statistic="||dF|| / sqrt(d) after one update of the v, out and FFN weights over the theorem's bound from the "
    "operator norms of these weights and of their updates, largest over depths, SGD and Adam, DeepNorm and Post-LN of "
    "either gain; beside it each of them, and over the estimate from the weights' rms (which is no bound)",
    threshold="R: < 1; X: > 1",
    sweep=FAST,
    after=f"{NAMED_LATER}; until then it was judged by the estimate",
)
def theorem_is_a_bound(runs: Runs) -> list[Effect]:
    found: dict[str, list[Effect]] = {"spectral": [], "estimate": []}
    labels = [label for label in ("deepnorm", "postln gain=1", "postln") if label in _table(runs).labels]
    if not {"deepnorm"} < {*labels}:
        raise MissingRuns("needs one-step runs of deepnorm and postln")
    for label in labels:
        own = _table(runs).where(label=label)
        for optimizer, name in (("sgd", "SGD"), ("adam", "Adam")):
            for column, what in (("spectral", "the bound"), ("estimate", "the estimate")):

                def ratio(record: Record, site: str = f"{optimizer}.vo_ffn", over: str = column) -> float:
                    data = record.at("theorem43", 0, ["measured", over])
                    row = data[data["site"] == site].iloc[0]
                    return float(row["measured"] / row[over])

                title = f"over {what}, {style.title(label)}, {name}"
                found[column].append(Effect(title, largest_by_seed(own, ratio), log=True, of=own))
    largest = together("over the bound, the largest", found["spectral"], np.max, Region(high=1), Region(low=1))
    return [largest, *found["spectral"], *found["estimate"]]


def _table(runs: Runs) -> Runs:
    return one_step_runs(runs.where(table="theorem43"))


@claim(
    "C25",
    figure="deepnet:5",
    stage="initialisation",
    paper="DeepNet",
    sentence="Attention keeps the magnitude of its input (Lemma 4.1)",
    source="DeepNet, Lemma 4.1",
    statistic="||A x|| / ||x|| at 64 tokens, iid LayerNorm'ed tokens, Xavier q and k; beside it the largest "
    "||A x|| / max ||x_i||, which the lemma bounds by 1",
    threshold="R: > .5; X: < .5",
    sweep=FAST,
    pilot=".14",
)
def lemma_of_magnitude(runs: Runs) -> list[Effect]:
    group = runs.where(kind="onestep", table="lemma41")
    if not group:
        raise MissingRuns("needs one-step runs")
    ratio: dict[int, float] = {}
    bound: dict[int, float] = {}
    own = group.by_seed()
    for seed, record in own.items():
        data = record.at("lemma41", 0)
        ratio[seed] = float(data.loc[data["site"] == "n=64", "ratio"].iloc[0])
        bound[seed] = float(data["bound"].max())
    return [
        Effect("ratio at n = 64", ratio, Region(low=0.5), Region(high=0.5), log=True, of=own.values()),
        Effect("largest output / largest input", bound, log=True, of=own.values()),
    ]


@claim(
    "C24",
    figure="deepnet:5",
    stage="first updates",
    paper="DeepNet",
    sentence="Through cross-attention, the encoder's updates move a vanilla decoder the more the deeper it is",
    source="DeepNet, Sec. 4.2",
    statistic="exponent of N in ||dF|| / lr of one Adam update of the encoder's parameters alone, 6 to 25 layers, in "
    f"Post-LN; beside it in DeepNorm{GAIN}",
    threshold="R: > .3; X: < .3",
    sweep=FAST,
)
def encoder_moves_the_decoder(runs: Runs) -> list[Effect | Share]:
    """Return the effects with Adam, as in all of the paper's experiments; its argument covers any update of the
    encoder."""

    @by_gain
    def postln(own: Runs, gain: str) -> list[Effect]:
        regions = Region(low=0.3), Region(high=0.3)
        return [growth("exponent, Post-LN", own, f"postln{gain}", "adam", "encoder", UNSATURATED, *regions)]

    found = postln(runs)
    try:
        return [*found, growth("exponent, DeepNorm", runs, "deepnorm", "adam", "encoder", UNSATURATED)]
    except MissingRuns:
        return found


@claim(
    "C26",
    figure="deepnet:5",
    stage="first updates",
    paper="DeepNet",
    sentence="q and k do not change the magnitude of the update",
    source="DeepNet, Sec. 4.2",
    statistic="||dF|| / lr of one update of q and k over that of v, out and FFN, DeepNorm, largest over depths, SGD "
    "and Adam; beside it either",
    threshold="R: < .1; X: > .1",
    sweep=FAST,
    pilot="< .04",
    after=NAMED_LATER,
)
def q_and_k_do_not_matter(runs: Runs) -> list[Effect]:
    own = of_label(runs, "deepnorm")

    def ratio(optimizer: str) -> Callable[[Record], float]:
        return lambda run: rate(run, optimizer, "qk") / rate(run, optimizer, "vo_ffn")

    each = [
        Effect(f"ratio, {name}", largest_by_seed(own, ratio(optimizer)), log=True, of=own)
        for optimizer, name in (("sgd", "SGD"), ("adam", "Adam"))
    ]
    return [together("ratio, the larger", each, np.max, Region(high=0.1), Region(low=0.1)), *each]
