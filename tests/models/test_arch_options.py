"""Options of an architecture: its own pydantic class, ``--set arch.KEY``, and where they are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import Field

from stabilitylab.config import RAMP, Config, ModelConfig, parse_set, resolve
from stabilitylab.errors import UsageError
from stabilitylab.labels import label
from stabilitylab.models import ARCHS, arch, build_model
from stabilitylab.models.archs.branchnorm import BranchNorm
from stabilitylab.models.archs.postln import PostLN
from stabilitylab.models.base import ArchOptions
from stabilitylab.models.facts import facts
from stabilitylab.sweep.identity import key_of

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
    with pytest.raises(UsageError, match=r"option arch\.kappa = -1: Input should be greater than 0"):
        build_model(model("arch.kappa=-1", arch="bent"), **VOCAB)
    with pytest.raises(UsageError, match="is no section"):
        resolve({"arch": "postln"})


def test_configurations_with_options_can_be_told_apart_in_a_set(bent) -> None:
    same, other = (model(f"arch.kappa={value}", arch="bent") for value in (0.5, 2))
    assert len({same, other, model("arch.kappa=0.5", arch="bent")}) == 2
