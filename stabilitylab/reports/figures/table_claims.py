"""Claims on who diverges: C34 and C35."""

from __future__ import annotations

from .. import style
from ..base import MissingRuns
from ..claims import NAMED_LATER, Effect, Share, claim
from ..collection import LAYERS, Record, Runs
from ..layerwise import comparable, decided, failed, lost_by_seed, with_the_protocols_ramp
from ..stability import judged
from ..statistics import Region
from .gains import by_gain

LONG, DEEP = 3000, 50  # updates, and layers a side, from which divergence is judged
COMMAND = f"stabilitylab sweep --grid arch=postln,deepnorm,branchnorm,admin depth=36,100 seed=3..8 steps={LONG}"


def _long(runs: Runs) -> Runs:
    """Runs with a verdict of the richest comparable group that were trained for so long, with the protocol's ramp."""
    groups = comparable(with_the_protocols_ramp(judged(runs).where(lambda run: run.updates >= LONG)), *LAYERS)
    return groups[0] if groups else Runs([])


def _arm(runs: Runs, label: str, exactly: int | None = None) -> Runs:
    """Those of an architecture with ``exactly`` so many layers a side (None: as deep as divergence is judged at, of
    each seed the shallowest)."""
    found = runs.where(lambda run: run.depth >= DEEP if exactly is None else run.depth == exactly, label=label)
    if not found:
        depth = f"{DEEP} layers a side or more" if exactly is None else f"{exactly} layers a side"
        raise MissingRuns(f"needs {label} of {depth}, trained for {LONG:,} updates", COMMAND)
    return Runs({run.seed: run for run in sorted(found, key=lambda run: -run.depth)}.values())


@claim(
    "C34",
    figure="table:stability",
    paper="DeepNet",
    sentence="A deep Post-LN diverges where DeepNorm, BranchNorm and (18L) Admin train",
    source="DeepNet, BranchNorm and Admin, Tables 1 and 2",
    statistic="share of seeds at which after 3,000 updates Post-LN diverged or is stuck and none of the others is: "
    "Post-LN, DeepNorm and BranchNorm at 50 layers a side or the next depth there is, Admin at 18; beside it each "
    "one's share",
    threshold="R: more than half; X: less than half",
    sweep="table:stability",
    after=NAMED_LATER,
)
def deep_postln_diverges(runs: Runs) -> list[Effect | Share]:
    return by_gain(runs, _only_postln_fails)


def _only_postln_fails(runs: Runs, gain: str) -> list[Share]:
    labels = (f"postln{gain}", "deepnorm", "branchnorm", "admin")
    long = _long(runs.where(label=labels))
    arms = {label: _arm(long, label, 18 if label == "admin" else None) for label in labels}
    known = {label: {run.seed: run for run in decided(arm)} for label, arm in arms.items()}
    found: dict[int, tuple[int, int]] = {}
    of: list[Record] = []
    for seed in sorted(set.intersection(*({*own} for own in known.values()))):
        postln, *others = (known[label][seed] for label in labels)
        found[seed] = int(failed(postln) and not any(map(failed, others))), 1
        of += [postln, *others]
    deep = [Share(f"{style.title(label)}, {'18L' if label == 'admin' else f'{DEEP}L or more'}, failed",
                  lost_by_seed(arm), of=arm) for label, arm in arms.items()]  # fmt: skip
    alone = "Post-LN failed and none of the others did"
    return [Share(alone, found, Region(low=0.5), Region(high=0.5), of=of), *deep]


@claim(
    "C35",
    figure="table:stability",
    paper="DeepNet",
    sentence="Admin diverges at 50L-50L",
    source="DeepNet and BranchNorm, Table 1; the Admin repository's 100L-100L recipe says otherwise",
    statistic="share of Admin runs, one a seed, of 50 layers a side or the next depth there is, that diverged or are "
    "stuck after 3,000 updates",
    threshold="R: more than half; X: less than half",
    sweep="table:stability",
)
def admin_diverges(runs: Runs) -> list[Share]:
    own = _arm(_long(runs.where(label="admin")), "admin")
    name = f"Admin, {DEEP}L or more, failed"
    return [Share(name, lost_by_seed(own), Region(low=0.5), Region(high=0.5), of=own)]
