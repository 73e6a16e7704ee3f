"""Convolutions and U-nets: what has no place is said once, by name (log, run, ``diagnose``, ``preflight``)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from convolutional import CONVOLUTIONAL
from entries import Entry
from handmade import HANDMADE

import stabilitylab
from stabilitylab.diagnose.unmeasured import unmeasured
from stabilitylab.probes import find_sites
from stabilitylab.store import Run

MIDDLE = {"activation_grad_norm", "residual_norm", "cosine_similarity"}


def recorded(entry: Entry, folder: Path, **options: Any) -> Run:
    model = entry.born()
    with stabilitylab.watch(model, out=folder, every=1, reference=lambda: entry.loss(model), **options) as watcher:
        for _ in range(3):
            model.zero_grad()
            loss = entry.loss(model)
            loss.backward()
            watcher.step(loss=loss)
    return Run.open(folder)


def test_a_u_net_says_that_its_middle_and_its_norms_have_no_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "stabilitylab"):
        run = recorded(CONVOLUTIONAL["u-net"], tmp_path / "run", probes="default,residual_norm")
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("no number of")]
    assert len(told) == 2
    (middle,) = [text for text in told if "for middle: each is a block of convolutions in no stack of layers" in text]
    assert all(table in middle for table in MIDDLE)
    (norms,) = [text for text in told if text.startswith("no number of ln_input for ")]
    assert (
        "down.0.bn, down.1.bn, up.0.bn, up.1.bn, middle.1: each normalises over positions or examples as well" in norms
    )
    unseen = run.manifest["places_unseen"]
    assert unseen["residual_norm"] == ["middle"]
    assert unseen["ln_input"] == ["down.0.bn", "down.1.bn", "up.0.bn", "up.1.bn", "middle.1"]
    assert "finds no norms" in run.manifest["probes_dropped"]["ln_input"]
    said = unmeasured(run)
    assert said["residual_norm"] == "no number at middle"
    assert "finds no norms in this model" in said["ln_input"]
    assert "no number at down.0.bn" in said["ln_input"]


def test_preflight_says_so_too() -> None:
    entry = CONVOLUTIONAL["u-net"]
    model = entry.born()
    result = stabilitylab.preflight(model, entry.feed()["x"], lambda model, x: model(x).square().mean())
    assert "no number at middle" in result.unmeasured["residual_norm"]
    assert "not measured: residual_norm, no number at middle" in str(result)


def test_a_convolutional_network_of_blocks_lacks_its_norms_alone() -> None:
    assert find_sites(CONVOLUTIONAL["convolutions with batch norms"].born()).left_out["stream"] == {}


def test_a_transformer_lacks_nothing() -> None:
    for name in ("torch's decoder", "a tied head", "sandwich norms around torch's attention"):
        assert not any(find_sites(HANDMADE[name].born()).left_out.values())


def test_layers_that_are_named_are_no_longer_missed() -> None:
    own = {"layers": r"down\.\d|middle|up\.\d", "norms": "middle.1"}
    sites = stabilitylab.sites(CONVOLUTIONAL["u-net"].born(), sites=own)
    assert [site.name for site in sites.layers] == ["down.0", "down.1", "up.0", "up.1", "middle"]
    assert not any(sites.left_out.values())
    assert torch.is_tensor(CONVOLUTIONAL["u-net"].feed()["x"])
