"""Admin's grid of learning rate and beta2, without warm-up: the settings at which models converge, and their loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ....config import merge
from ....experiments import SEEDS, Experiment, Recipe, command, probing, sweep
from ....experiments.recipe import AUTHORS
from ... import style
from ...arrange import signs
from ...base import Figure, Map, MissingRuns, Panel, Picture, compared, figure
from ...claims import Share, claim
from ...collection import Record, Runs
from ...measures.comparison import comparable, counted, decided, failed, last_nll, left_out, lost_by_seed, states
from ...measures.outcomes import mark
from ...measures.provenance import provenance
from ...measures.sensitivity import PAPER_WIDTH, at_width
from ...statistics import Region

AXES = ("train.lr", "train.beta2")
BOTH = ("postln", "preln")
NAMES = [style.title(label) for label in BOTH]
PAPER_RATES = (1e-4, 5e-4)  # the least and the largest of the paper, whose model is 512 wide
SIGNS = {
    "(": "(in parentheses): a seed not 0.25 nats below the baseline, or one that ignores its source",
    "/": "1/3 lost: one of three diverged or stuck",
}  # of cells
COLD = 1  # updates of warm-up, at most, of the runs that the claims are about
Setting = tuple[float, float]  # learning rate and beta2
Paired = list[tuple[Setting, int, Record, Record]]  # with the seed and a run of each of BOTH


def setting(record: Record) -> Setting:
    lr, beta2 = (float(record.settings[key]) for key in AXES)
    return lr, beta2


def _ticks(runs: Runs) -> tuple[list[float], list[float]]:
    """Return the learning rates and the betas."""
    lrs, betas = zip(*map(setting, runs), strict=True)
    return sorted({*lrs}), sorted({*betas})


def grids(runs: Runs) -> list[Runs]:
    """Return groups of ended training runs that differ only in architecture, seed, learning rate and beta2, with at
    least two learning rates and two betas; the richest first."""
    ended = runs.where(lambda run: bool(run.verdict), kind="train")
    return [group for group in comparable(ended, *AXES) if min(map(len, _ticks(group))) > 1]


@figure("admin:grid", title="Learning rate and beta2 without warm-up", source="Admin, grid of learning rate and beta2")
class RateAndBeta2(Figure):
    """The outcome of runs at each learning rate and each beta2 of Adam, and the gap of those that converged: held-out
    cross-entropy after training minus that of the unigram baseline [nats a token, mean over seeds]. A further panel has
    Post-LN's gap minus Pre-LN's, where both converged. A run has converged if it neither diverged nor is stuck at that
    baseline, as stabilitylab judges any run. The paper's numbers are BLEU.

    The paper has 6L-6L on IWSLT'14 and learning rates from 1 to 5e-4. In its repository it has RAdam, one warm-up
    update and a rate that falls linearly to 0. At scale tiny: AdamW and ten times the learning rates (the rule of
    branchnorm:6, 512 / width, would give eight times). The rate at which Post-LN begins to fail there says nothing
    about the paper's size. Inferred: the paper's criterion of convergence.
    """

    def picture(self, runs: Runs) -> Picture:
        found = grids(runs)
        if not found:
            raise MissingRuns("no runs at several learning rates and several beta2 each", command(self.id))
        group = found[0]
        panels = [_ends(group.where(label=label), label, _ticks(group)) for label in group.labels]
        both = paired(group)
        panels += _difference(both, _ticks(group))
        notes = [
            f"Drawn: {group.describe()}.",
            *states(group),
            "Colour and number: mean over the seeds that converged, in parentheses where one of them is not "
            "0.25 nats below the unigram baseline or ignores its source; lost are those that diverged or are stuck, "
            "which colour a cell where they are more than half.",
            _papers_rates(group),
            *left_out(Runs([run for one in found for run in one]), group),
        ]
        return Picture(
            compared(panels), _finding(group, both), notes, columns=min(3, len(panels)), provenance=provenance(group),
            key=" · ".join(signs(panels, SIGNS)),
        )  # fmt: skip


def _papers_rates(group: Runs) -> str:
    """Return a note on the paper's learning rates, converted to the width of these runs."""
    low, high = (at_width(rate, group[0].width) for rate in PAPER_RATES)
    return f"The paper's learning rates times {PAPER_WIDTH} / width are {low:g} to {high:g} here."


