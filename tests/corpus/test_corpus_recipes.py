"""The recipes of benchmarks/faults: whole, balanced, and each changes what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rest_slow import rest_slow

ROOT = Path(__file__).resolve().parents[2]
SUBJECTS = ("postln-d4", "branchnorm-ed6", "gpt2-d4", "llama-d4")  # one of each kind


def test_recipes_are_whole_and_balanced(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes, families = scripts("recipes"), scripts("families")
    inside = [name for name, own in families.FAMILIES.items() if own.kind == "endogenous"]
    archs = {own.arch for own in scripts("subjects").SUBJECTS.values()}
    monkeypatch.setattr(recipes, "middles", lambda: {(arch, name): 1.0 for arch in archs for name in inside})
    made = list(recipes.recipes())
    assert len({recipe.name for recipe in made}) == len(made) == 672
    kinds = [families.FAMILIES[recipe.family].kind for recipe in made]
    assert kinds.count("healthy") / len(made) >= 1 / 3
    for half in ("train", "test"):
        own = [recipe for recipe in made if recipes.half(recipe.seed) == half]
        assert {recipe.family for recipe in own} == set(families.FAMILIES)
        for family in inside:
            assert sum(recipe.family == family for recipe in own) >= 12
    seen: set[tuple[str, int]] = set()
    for recipe in made:  # a twin comes before what is compared with it
        assert recipe.family == "twin" or (recipe.subject, recipe.seed) in seen
        seen.add((recipe.subject, recipe.seed))


def test_the_middle_lies_where_the_pilot_placed_failure(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pilot, families = scripts("pilot"), scripts("families")
    inside = [name for name, own in families.FAMILIES.items() if own.kind == "endogenous"]
    lines = ["arch,family,strength,failed,step,why"]
    told = {"rate": ["0.7,1,60,x", "0.35,0,,"], "ramp": ["1.0,1,400,x", "0.5,1,450,x"], "no_decay": ["0.7,1,50,x"]}
    told["slow_moment"] = ["1.4,1,590,x", "0.7,0,,"]  # it fails, but too late for a run of 400
    for name in inside:
        lines += [f"postln,{name},{line}" for line in told.get(name, ["2.8,0,,"])]
    lines.append("preln,rate,0.7,1,60,x")  # its pilot has only begun
    (tmp_path / "pilot.csv").write_text("\n".join(lines))
    monkeypatch.setattr(pilot, "HERE", tmp_path)
    assert pilot.middles() == {
        ("postln", "rate"): pytest.approx(0.35 * 2**0.5),
        ("postln", "ramp"): 0.25,
        ("postln", "slow_moment"): 2.8,
    }


def test_every_family_changes_what_it_says(scripts: Any) -> None:
    families = scripts("families")
    usual = families.plan("twin", 1.0, 1.0, 3)
    for name, family in families.FAMILIES.items():
        plan = families.plan(name, 1.0, family.levels[-1], 3)
        changed = {
            "rate": [plan.rate(row) for row in range(600)] != [usual.rate(row) for row in range(600)],
            "settings": any(
                getattr(plan, own) != getattr(usual, own)
                for own in ("betas", "eps", "decay", "query_key", "embedding", "half", "loss_scale", "order")
            ),
            "hooks": any(
                getattr(plan, own) is not families.Plan.__dataclass_fields__[own].default
                for own in ("accumulate", "batch", "which", "gradients", "zero")
            ),
        }
        assert any(changed.values()) == (name != "twin"), name
        assert (plan.at is not None) == (family.kind == "exogenous")
        if family.kind == "exogenous":
            assert families.FAULT[0] <= plan.at < families.FAULT[1]
        assert all(plan.rate(row) > 0 for row in (0, 19, 20, 300, 599))


def test_what_is_kept_is_near_what_was_measured(scripts: Any) -> None:
    """Within half of the last bit; beyond float16's range z-scores are cut, and what is not finite stays so."""
    keep, values = scripts("keep"), np.random.default_rng(0).normal(0, 1, 1000) * np.logspace(-3, 4, 1000)
    for name, bits, of in (("grad_norm.z", 7, np.float16), ("nll", 16, np.float32)):
        found = keep.small(name, values)
        assert found.dtype == of
        np.testing.assert_allclose(found.astype(float), values, rtol=2.0**-bits)
        assert len(set(np.frexp(found.astype(float))[0])) <= 2**bits + 1
    odd = keep.small("grad_norm.z", np.array([np.nan, np.inf, -np.inf, 1e9, 0.0]))
    assert np.isnan(odd[0])
    assert odd[1] == -odd[2] == odd[3] == keep.small("x", np.array([6e4]))[0]
    assert odd[4] == 0
    assert np.isinf(keep.small("nll", np.array([np.inf])))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", rest_slow(["postln-d4", "branchnorm-ed6", "gpt2-d4", "llama-d4"], ["branchnorm-ed6"], ())
)
def test_a_run_of_the_synthetic_task(scripts: Any, tmp_path: Path, name: str) -> None:
    """The whole way of a run: made twice, kept, read, scored; and a corrupt shard is seen where it lies."""
    make, keep, corpus = scripts("make"), scripts("keep"), scripts("corpus")
    training = scripts("training")
    for family in ("twin", "corrupt_batch", "missing_zero_grad"):
        make.make(training.Recipe(name, 3, family), tmp_path, None, updates=30)
    again = training.train(training.Recipe(name, 3, "twin"), make.edges()[name], None, updates=30)
    (tmp_path / "out").mkdir()
    keep.keep(tmp_path, tmp_path / "out", ("train", "test"))
    runs = corpus.read("test", tmp_path / "out")
    assert [run.family for run in runs] == ["corrupt_batch", "missing_zero_grad", "twin"]
    twin = runs[-1]
    assert twin.rows == 30
    at = training.COLUMNS.index("nll")
    np.testing.assert_allclose(twin.columns["nll"], again.rows[:, at], rtol=2e-5)
    assert np.isfinite(twin.columns["grad_norm.z"][20:]).all()
    # the second look, at row 20, may bound the crossing without finding it: such a row decides nothing
    assert np.isfinite(twin.columns["headroom.level"][:20]).all()


@pytest.mark.slow
def test_a_run_made_again_is_the_committed_one(scripts: Any, tmp_path: Path) -> None:
    again, keep, make = scripts("again"), scripts("keep"), scripts("make").make
    recipe = next(recipe for recipe in scripts("recipes").recipes() if recipe.name == "postln-d4-twin-s0")
    (tmp_path / "runs").mkdir()
    make(recipe, tmp_path / "runs", None, 40)
    keep.keep(tmp_path / "runs", tmp_path, ("train",))
    told = [line for line in scripts("corpus").lines(tmp_path) if again.comparable(line)]
    assert again.again(told, None, tmp_path / "again", tmp_path, 40) == {recipe.name: []}
    [run] = scripts("corpus").read("train", tmp_path)
    run.columns["nll"][30] += 1e-4
    assert again.differing(run, tmp_path / "again" / f"{recipe.name}.parquet") == ["nll"]
