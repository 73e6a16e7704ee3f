"""Every architecture learns at 12 layers: on real parallel text where there is any, and on the made-up language."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rest_slow import SOME_ARCHS, rest_slow

from stabilitylab.config import parse_set, resolve
from stabilitylab.models import ARCHS
from stabilitylab.store import AbsentRun, RunWriter
from stabilitylab.train import plan
from stabilitylab.train.loop import Trainer
from stabilitylab.train.ranks import Team

STEPS = 30
WITHOUT_NORMS = ("train.steps=60", "train.warmup=10")  # their branches start at or near 0
SOME = SOME_ARCHS | {"postln", "preln", "deepnorm", "admin", "rezero"}
REAL = {"admin", "branchnorm", "dlcl", "resi-dual"}  # what real text adds to the made-up language is no matter of archs
RECIPE = (
    f"train.steps={STEPS} train.lr=2e-3 train.warmup=5 model.T=20 train.evaluations=3 probes.update_every=10 "
    "probes.names=['ln_input']"
)


def learns(folder: Path, arch: str, *sets: str, depth: int = 12, least: float = 1.0) -> None:
    """The held-out loss, which starts about log V, falls by a nat, and no recorded number is NaN or inf."""
    own = (f"train.steps={STEPS}", f"model.arch={arch}", "data.sentences=16")
    if not ARCHS[arch].normalised:
        own, sets = (*own, *WITHOUT_NORMS), ("train.lr=1e-3", *sets, "probes.names=['grad_norm']")
    config = resolve(parse_set([*RECIPE.split(), *own, *sets]), depth=depth)
    prepared = plan(config)
    writer = RunWriter.create(folder, {"config": config.model_dump(mode="json")})
    trainer = Trainer(prepared.config, prepared.dataset, writer, prepared.device)
    trainer.fit(lambda: False, lambda report: None)
    trainer.watcher.close()
    assert trainer.watcher.incident is None
    nll = [each.nll for each in trainer.judging.evaluations]
    assert abs(nll[0] - np.log(prepared.dataset.target_vocab)) < 2
    assert nll[0] - nll[-1] > least


@pytest.mark.parametrize("arch", rest_slow(sorted(ARCHS), (), REAL))
def test_on_multi30k(arch: str, multi30k: Path, tmp_path: Path) -> None:
    text = ",".join(str(multi30k / f"train.{side}.gz") for side in ("de", "en"))
    learns(tmp_path / "run", arch, f"data.source=text:{text}", "data.vocab_size=2000")


@pytest.mark.parametrize("arch", rest_slow(sorted(ARCHS), (), SOME))
def test_on_the_made_up_language(arch: str, tmp_path: Path) -> None:
    learns(tmp_path / "run", arch)


def test_all_ranks_calibrate_admin_alike_with_dropout() -> None:
    """FSDP shards each rank's own weights, so that they must be equal."""
    sets = ["model.arch=admin", "model.dropout=0.1", "data.sentences=4", "data.held_out=6", "probes.names=['none']"]
    prepared = plan(resolve(parse_set(sets), depth=4))

    def omegas(team: Team) -> torch.Tensor:
        trainer = Trainer(prepared.config, prepared.dataset, AbsentRun("nowhere"), torch.device("cpu"), team=team)
        return torch.stack([p.detach() for n, p in trainer.model.named_parameters() if n.endswith("omega")])

    alone, first, second = (omegas(team) for team in (Team(), Team("none", 0, 2), Team("none", 1, 2)))
    assert torch.equal(first, alone)
    assert torch.equal(second, alone)
    assert alone.std(dim=1).max() == 0, "each is one number, repeated"