def _ends(runs: Runs, label: str, ticks: tuple[list[float], list[float]]) -> Panel:
    """Return a table of one architecture: the outcome of its runs at each setting."""
    cells = {at: [run for run in runs if setting(run) == at] for at in {setting(run) for run in runs}}
    values = {at: _mean([last_nll(run) - run.baseline for run in own if not failed(run)]) for at, own in cells.items()}
    seeds = {at: len(own) for at, own in cells.items()}
    ends = {at: [run.verdict for run in own] for at, own in cells.items()}
    marks = {at: mark(own.count("diverged"), own.count("stuck"), len(own)) for at, own in ends.items()}
    words = {at: _words(own, values[at]) for at, own in cells.items()}
    return _table(style.title(label), ticks, values, marks, words, seeds, "nll - unigram [nats/token]")


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _words(runs: Sequence[Record], value: float) -> str:
    lost = [run.verdict for run in runs if failed(run)]
    if len(lost) == len(runs):
        return lost[0] if len({*lost}) == 1 else "failed"
    number = f"{value:+.2f}"
    number = f"({number})" if any(run.verdict != "trained" and not failed(run) for run in runs) else number
    return f"{number}\n{len(lost)}/{len(runs)} lost" if lost else number


def _table(
    title: str, ticks: tuple[list[float], list[float]], values: dict[Setting, float], marks: dict[Setting, int],
    words: dict[Setting, str], seeds: dict[Setting, int], unit: str,
) -> Panel:  # fmt: skip
    """Lay out learning rates downwards, betas to the right; a cell is empty without a run."""
    lrs, betas = ticks
    places = [[(lr, beta2) for beta2 in betas] for lr in lrs]
    heat = Map(
        x=range(len(betas)),
        y=range(len(lrs)),
        z=np.array([[values.get(at, math.nan) for at in row] for row in places]),
        finding=np.array([[marks.get(at, 0) for at in row] for row in places], np.int8),
        unit=unit,
        log=False,
        x_names=[f"{beta2:g}" for beta2 in betas],
        y_names=[f"{lr:g}" for lr in lrs],
        text=np.array([[words.get(at, "") for at in row] for row in places], dtype=object),
        seeds=np.array([[seeds.get(at, 0) for at in row] for row in places]),
        centre=0.0,
    )
    return Panel(title, "beta2", "learning rate", map=heat)


def paired(runs: Runs) -> Paired:
    """Return the pairs of runs of both architectures with a verdict, by setting and seed."""
    known = decided(runs)
    first, second = ({(setting(run), run.seed): run for run in known.where(label=label)} for label in BOTH)
    return [(*at, first[at], second[at]) for at in sorted(first.keys() & second.keys())]


def _converged(both: Paired) -> Paired:
    return [(at, seed, a, b) for at, seed, a, b in both if not failed(a) and not failed(b)]


def _difference(both: Paired, ticks: tuple[list[float], list[float]]) -> list[Panel]:
    gaps: dict[Setting, list[float]] = {}
    for at, _, postln, preln in _converged(both):
        gaps.setdefault(at, []).append(last_nll(postln) - last_nll(preln))
    values = {at: _mean(own) for at, own in gaps.items()}
    words = {at: f"{value:+.2f}" for at, value in values.items()}
    seeds = {at: len(own) for at, own in gaps.items()}
    title = " minus ".join(NAMES)
    return [_table(title, ticks, values, {}, words, seeds, "difference [nats/token]")] if values else []


def _finding(group: Runs, both: Paired) -> str:
    words = []
    for label in group.labels:
        own = group.where(label=label)
        count = len({setting(run) for run in own})
        words.append(f"{style.title(label)} {sum(map(failed, own))} of {len(own)} ({count} settings)")
    lost = f"Runs that diverged or stayed stuck: {', '.join(words)}, {counted(len(group.seeds))}."
    ended = _converged(both)
    if not ended:
        return lost
    better = sum(last_nll(a) < last_nll(b) for _, _, a, b in ended)
    return f"{lost} Where both converged, {NAMES[0]} ends below {NAMES[1]} in {better} of {len(ended)} pairs."


