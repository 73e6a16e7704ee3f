"""The parts of a list of runs: experiments, the recipe for which a figure's function makes them, and names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..config import Config, merge, recipe_of, resolve, stack_of
from ..labels import label

Kind = Literal["train", "onestep"]
Scale = Literal["tiny", "h200", "paper"]
Settings = Mapping[str, Any]
SEEDS = (3, 4, 5, 6, 7)
SHORT = {"train": {"steps": 160, "warmup": 40}}  # of figures' runs at the size of "tiny" that name nothing else


@dataclass(frozen=True)
class Experiment:
    """One run: its name within its folder, its configuration, and its kind (it trains, or takes one step)."""

    name: str
    config: Config
    kind: Kind = "train"


@dataclass(frozen=True)
class Recipe:
    """The request to a figure's function: scale, the user's settings, seeds and updates (None: the figure's own)."""

    scale: Scale
    settings: Settings
    seeds: Sequence[int] | None = None
    steps: int | None = None

    @property
    def one_gpu(self) -> bool:
        return self.scale == "h200"

    @property
    def tiny(self) -> bool:
        return self.scale == "tiny"

    def only(self, seed: int) -> Recipe:
        """Return the same recipe with one seed."""
        return replace(self, seeds=(seed,))

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
        """Yield every combination of names of controls or architectures, layers a side and seeds (five at scale tiny
        and for one step, else three). If the settings name a single stack, that stack alone has the layers.

        ``axes`` override the user's settings. Names are ``<label>-<layers in all>-<tag>-s<seed>``.
        """
        model = merge(*settings, self.settings, axes or {}).get("model", {})
        stack = stack_of(model if isinstance(model, Mapping) else {})
        own_seeds = seeds or (SEEDS if self.tiny or kind == "onestep" else SEEDS[:3])
        for arch in archs:
            for layers in depths:
                for seed in self.seeds or own_seeds:
                    own = {
                        "model": {**sides(stack, layers), **control(arch)},
                        "data": {"seed": seed},  # the order of batches is part of a seed, and the same for all archs
                        "train": {"seed": seed},
                    }
                    config = figure_config(*settings, self.settings, axes or {}, own)
                    yield Experiment(name_of(config, *([tag] if tag else [])), config, kind)


def figure_config(*layers: Settings) -> Config:
    """Resolve the configuration of a run for a figure.

    ``layers`` override the settings that the paper of the architecture requires, and these override :data:`SHORT`, the
    recipe of the committed runs, which is shorter than that of ``stabilitylab probe``. With a preset other than "tiny",
    only ``layers`` count.
    """
    merged = merge(*layers)
    if merged.get("preset", "tiny") != "tiny":
        return resolve(merged)
    return resolve(SHORT, recipe_of(merged.get("model", {}).get("arch", "")), merged)


def sides(stack: Any, layers: int) -> dict[str, int]:
    """Return the layers of each stack: ``layers`` in those that ``model.stack`` names."""
    return {f"{side}_layers": layers if side in str(stack) else 0 for side in ("encoder", "decoder")}


CONTROLS: dict[str, dict[str, Any]] = {
    **{arch: {"arch": arch} for arch in ("postln", "preln", "postln-init", "deepnorm", "branchnorm", "admin")},
    "branchnorm T=1": {"arch": "branchnorm", "T": 1},
    "branchnorm alpha=0": {"arch": "branchnorm", "alpha": 0.0},
    "postln+beta": {"arch": "postln", "init": "deepnorm"},
    "postln gain=1": {"arch": "postln", "init": "xavier-1"},  # Post-LN as DeepNet defines it
    "postln-init gain=1": {"arch": "postln-init", "init": "arch-1"},
    "deepnorm alpha-only gain=1": {"arch": "deepnorm", "init": "xavier-1"},
    "postln/preln": {"arch": "postln", "decoder_arch": "preln"},
    "keel inner=False": {"arch": "keel", "options": {"inner": False}},  # the ablation of KEEL's Eq. 24
}


def control(name: str) -> Mapping[str, Any]:
    """Return the settings of the control ``name``, or of the architecture of that name."""
    return CONTROLS.get(name, {"arch": name})


def name_of(config: Config, *tags: str) -> str:
    """Return the name of a run, such as ``branchnorm-T1-12-warmup0-s3``: label, layers in all, tags, seed."""
    return "-".join(filter(None, (slug(label(config.model)), str(config.model.depth), *tags, f"s{config.train.seed}")))


def slug(text: str) -> str:
    """Return ``text`` as a part of a file name that needs no quoting."""
    return re.sub(r"[^\w+.]+", "-", text.replace("=", ""), flags=re.ASCII).strip("-.")


# The papers' recipe at the size of "tiny", where only the first of its 4000 warm-up updates are run ...
EARLY = {"model": {"T": 4000}, "train": {"lr": 5e-4, "warmup": 4000}}
# ... and at full size: 524k tokens a batch and 100k updates (BranchNorm, Table 4); DeepNet's analyses use IWSLT.
BASE = {"preset": "base", "data": {"sentences": 16, "max_length": 256}}
BRANCHNORM = merge(BASE, {"train": {"accumulate": 128}})
DEEPNET = merge(BASE, {"model": {"dropout": 0.4}, "train": {"steps": 8000}})
# The repository of Admin's authors: RAdam, embeddings shared, dropout inside the sub-layers too.
AUTHORS = merge(
    BASE,
    {"model": {"tie": "all", "attention_dropout": 0.1, "activation_dropout": 0.1}},
    {"train": {"optimizer": "radam"}},
)


def probing(*names: str, every: int | str = "log", update_every: int | str = "log") -> dict[str, Any]:
    """Return the settings of the probes ``names`` (none: no probe), and how often their rows come."""
    return {"probes": {"names": names or ("none",), "every": every, "update_every": update_every}}
