"""Grids: every combination once, clear about whatever is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stabilitylab.config import resolve
from stabilitylab.errors import UsageError
from stabilitylab.labels import label
from stabilitylab.models import ARCHS
from stabilitylab.registry import Registry
from stabilitylab.sweep import grid, grids
from stabilitylab.sweep.grids import ALIASES, _registered


def registry_of(names: Iterable[str]) -> Registry[None]:
    registry: Registry[None] = Registry("architecture")
    for name in names:
        registry.register(name)(None)
    return registry


def test_the_grid_of_the_issue() -> None:
    runs = grid(["arch=deepnorm,branchnorm", "depth=12,36", "seed=0..4", "train.lr=1e-3,3e-4"])
    assert len(runs) == 2 * 2 * 5 * 2
    assert len({run.name for run in runs}) == len(runs)
    assert runs[0].name == "deepnorm-12-lr0.001-s0"
    assert runs[-1].name == "branchnorm-36-lr0.0003-s4"
    first = runs[0].config
    assert (first.model.encoder_layers, first.model.decoder_layers, first.train.lr) == (6, 6, 1e-3)
    assert {(r.config.train.seed, r.config.data.seed) for r in runs} == {(s, s) for s in range(5)}
    assert {label(run.config.model) for run in runs} == {"deepnorm", "branchnorm"}


def test_every_alias_reaches_its_setting() -> None:
    runs = grid(
        [
            "arch=Post_LN",
            "depth=4",
            "seed=7",
            "lr=1e-2",
            "warmup=0",
            "steps=9",
            "T=5",
            "data=text:a.de,b.en",
            "preset=tiny",
        ]
    )
    assert len(runs) == 1
    config = runs[0].config
    assert config.model.arch == "postln"
    assert config.model.depth == 4
    assert (config.train.seed, config.data.seed) == (7, 7)
    assert (config.train.lr, config.train.warmup, config.train.steps) == (1e-2, 0, 9)
    assert (config.model.T, config.data.source, config.preset) == (5, "text:a.de,b.en", "tiny")
    assert len(ALIASES) == 9


def test_base_settings_stand_under_the_axes() -> None:
    base = {"model": {"arch": "admin", "stack": "decoder"}, "train": {"lr": 1.0, "steps": 7}}
    runs = grid(["depth=3", "lr=0.1,0.2"], base, kind="onestep")
    assert [(r.config.train.lr, r.config.train.steps, r.config.model.arch) for r in runs] == [
        (0.1, 7, "admin"),
        (0.2, 7, "admin"),
    ]
    assert {(r.config.model.encoder_layers, r.config.model.decoder_layers) for r in runs} == {(0, 3)}
    assert {run.kind for run in runs} == {"onestep"}
    named = {"model": {"encoder_layers": 9, "decoder_layers": 9}}
    assert grid(["depth=4"], named)[0].config.model.depth == 4
    assert grid(["seed=1"], named)[0].config.model.depth == 18
    assert grid(["seed=1"], depth=6)[0].config.model.depth == 6


def test_values_with_commas() -> None:
    sources = [r.config.data.source for r in grid(["data=synthetic,text:a,b,hf:x/y,de,en,text:c,d"])]
    assert sources == ["synthetic", "text:a,b", "hf:x/y,de,en", "text:c,d"]
    assert [r.config.data.valid for r in grid(["data.valid=\"a,b\",'c,d'"])] == ["a,b", "c,d"]
    assert [r.config.probes.names for r in grid(['probes.names=["grad_norm", "ln_input"],["none"]'])] == [
        ("grad_norm", "ln_input"),
        ("none",),
    ]


@given(
    st.dictionaries(
        st.sampled_from(["seed", "steps", "warmup", "T", "data.held_out", "train.accumulate", "model.t0"]),
        st.lists(st.integers(1, 10**6 - 4), min_size=1, max_size=4, unique=True),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_the_size_is_the_product_and_every_combination_stands_once(axes: dict[str, list[int]], as_range: bool) -> None:
    values = {key: list(range(v[0], v[0] + len(v))) if as_range else v for key, v in axes.items()}
    texts = [f"{k}={v[0]}..{v[-1]}" if as_range else f"{k}={','.join(map(str, v))}" for k, v in values.items()]
    runs = grid(texts, depth=2)
    assert len(runs) == math.prod(len(v) for v in values.values())
    assert len({run.name for run in runs}) == len({run.config.model_dump_json() for run in runs}) == len(runs)
    for key, expected in values.items():
        section, _, name = {**{k: v[0] for k, v in ALIASES.items()}}.get(key, key).partition(".")
        found = [getattr(getattr(run.config, section), name) for run in runs]
        assert {value: found.count(value) for value in expected} == dict.fromkeys(expected, len(runs) // len(expected))


@pytest.mark.parametrize(
    ("axes", "sentence"),
    [
        ([], "needs at least one KEY=VALUE"),
        (["arch"], "'arch' is not of the form KEY=VALUE"),
        (["arch="], "not of the form"),
        (["=1"], "not of the form"),
        (["seed=1,,2"], "has an empty value"),
        (["seed=1,"], "has an empty value"),
        (["colour=red"], "knows no 'colour': use arch, depth"),
        (["house.colour=red"], "knows no 'house.colour'"),
        (["arch.=1"], "knows no 'arch.': use .* an option arch.KEY"),
        (["train.colour=red"], "unknown setting 'train.colour'; known are steps, lr"),
        (["lr=fast"], "setting train.lr = 'fast'"),
        (["seed=4..0"], "range 4..0 is empty"),
        (["seed=0..1000000000"], "longer than 100,000"),
        (["seed=0..999", "warmup=0..999"], "makes 1,000,000 runs"),
        (["seed=1", "seed=2"], "sets 'train.seed' twice"),
        (["lr=1", "train.lr=2"], "sets 'train.lr' twice"),
        (["depth=deep"], "give whole numbers of layers"),
        (["depth=3"], "--depth 3 is odd"),
        (["seed=1,1"], "two runs named"),
        (["arch=postln,Post-LN"], "two runs named postln"),
        (["arch=postln,depnorm"], "unknown architecture 'depnorm'; choose one of .* Did you mean 'deepnorm'"),
    ],
)
def test_whatever_is_wrong_is_one_sentence(axes: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "_registered", lambda: registry_of(ARCHS))
    with pytest.raises(UsageError, match=sentence):
        grid(axes)


@pytest.mark.slow
def test_the_registry_is_asked_in_a_process_of_its_own() -> None:
    assert {*_registered()} == {*ARCHS}


def test_a_grid_without_arch_or_depth_takes_the_defaults() -> None:
    assert grid(["seed=3"])[0].config == resolve({"train": {"seed": 3}, "data": {"seed": 3}})


def test_options_of_architectures_are_axes_and_t_is_one_by_either_name() -> None:
    assert grid(["arch=branchnorm", "arch.T=1,100", "seed=3"]) == grid(["arch=branchnorm", "T=1,100", "seed=3"])
    assert grid(["arch=branchnorm", "arch.growth=exp"]) == grid(["arch=branchnorm", "model.growth=exp"])
    with pytest.raises(UsageError, match=r"sets 'model\.T' twice"):
        grid(["arch.T=1", "T=2"])


def test_an_option_that_is_recorded_by_itself_stands_in_the_name_once(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"postln": {"options": {}}, "damped": {"options": {"kappa": 0.5}}}
    monkeypatch.setattr(grids, "arch_facts", lambda: facts)
    monkeypatch.setattr(grids, "_registered", lambda: registry_of(facts))
    runs = grid(["arch=damped", "depth=4", "arch.kappa=0.25,0.5"])
    assert [run.config.model.options for run in runs] == [{"kappa": 0.25}, {"kappa": 0.5}]
    assert [run.name for run in runs] == ["damped-kappa0.25-4-s0", "damped-kappa0.5-4-s0"]
    with pytest.raises(UsageError, match="'postln' has no option 'kappa'; it has none"):
        grid(["arch=damped,postln", "arch.kappa=0.25"])
    with pytest.raises(UsageError, match="'damped' has no option 'kapa'; it has kappa"):
        grid(["arch=damped", "seed=1"], {"arch": {"kapa": 0.1}})
