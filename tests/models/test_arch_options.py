"""Options of an architecture: its own pydantic class, ``--set arch.KEY``, and where they are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import Field

from stabilitylab.arch_notes import Option, note
from stabilitylab.config import RAMP, Config, ModelConfig, parse_set, resolve, validated
from stabilitylab.errors import UsageError
from stabilitylab.labels import label, label_of
from stabilitylab.models import ARCHS, arch, build_model
from stabilitylab.models.archs.branchnorm import BranchNorm
from stabilitylab.models.archs.postln import PostLN
from stabilitylab.models.base import ArchOptions
from stabilitylab.models.facts import facts
from stabilitylab.sweep.identity import deciding, key_of

KEEL, DEEPNORM = "3c78b8d1d4567f05", "464e7ff784c13b10"  # computed before options were read by their types
VOCAB: dict[str, Any] = {"source_vocab": 9, "target_vocab": 9}


def model(*assignments: str, arch: str = "branchnorm") -> ModelConfig:
    return resolve({"model": {"arch": arch}}, parse_set(assignments), depth=4).model


@pytest.fixture
def bent() -> Iterator[None]:
    """A Post-LN whose shortcut is multiplied by an option of its own."""
    with ARCHS.restored():

        @arch("bent")
        class Bent(PostLN):
            """x_{l+1} = LN(kappa x_l + F(x_l)).  Mine."""

            class Options(ArchOptions):
                kappa: float = Field(default=1.0, gt=0)

            def forward(self, x, *context):
                return self.norm(self.shortcut(self.options.kappa * x) + self.branch(self.f(x, *context)))

        yield


@pytest.mark.parametrize(("key", "value"), [("T", 77), ("growth", "exp"), ("t0", 5)])
def test_an_option_of_the_ramp_is_recorded_as_its_alias(key: str, value: Any) -> None:
    own, alias = model(f"arch.{key}={value}"), model(f"model.{key}={value}")
    assert own == alias
    assert getattr(own, key) == value
    assert own.options == {}


def test_the_aliases_are_the_options_of_branchnorm() -> None:
    options, settings = (each.model_json_schema()["properties"] for each in (BranchNorm.Options, ModelConfig))
    assert set(options) == set(RAMP)
    assert options == {key: settings[key] for key in RAMP}


def test_an_option_and_its_alias_that_differ_are_refused() -> None:
    assert model("arch.T=7", "model.T=7").T == 7
    with pytest.raises(UsageError, match=r"arch\.T = 7 and model\.T = 8 are one setting"):
        model("arch.T=7", "model.T=8")


def test_options_reach_the_residuals_and_the_schedule() -> None:
    built = build_model(arch="branchnorm", depth=4, T=7, growth="exp", **VOCAB)
    assert built.schedule.T == 7
    assert next(iter(built.residuals())).options == BranchNorm.Options(T=7, growth="exp")


def test_an_arch_of_ones_own_has_options_of_its_own(bent) -> None:
    config = model("arch.kappa=0.5", arch="bent")
    assert config.options == {"kappa": 0.5}
    assert [each.options.kappa for each in build_model(config, **VOCAB).residuals()] == [0.5] * 10
    assert next(build_model(arch="bent", depth=4, **VOCAB).residuals()).options.kappa == 1.0
    assert facts("bent", 2, 2)["options"] == {"kappa": 1.0}
    assert label(config) == "bent kappa=0.5"
    assert label(model(arch="bent")) == "bent"


def test_options_are_part_of_a_runs_key_and_none_leave_it_as_it_was(bent) -> None:
    keys = [key_of(Config(model=model(*given, arch="bent"))) for given in ((), ("arch.kappa=0.5",), ("arch.kappa=2",))]
    assert len(set(keys)) == 3
    recorded = Config(model=model(arch="bent")).model_dump(mode="json")
    assert "options" not in recorded["model"]  # as runs from before have it
    assert key_of(Config.model_validate(recorded)) == keys[0]


def test_what_is_wrong_with_an_option_is_said(bent) -> None:
    with pytest.raises(UsageError, match=r"architecture 'bent' has no option 'kapa'; it has kappa"):
        build_model(model("arch.kapa=0.5", arch="bent"), **VOCAB)
    with pytest.raises(UsageError, match=r"option arch\.kappa = -1\.0: Input should be greater than 0"):
        build_model(model("arch.kappa=-1", arch="bent"), **VOCAB)
    with pytest.raises(UsageError, match="is no section"):
        resolve({"arch": "postln"})


def test_configurations_with_options_can_be_told_apart_in_a_set(bent) -> None:
    same, other = (model(f"arch.kappa={value}", arch="bent") for value in (0.5, 2))
    assert len({same, other, model("arch.kappa=0.5", arch="bent")}) == 2


@pytest.mark.parametrize("name", sorted(ARCHS))
def test_options_are_read_from_the_sources_as_the_classes_have_them(name: str) -> None:
    said = note(name)
    assert said is not None
    own = {key: Option(field.annotation, field.default) for key, field in ARCHS[name].Options.model_fields.items()}
    assert said.options == own


@pytest.mark.parametrize(
    ("arch", "given", "kept", "said"),
    [
        ("keel", "inner=true", {}, "keel"),
        ("keel", "inner=on", {}, "keel"),
        ("keel", "inner=off", {"inner": False}, "keel inner=False"),
        ("keel", "inner=false", {"inner": False}, "keel inner=False"),
        ("mhc", "n='4'", {}, "mhc"),
        ("mhc", "n=4.0", {}, "mhc"),
        ("mhc", "n='3'", {"n": 3}, "mhc n=3"),
        ("mhc", "start=staggered", {}, "mhc"),
        ("mix-ln", "post_share=.25", {}, "mix-ln"),
        ("mix-ln", "post_share=.3", {"post_share": 0.3}, "mix-ln post_share=0.3"),
        ("mix-ln", "post_share=1", {"post_share": 1.0}, "mix-ln post_share=1"),
        ("deepnorm", "beta=3", {"beta": 3.0}, "deepnorm beta=3"),
        ("bent", "kappa=.3", {"kappa": 0.3}, "bent kappa=0.3"),
        ("bent", "kappa=1", {}, "bent"),
    ],
)
def test_one_model_has_one_set_of_options_one_label_and_one_key(bent, arch, given, kept, said) -> None:
    config = model(f"arch.{given}", arch=arch)
    assert config.options == kept
    assert [type(value) for value in config.options.values()] == [type(value) for value in kept.values()]
    assert label(config) == said
    plainly = resolve({"model": {"arch": arch, "options": kept}}, depth=4).model
    assert config == plainly
    assert key_of(Config(model=config)) == key_of(Config(model=plainly))


def test_an_old_run_has_the_label_and_the_key_of_today() -> None:
    """It may have recorded a default, or a number as text."""
    today = model(arch="keel")
    old = today.model_dump(mode="json") | {"options": {"inner": True}}
    assert label_of({"label": "keel inner=True", "config": {"model": old}}) == "keel"
    assert deciding({"model": old}) == deciding({"model": today.model_dump(mode="json")})
    assert validated({"model": old}).model == today
    as_text = model(arch="mix-ln").model_dump(mode="json") | {"options": {"post_share": ".3"}}
    assert label_of({"label": "mix-ln post_share=.3", "config": {"model": as_text}}) == "mix-ln post_share=0.3"
    unknown = {"arch": "mine", "options": {"kappa": ".3"}}
    assert label_of({"label": "mine", "config": {"model": unknown}}) == "mine kappa=.3"


def test_lines_of_committed_ledgers_keep_their_keys() -> None:
    """Keys of the arms with options in results/keel and results/deepnorm-baseline, with synthetic data in the place of
    their text."""
    for options, name, key in (({"inner": False}, "keel", KEEL), ({"beta": 3.1301691601465746}, "deepnorm", DEEPNORM)):
        config = resolve({"model": {"arch": name, "options": options, "design": "llama", "init": "arch-1"}}, depth=12)
        assert config.model.options == options
        assert key_of(config) == key


def test_an_option_of_two_architectures_is_kept_unless_it_is_the_default_of_both(bent) -> None:
    @arch("bent-more")
    class More(PostLN):
        """x.  Mine."""

        class Options(ArchOptions):
            kappa: float = 2.0

    for value, kept in ((1.0, {"kappa": 1.0}), (2.0, {"kappa": 2.0})):
        two = {"arch": "bent", "decoder_arch": "bent-more", "options": {"kappa": value}}
        assert resolve({"model": two}, depth=4).model.options == kept
    two = {"arch": "keel", "decoder_arch": "siamese-norm", "options": {"inner": True}}
    assert resolve({"model": two}, depth=4).model.options == {}
