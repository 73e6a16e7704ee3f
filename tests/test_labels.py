"""The names of controls in tables."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stabilitylab.config import ModelConfig
from stabilitylab.labels import label


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"arch": "postln"}, "postln"),
        ({"arch": "postln", "init": "xavier"}, "postln"),
        ({"arch": "postln", "init": "deepnorm"}, "postln+beta"),
        ({"arch": "preln"}, "preln"),
        ({"arch": "preln", "init": "deepnorm"}, "preln+beta"),
        ({"arch": "postln", "init": "xavier-1"}, "postln gain=1"),
        ({"arch": "postln", "init": "arch-1"}, "postln gain=1"),
        ({"arch": "postln-init", "init": "arch-1"}, "postln-init gain=1"),
        ({"arch": "postln-init", "init": "xavier-1"}, "postln-init xavier gain=1"),
        ({"arch": "deepnorm", "init": "arch-1"}, "deepnorm"),
        ({"arch": "deepnorm", "init": "xavier-1"}, "deepnorm alpha-only gain=1"),
        ({"arch": "branchnorm", "T": 1, "init": "xavier-1"}, "branchnorm T=1 xavier gain=1"),
        ({"arch": "subln", "init": "arch-1"}, "subln"),
        ({"arch": "postln", "qk_gain": 0.5, "v_gain": 2.0}, "postln qk=0.5 v=2"),
        ({"arch": "postln-init"}, "postln-init"),
        ({"arch": "postln-init", "init": "xavier"}, "postln-init xavier"),
        ({"arch": "admin"}, "admin"),
        ({"arch": "branchnorm"}, "branchnorm"),
        ({"arch": "branchnorm", "init": "deepnorm", "T": 100}, "branchnorm"),
        ({"arch": "branchnorm", "T": 1}, "branchnorm T=1"),
        ({"arch": "branchnorm", "init": "xavier"}, "branchnorm xavier"),
        ({"arch": "branchnorm", "T": 1, "init": "xavier"}, "branchnorm T=1 xavier"),
        ({"arch": "branchnorm", "alpha": 0.5}, "branchnorm alpha=0.5"),
        ({"arch": "branchnorm", "growth": "exp"}, "branchnorm exp"),
        ({"arch": "branchnorm", "growth": "sigmoid", "T": 1}, "branchnorm T=1"),
        ({"arch": "deepnorm", "growth": "exp", "T": 1}, "deepnorm"),
        ({"arch": "deepnorm"}, "deepnorm"),
        ({"arch": "deepnorm", "init": "xavier"}, "deepnorm alpha-only"),
        ({"arch": "deepnorm", "alpha": 1.0}, "deepnorm beta-only"),
        ({"arch": "deepnorm", "alpha": 2.5}, "deepnorm alpha=2.5"),
        ({"arch": "deepnorm", "alpha": 2.5, "init": "xavier"}, "deepnorm alpha=2.5 xavier"),
        ({"arch": "deepnorm", "qk_gain": 0.5}, "deepnorm qk=0.5"),
        ({"arch": "subln", "init": "xavier"}, "subln xavier"),
        ({"arch": "rezero", "init": "xavier"}, "rezero"),
        ({"arch": "preln", "norm": "rmsnorm"}, "preln rmsnorm"),
        ({"arch": "preln", "qk_norm": True, "qk_gain": 0.5}, "preln qk=0.5 qk-norm"),
        ({"arch": "postln", "decoder_arch": "preln", "qk_norm": True}, "postln qk-norm/preln qk-norm"),
        ({"arch": "postln", "decoder_arch": "preln"}, "postln/preln"),
        ({"arch": "postln", "decoder_arch": "postln"}, "postln"),
        ({"arch": "deepnorm", "decoder_arch": "preln", "init": "xavier"}, "deepnorm alpha-only/preln"),
    ],
)
def test_label(settings, expected) -> None:
    assert label(ModelConfig.model_validate(settings)) == expected


def test_labels_need_no_torch() -> None:
    code = "import sys, stabilitylab.labels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