def _cold(runs: Runs) -> Paired:
    """Return the pairs of the grid without warm-up that has most pairs. Raises MissingRuns."""
    cold = runs.where(lambda run: int(run.settings.get("train.warmup", 0)) <= COLD, label=BOTH)
    best = max((paired(group) for group in grids(cold)), key=len, default=[])
    if not best:
        raise MissingRuns(f"needs postln and preln at several learning rates and beta2 each, {COLD} update of warm-up")
    return best


@claim(
    "C54",
    figure="admin:grid",
    stage="after training",
    must_read=False,
    paper="Admin",
    sentence="Without warm-up Pre-LN converges at every learning rate and beta2 of the grid, Post-LN fails in many",
    source="Admin, grid of beta2 and learning rate (Pre-LN 15 of 15 settings, Post-LN diverged in 7)",
    statistic="share of Post-LN's runs that diverged or are stuck, by seed, over settings and seeds that both "
    "architectures have; beside it Pre-LN's",
    threshold="R: > .25; X: < .25 (ours; the paper's own 7 of 15 would not decide)",
    sweep="admin:grid",
)
def preln_survives(runs: Runs) -> list[Share]:
    postln, preln = (Runs(own) for own in list(zip(*_cold(runs), strict=True))[2:])
    return [
        Share("Post-LN failed", lost_by_seed(postln), Region(low=0.25), Region(high=0.25), of=postln),
        Share("Pre-LN failed", lost_by_seed(preln), of=preln),
    ]


@claim(
    "C55",
    figure="admin:grid",
    stage="after training",
    paper="Admin",
    sentence="Where Post-LN converges without warm-up, it beats Pre-LN",
    source="Admin, grid of beta2 and learning rate (7 of 8 settings, BLEU)",
    statistic="share, by seed, of settings at which both converged (neither diverged nor stuck) and Post-LN's held-out "
    "cross-entropy after training is the lower",
    threshold="R: > .5; X: < .5 (ours; the paper's own 7 of 8 would not decide)",
    sweep="admin:grid",
)
def postln_beats_preln(runs: Runs) -> list[Share]:
    ended = _converged(_cold(runs))
    if not ended:
        raise MissingRuns("no setting of the grid at which postln and preln both converged")
    better: dict[int, list[bool]] = {}
    for _, seed, postln, preln in ended:
        better.setdefault(seed, []).append(last_nll(postln) < last_nll(preln))
    counts = {seed: (sum(found), len(found)) for seed, found in sorted(better.items())}
    of = [run for *_, postln, preln in ended for run in (postln, preln)]
    return [Share("Post-LN ends lower", counts, Region(low=0.5), Region(high=0.5), of=of)]


IWSLT = {
    "model": {"d_ffn": 1024, "heads": 4, "dropout": 0.3},
    "train": {"warmup": 1, "schedule": "linear", "steps": 100_000},
}


@sweep("admin:grid", minutes=16)
def rates_and_betas(ask: Recipe) -> Iterator[Experiment]:
    """Crosses five learning rates with three beta2, 6L-6L, Post-LN and Pre-LN, one update of warm-up.

    At scale tiny the rates are ten times the paper's, the model being an eighth as wide and the training short, and the
    optimizer is AdamW; fixed before any of these runs was made.
    """
    archs = BOTH if ask.tiny else (*BOTH, "admin")
    recipe = {"train": {"warmup": 1, "schedule": "linear"}} if ask.tiny else merge(AUTHORS, IWSLT)
    for lr in (1e-3, 2e-3, 3e-3, 4e-3, 5e-3) if ask.tiny else (1e-4, 2e-4, 3e-4, 4e-4, 5e-4):
        for beta2 in (0.99, 0.995, 0.999):
            axes = {"train": {"lr": lr, "beta2": beta2}}
            tag = f"lr{lr:g}-beta{beta2:g}"
            yield from ask.runs(archs, [6], recipe, probing(), seeds=SEEDS[:3], axes=axes, tag=tag)
