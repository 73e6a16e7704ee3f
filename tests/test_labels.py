"""The names of controls in tables."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from stabilitylab.config import ModelConfig
from stabilitylab.designs import DESIGNS
from stabilitylab.labels import has_ramp, label, label_of
from stabilitylab.models import ARCHS, build_model
from stabilitylab.models.archs.branchnorm import BranchNorm
from stabilitylab.models.base import arch
from stabilitylab.models.schedules import Schedule
from stabilitylab.reports.collection import FREE

DECODER: dict[str, Any] = {"encoder_layers": 0, "decoder_layers": 4}


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
        ({"arch": "branchnorm", "t0": 0}, "branchnorm t0=0"),
        ({"arch": "branchnorm", "t0": 50}, "branchnorm t0=50"),
        ({"arch": "branchnorm", "T": 100, "t0": 100}, "branchnorm T=1"),
        ({"arch": "branchnorm", "T": 1, "t0": 0, "growth": "exp"}, "branchnorm T=1 t0=0"),
        ({"arch": "branchnorm", "growth": "exp", "t0": 0}, "branchnorm exp t0=0"),
        ({"arch": "branchnorm", "alpha": 0.5, "t0": 0, "growth": "exp"}, "branchnorm alpha=0.5"),
        ({"arch": "mine", "init": "xavier"}, "mine xavier"),
        ({"arch": "mine", "options": {"kappa": 0.5, "bend": "up"}}, "mine bend=up kappa=0.5"),
        ({"arch": "mine", "init": "arch-1"}, "mine gain=1"),
        ({"arch": "mine", "init": "deepnorm"}, "mine+beta"),
        ({"arch": "mine", "alpha": 1.0}, "mine alpha=1"),
        ({"arch": "mine", "growth": "exp", "t0": 0}, "mine exp t0=0"),
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
        ({"arch": "preln", **DECODER, **DESIGNS["gpt2"]}, "preln gpt2"),
        ({"arch": "preln", **DECODER, **DESIGNS["gpt2"], "design": "gpt2"}, "preln gpt2"),
        ({"arch": "deepnorm", **DECODER, **DESIGNS["llama"]}, "deepnorm llama"),
        ({"arch": "deepnorm", **DECODER, **DESIGNS["llama"], "init": "arch"}, "deepnorm llama xavier-init"),
        (
            {"arch": "deepnorm", **DECODER, **DESIGNS["llama"], "init": "xavier"},
            "deepnorm alpha-only llama xavier-init",
        ),
        ({"arch": "preln", **DECODER, **DESIGNS["gpt2"], "positions": "rope"}, "preln gpt2 rope"),
        (
            {"arch": "preln", **DECODER, **DESIGNS["gpt2"], "norm": "rmsnorm", "bias": False},
            "preln gpt2 no-bias rmsnorm",
        ),
        ({"arch": "preln", "activation": "gelu", "embedding_scale": 1}, "preln gelu unscaled"),
        ({"arch": "preln", "init": "arch-gpt2"}, "preln gpt2-init"),
        ({"arch": "preln", "init": "base-normal"}, "preln normal-init"),
    ],
)
def test_label(settings, expected) -> None:
    assert label(ModelConfig.model_validate(settings)) == expected


# How a figure tells two models apart that differ in this setting: by the label, by a note on T, or by drawing runs
# with the same value only. A new setting needs a line here, and what the line says.
SAID = {
    **dict.fromkeys(("arch", "decoder_arch", "init", "alpha", "qk_gain", "v_gain", "growth", "t0", "options"), "label"),
    **dict.fromkeys(("stack", "encoder_layers", "decoder_layers", "d_model", "d_ffn", "heads", "tie"), "apart"),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), "apart"),
    **dict.fromkeys(("norm", "qk_norm"), "label and apart"),
    **dict.fromkeys(("positions", "activation", "bias", "embedding_scale"), "label and apart"),
    **dict.fromkeys(("prores", "prores_T", "prores_t0", "prores_order"), "label with prores"),
    "attention_gate": "label and apart",
    "norm_alpha": "label and apart, of dyt",
    "context": "apart",
    "design": "a name for other settings, which say it",
    "T": "note",
}
OTHER: dict[str, Any] = {"arch": "admin", "decoder_arch": "postln", "init": "xavier-1", "alpha": 0.5, "qk_gain": 0.5}
OTHER |= {"positions": "rope", "activation": "swiglu", "bias": False, "embedding_scale": 1}
OTHER |= {"norm_alpha": [0.8, 0.2, 0.2]}
OTHER |= {"attention_gate": "head"}
OTHER |= {"prores": "equal", "prores_T": 7, "prores_t0": 3, "prores_order": "through"}
OTHER |= {"options": {"kappa": 2.0}, "v_gain": 0.5, "growth": "exp", "t0": 0, "norm": "rmsnorm", "qk_norm": True}


def test_every_setting_of_a_model_is_told_by_its_label_by_a_note_or_by_runs_kept_apart() -> None:
    assert SAID.keys() == ModelConfig.model_fields.keys()
    assert {key for key, said in SAID.items() if "apart" not in said} == {
        key.partition(".")[2] for key in FREE if key.startswith("model.")
    }
    for key in (key for key, said in SAID.items() if "label" in said):
        own = {"arch": "postln", "prores": "linear"} if key.startswith("prores_") else {}
        own |= {"norm": "dyt"} if key == "norm_alpha" else {}
        changed = label(ModelConfig.model_validate({**own, key: OTHER[key]}))
        assert changed != label(ModelConfig.model_validate(own)), key


def weights_of(**settings: Any) -> bytes:
    model = build_model(source_vocab=5, target_vocab=5, tie="none", d_model=4, d_ffn=4, heads=1, depth=4, **settings)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.digest()


@pytest.fixture
def mine() -> Iterator[str]:
    """An architecture that no part of this package knows: a ramp, an alpha and gains of its own."""

    with ARCHS.restored():

        @arch("mine")
        class Mine(BranchNorm):
            def gain(self, matrix: str) -> float:
                return 0.25 * super().gain(matrix)

        yield "mine"


@pytest.mark.slow
def test_models_that_differ_in_weights_or_formula_have_different_labels(mine) -> None:
    """All combinations of what runs of one group may differ in; T stands beside a label where it is a ramp's."""
    gains = [
        {"init": init, "qk_gain": qk, "v_gain": v}
        for init in get_args(ModelConfig.model_fields["init"].annotation)
        for qk, v in ((None, None), (0.5, None), (None, 0.5))
    ]
    ramps = [
        {"growth": growth, "T": T, "t0": t0}
        for growth in ("linear", "exp", "sigmoid")
        for T in (1, 4)
        for t0 in (0, 1, 2, 4)
    ]
    ramps += [{**ramp, "alpha": alpha} for ramp in ramps[-2:] for alpha in (0.5, 1.0)]
    models: dict[tuple[Any, ...], set[Any]] = {}
    labels: dict[Any, set[str]] = {}
    for name in ARCHS:
        for gain in gains:
            weights = weights_of(arch=name, **gain)
            for ramp in ramps:
                config = ModelConfig.model_validate({"arch": name, **gain, **ramp})
                if config.alpha is not None and not ARCHS[name].takes_alpha:
                    continue
                schedule = Schedule(config, config.alpha)
                course = tuple(map(schedule.at, range(5))) if ARCHS[name].scheduled else ()
                constant = config.alpha if ARCHS[name].takes_alpha else None
                ended = config.T if has_ramp(config) and "T=1" not in label(config) else None
                model = (name, weights, course, constant)
                models.setdefault((label(config), ended), set()).add(model)
                labels.setdefault(model, set()).add(label(config))
    assert len(models) > 500
    assert {key: len(same) for key, same in models.items() if len(same) > 1} == {}
    # and no model of ours has two labels, which would split its seeds; out and fc2 of R-Fixup are 0 in every base, so
    # that GPT-2's, which differs from the normal one there alone, is no other model
    alike = {"rfixup gpt2-init", "rfixup normal-init"}
    several = [same for (name, *_), same in labels.items() if len(same) > 1 and name != mine]
    assert [same for same in several if {re.sub(r" (qk|v)=0.5", "", word) for word in same} != alike] == []


@pytest.mark.parametrize(
    ("recorded", "settings", "expected"),
    [
        ("branchnorm", {"arch": "branchnorm", "t0": 0}, "branchnorm t0=0"),
        ("mine", {"arch": "mine", "init": "xavier"}, "mine xavier"),
        ("GPT2LMHeadModel", {"arch": "branchnorm"}, "GPT2LMHeadModel"),
        ("postln", {"arch": "postln", "of_another_version": 1}, "postln"),
        ("branchnorm T=1", {}, "branchnorm T=1"),
    ],
)
def test_a_run_of_before_gets_the_label_of_today(recorded, settings, expected) -> None:
    assert label_of({"label": recorded, "config": {"model": settings}}) == expected


def test_a_run_without_a_configuration_keeps_its_label() -> None:
    assert label_of({"label": "BertModel", "config": {}}) == "BertModel"
    assert label_of({}) == ""


def test_labels_need_no_torch() -> None:
    code = "import sys, stabilitylab.labels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
