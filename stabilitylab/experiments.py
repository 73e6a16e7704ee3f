"""Which runs a figure needs: one function per figure and scale, each a list of configurations.

Scale ``tiny`` is the 64-128-2 model on one CPU core; scale ``paper`` the papers' sizes, for GPUs and data that the user
names. Seeds 0, 1 and 2 were pilots at width 64 (thresholds of claims stood next to them), so sweeps begin with 3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .config import Config, merge, resolve
from .errors import UsageError
from .labels import label
from .registry import Registry

Kind = Literal["train", "onestep"]
Scale = Literal["tiny", "paper"]
Settings = Mapping[str, Any]
SEEDS = (3, 4, 5, 6, 7)


@dataclass(frozen=True)
class Experiment:
    """One run: what it is called within its folder, its configuration, and whether it trains or takes one step."""

    name: str
    config: Config
    kind: Kind = "train"


class _Figures(Registry[Callable[..., Iterator[Experiment]]]):
    def resolve(self, name: str) -> str:
        return super().resolve(f"branchnorm:{name}" if name.isdigit() else name)


FIGURES = _Figures("figure with a sweep")
# Figures that are drawn from the same runs share a folder, so that none of them runs twice.
_FOLDERS = {"branchnorm:9": "branchnorm:8", "deepnet:5": "claims:fast", "admin:4": "claims:fast"}
# Core-minutes at scale tiny on synthetic data: CPU time of one process of each kind, its 3.4 s of start included (torch
# 2.13, one thread of a shared two-core machine; 50 to 300 updates, scaled to the full number), times the runs.
_MINUTES = {
    "branchnorm:3": 6,
    "branchnorm:5": 19,
    "branchnorm:8": 26,
    "branchnorm:9": 26,
    "deepnet:3": 10,
    "deepnet:4": 10,
    "deepnet:5": 23,
    "admin:4": 21,
    "claims:fast": 21,
}


@dataclass(frozen=True)
class Recipe:
    """What a figure's function is asked for: scale, the user's settings, and seeds (None: the figure's own)."""

    scale: Scale
    settings: Settings
    seeds: Sequence[int] | None

    @property
    def tiny(self) -> bool:
        return self.scale == "tiny"

    def runs(
        self,
        archs: Iterable[str],
        depths: Iterable[int],
        *settings: Settings,
        seeds: Sequence[int] = (),
        kind: Kind = "train",
        axes: Settings | None = None,
        tag: str = "",
    ) -> Iterator[Experiment]:
        """The product of control names, layers a side and seeds (five; three at the papers' size).

        ``axes`` win over the user's settings. Names are ``<label>-<layers>-<tag>-s<seed>``.
        """
        own_seeds = seeds or (SEEDS if self.tiny or kind == "onestep" else SEEDS[:3])
        for arch in archs:
            for layers in depths:
                for seed in self.seeds or own_seeds:
                    own = {
                        "model": {"encoder_layers": layers, "decoder_layers": layers, **CONTROLS[arch]},
                        "data": {"seed": seed},  # the order of batches is part of a seed, and the same for all archs
                        "train": {"seed": seed},
                    }
                    config = resolve(*settings, self.settings, axes or {}, own)
                    yield Experiment(name_of(config, *([tag] if tag else [])), config, kind)


CONTROLS: dict[str, dict[str, Any]] = {
    **{arch: {"arch": arch} for arch in ("postln", "preln", "postln-init", "deepnorm", "branchnorm", "admin")},
    "branchnorm T=1": {"arch": "branchnorm", "T": 1},
    "branchnorm alpha=0": {"arch": "branchnorm", "alpha": 0.0},
    "postln+beta": {"arch": "postln", "init": "deepnorm"},
    "postln/preln": {"arch": "postln", "decoder_arch": "preln"},
}


def name_of(config: Config, *tags: str) -> str:
    """Such as ``branchnorm-T1-12-warmup0-s3``: label, layers in all, what else varies, seed."""
    return "-".join(filter(None, (slug(label(config.model)), str(config.model.depth), *tags, f"s{config.train.seed}")))


def slug(text: str) -> str:
    """``text`` as a part of a file name that needs no quoting."""
    return re.sub(r"[^\w+.]+", "-", text.replace("=", ""), flags=re.ASCII).strip("-.")


def experiments(
    figure: str, scale: str = "tiny", *, data: Settings | None = None, seeds: Sequence[int] | None = None
) -> list[Experiment]:
    """The runs of ``figure`` ("branchnorm:8", or "8" for short) at ``scale``; ``data`` sets data.* for all of them.

    ``seeds`` replaces the figure's own. Raises UsageError for an unknown figure or scale, and at scale ``paper``
    without ``data["source"]``.
    """
    name = FIGURES.resolve(figure)
    if scale not in get_args(Scale):
        raise UsageError(f"unknown scale {scale!r}; choose one of {', '.join(get_args(Scale))}.")
    if scale == "paper" and not (data or {}).get("source"):
        raise UsageError(
            f"{name} at scale paper needs text of yours: name it with --data text:SRC,TGT or --data hf:DATASET,SRC,TGT."
        )
    recipe = Recipe("tiny" if scale == "tiny" else "paper", {"data": dict(data or {})}, seeds)
    return list(FIGURES[name](recipe))


def folder(figure: str, scale: str = "tiny") -> str:
    """Where the runs of ``figure`` stand below the folder of all runs: ``tiny/branchnorm-8`` for ``branchnorm:9``."""
    name = FIGURES.resolve(figure)
    return f"{scale}/{slug(_FOLDERS.get(name, name))}"


def minutes(figure: str, scale: str = "tiny") -> float | None:
    """Core-minutes that all runs of ``figure`` take on synthetic data; None at scale paper, where nobody measured."""
    return _MINUTES[FIGURES.resolve(figure)] if scale == "tiny" else None


def command(figure: str, scale: str = "tiny") -> str:
    """The shell command that makes the runs of ``figure``; one-step runs share a few processes in ``claims --fast``."""
    name = FIGURES.resolve(figure)
    if scale == "tiny" and name in ("claims:fast", "admin:4"):
        return "stabilitylab claims --fast"
    return f"stabilitylab sweep {name} --scale {scale}" + ("" if scale == "tiny" else " --data text:SRC,TGT")


# The papers' recipe at the size of "tiny", where only the first of its 4000 warm-up updates are run ...
EARLY = {"model": {"T": 4000}, "train": {"lr": 5e-4, "warmup": 4000}}
# ... and at full size: 524k tokens a batch and 100k updates (BranchNorm, Table 4); DeepNet's analyses use IWSLT.
BASE = {"preset": "base", "data": {"sentences": 16, "max_length": 256}}
BRANCHNORM = merge(BASE, {"train": {"accumulate": 128}})
DEEPNET = merge(BASE, {"model": {"dropout": 0.4}, "train": {"steps": 8000}})
DROPOUT = {0.01: 0.4, 0.1: 0.2, 1.0: 0.1}  # BranchNorm's for small, medium and large data, by share of the corpus
DYNAMICS = ("activation_grad_norm", "grad_norm", "ln_input", "model_update")


def probing(*names: str, every: int | str = "log", update_every: int | str = "log") -> dict[str, Any]:
    return {"probes": {"names": names or ("none",), "every": every, "update_every": update_every}}


@FIGURES.register("branchnorm:3")
def _gradient_norm_at_the_beginning(ask: Recipe) -> Iterator[Experiment]:
    """Every row has grad_norm: C09 follows the norm without the branch weights from step to step.

    Inferred: the paper states neither model nor range; at full size 100L-100L and the 4000 updates of its ramp.
    """
    archs = ("postln", "deepnorm", "branchnorm", "branchnorm T=1")
    probes = probing("grad_norm", every=1, update_every=10)
    if ask.tiny:
        yield from ask.runs(archs, [6], EARLY, probes, {"train": {"steps": 500}})
    else:
        yield from ask.runs(archs, [100], BRANCHNORM, probes, {"train": {"steps": 4000}})


@FIGURES.register("branchnorm:5")
def _quality_against_depth(ask: Recipe) -> Iterator[Experiment]:
    recipe = {"model": {"T": 200}, "train": {"lr": 7e-4, "warmup": 100, "steps": 400}} if ask.tiny else BRANCHNORM
    for fraction, dropout in DROPOUT.items():
        axes: dict[str, Any] = {"data": {"fraction": fraction}}
        if not ask.tiny:
            axes["model"] = {"dropout": dropout}
        yield from ask.runs(
            ("deepnorm", "branchnorm"),
            (3, 6, 18) if ask.tiny else (6, 18, 50, 100, 250, 500),
            recipe,
            probing(),
            seeds=SEEDS[:3],
            axes=axes,
            tag=f"data{fraction:g}",
        )


@FIGURES.register("branchnorm:8")
def _similarity_and_sparsity(ask: Recipe) -> Iterator[Experiment]:
    """At full size both 18L-18L, as the figure's axes read, and 100L-100L, as its text says."""
    judged, others = ("deepnorm", "branchnorm", "branchnorm T=1"), ("postln", "preln", "admin")
    probes = probing("default", "branch_variance")
    if ask.tiny:
        recipe = {"model": {"T": 600}, "train": {"lr": 7e-4, "warmup": 300, "steps": 1200}}
        yield from ask.runs(judged, [6], recipe, probes, seeds=(*SEEDS, 8))
        yield from ask.runs(others, [6], recipe, probes)
    else:
        yield from ask.runs((*judged, *others), [18], BRANCHNORM, probes)
        yield from ask.runs(judged, [100], BRANCHNORM, probes)


FIGURES.register("branchnorm:9")(_similarity_and_sparsity)


@FIGURES.register("deepnet:3")
def _gradient_norm_of_the_last_layer(ask: Recipe) -> Iterator[Experiment]:
    archs, depths = ("postln", "postln-init"), (6, 12, 18, 24)
    if ask.tiny:
        yield from ask.runs(archs, depths, EARLY, probing("grad_norm", every=10), {"train": {"steps": 101}})
        converging = {"train": {"lr": 3e-4, "warmup": 40, "steps": 160}}
        yield from ask.runs(archs, [18], converging, probing("grad_norm"), tag="warmup40")
    else:
        yield from ask.runs(archs, depths, DEEPNET, probing("grad_norm"))


@FIGURES.register("deepnet:4")
def _accumulated_update(ask: Recipe) -> Iterator[Experiment]:
    """Post-LN without warm-up has ten seeds: the order of events of claim C18 is counted over runs."""
    first = {"train": {"steps": 101}}
    size = EARLY if ask.tiny else DEEPNET
    shared = (size, first, probing(*DYNAMICS, every=1, update_every=1))
    cold, warm = {"train": {"warmup": 0}}, {"train": {"warmup": 4000}}
    yield from ask.runs(["postln"], [18], *shared, cold, seeds=range(3, 13), tag="warmup0")
    yield from ask.runs(["postln-init"], [18], *shared, cold, tag="warmup0")
    yield from ask.runs(["postln", "postln-init", "deepnorm", "branchnorm"], [18], *shared, warm, tag="warmup4000")


ONE_STEP_BASE = {"preset": "base", "data": {"sentences": 16}}
ONE_STEP = ("postln", "preln", "postln-init", "postln+beta", "deepnorm", "branchnorm", "branchnorm T=1", "admin")


@FIGURES.register("admin:4")
def _output_change(ask: Recipe) -> Iterator[Experiment]:
    """One step from the initialisation; Admin's figure goes up to 100 layers, at the base size."""
    size: Settings = {"model": {"T": 4000}} if ask.tiny else ONE_STEP_BASE
    depths = (3, 6, 12, 18, 25, 50) if ask.tiny else (3, 6, 12, 18, 25, 50, 100)
    yield from ask.runs(ONE_STEP, depths, size, kind="onestep")
    yield from ask.runs(["branchnorm alpha=0"], [18], size, kind="onestep")


@FIGURES.register("deepnet:5")
def _update_against_depth(ask: Recipe) -> Iterator[Experiment]:
    """DeepNet's own model is 64-128-2, so both scales are of that size; at scale paper the early training as well."""
    size: Settings = {"model": {"T": 4000}}
    deep = ("postln", "deepnorm", "branchnorm")
    if ask.tiny:
        yield from _output_change(ask)
        yield from ask.runs(deep, [100], size, seeds=SEEDS[:3], kind="onestep")
    else:
        depths = (6, 12, 18, 25, 50, 100)
        tiny = merge(EARLY, {"train": {"steps": 101}})
        yield from ask.runs(ONE_STEP, depths, size, kind="onestep", tag="64")
        yield from ask.runs(deep, depths, tiny, probing("model_update", update_every=1), tag="64-train")


@FIGURES.register("claims:fast")
def _claims_of_one_step(ask: Recipe) -> Iterator[Experiment]:
    """All one-step claims; Post-LN encoder with Pre-LN decoder (C05) beside the archs of admin:4."""
    yield from _output_change(ask)
    size: Settings = {"model": {"T": 4000}} if ask.tiny else ONE_STEP_BASE
    yield from ask.runs(["postln/preln"], [18], size, kind="onestep")
