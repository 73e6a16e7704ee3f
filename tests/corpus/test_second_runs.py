"""The runs of the second corpus: balanced, made and resumed, read from run directories; its test half stays closed."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch


def test_recipes_are_whole_and_of_new_seeds(scripts: Any) -> None:
    recipes, families = scripts("second_recipes"), scripts("second_families")
    made = list(recipes.recipes())
    assert len({recipe.name for recipe in made}) == len(made) == 1456
    assert Counter(recipes.half(own.seed) for own in made) == {"choose": 396, "test": 660, "calibrate": 400}
    assert not {own.seed for own in made} & {*range(8), 100, 101, *recipes.PILOT}
    archs = {scripts("subjects").SECOND[own.subject].arch for own in made}
    assert len(archs) == 10
    seen: set[tuple[str, int]] = set()
    for own in made:  # a twin comes before what is compared with it
        assert own.family == "twin" or (own.subject, own.seed) in seen
        seen.add((own.subject, own.seed))
    for half in ("choose", "test"):
        here = Counter(own.family for own in made if recipes.half(own.seed) == half)
        assert {*here} == {*families.FAMILIES}
        assert min(here[name] for name, own in families.FAMILIES.items() if own.kind == "endogenous") >= 15
    inside = [own for own in families.FAMILIES.values() if own.kind == "endogenous"]
    assert sum(not own.climbs for own in inside) >= 6
    for own in made:
        low, high = families.FAMILIES[own.family].ends
        assert low <= own.strength * (1 + 1e-9) <= high * (1 + 2e-9)
    for k in (4, 9):  # disjoint sets of runs of one recipe
        sizes = Counter(own.subject for own in made if recipes.half(own.seed) == "calibrate")
        assert sum(size // (k + 1) for size in sizes.values()) >= 40


def test_every_family_changes_what_it_says(scripts: Any) -> None:
    families = scripts("second_families")
    usual = families.plan("twin", 1.0, 1.0, 9)
    for name, family in families.FAMILIES.items():
        for strength in family.ends:
            plan = families.plan(name, 1.0, strength, 9)
            rates = [plan.rate(row) for row in range(families.ROWS)]
            changed = rates != [usual.rate(row) for row in range(families.ROWS)] or any(
                getattr(plan, own) is not getattr(usual, own) and getattr(plan, own) != getattr(usual, own)
                for own in families.SecondPlan.__dataclass_fields__
                if own != "rate"
            )
            assert changed == (name != "twin"), name
            assert min(rates) > 0
            assert (plan.at is not None) == (family.kind == "exogenous")
            assert plan.at is None or families.FAULT[0] <= plan.at < families.FAULT[1]
            if family.kind == "endogenous" and not family.climbs:  # the rate is not what grows
                assert np.allclose(rates[20:], rates[20])
    assert {name for name, own in families.FAMILIES.items() if own.known} == {*scripts("second_score").NAMES}


def test_a_topping_up_takes_families_that_fail_and_ends_when_there_are_enough(scripts: Any) -> None:
    recipes, families = scripts("second_recipes"), scripts("second_families")

    def told(**events: int) -> list[dict[str, Any]]:
        found = []
        for family, of in events.items():
            for number in range(20):
                outcome = "event" if number < of else "healthy"
                found.append({"family": family, "kind": "endogenous", "seed": 8, "half": "choose", "outcome": outcome})
        return found

    few = told(climb=10, norm_growth=7, heavy_decay=6)
    made = list(recipes.more(few))
    assert {own.family for own in made} == {"twin", "climb", "norm_growth"}  # 6 of 20 is less than a third
    assert {own.seed for own in made} == {*recipes.RESERVE}
    assert not {own.name for own in made} & {own.name for own in recipes.recipes()}
    later = [*few, *({**one, "seed": 18, "outcome": "event", "family": "heavy_decay"} for one in told(heavy_decay=20))]
    assert list(recipes.more(later)) == made  # runs of the topping-up change nothing
    assert list(recipes.more(told(climb=3))) == []
    many = [{**one, "outcome": outcome} for outcome, count in (("event", 60), ("both", 40), ("collapse", 20))
            for one in told(climb=1)[:1] * count]  # fmt: skip
    assert recipes.counts(many) == (100, 60)
    assert recipes.enough(many)
    assert recipes.lacking(many[1:]) == ("event", "both")
    assert families.families("endogenous", "gpt2").count("dead_units") == 0


@pytest.mark.slow
def test_runs_are_made_resumed_gathered_and_read(
    scripts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way at toy size: sweeps, a twin, a fast run and a hard case of health; a call that goes on; a ledger
    that is cut short or gone; and the files that are committed."""
    make, recipes = scripts("second_make"), scripts("second_recipes")
    out, short = tmp_path / "runs", ["--part", "1/12", "--updates", "24"]
    assert make.main(["--out", str(out), *short, "--count"]) == 0
    assert "0 runs are there" in capsys.readouterr().err
    assert not list(out.iterdir())
    assert make.main(["--out", str(out), *short, "--most", "2"]) == 0
    said = capsys.readouterr().err
    assert "s of one core" not in said
    assert said.count("events and") == 2
    assert len(list((out / "edges").iterdir())) == 2
    [ledger] = out.glob("ledger*.jsonl")
    before = [json.loads(text) for text in ledger.read_text().splitlines()]
    assert [one["family"] for one in before] == ["twin", "fast"]
    assert all(one["seconds"] > 0 and one["rows"] == 24 for one in before)
    ledger.write_text(ledger.read_text()[:-30])  # the process ended in the middle of a line
    assert make.main(["--out", str(out), *short, "--most", "1"]) == 0
    assert "2 runs are there" in capsys.readouterr().err
    after = {one["run"]: one for one in make.ledger(out)}
    assert [after[one["run"]] for one in before] == before
    assert len(after) == 3
    assert make.main(["--out", str(out), "--more", *short]) == 2
    assert "make them first" in capsys.readouterr().err

    own = make.train
    try:
        make.train = lambda *given: 1 / 0
        assert make.main(["--out", str(out), *short, "--most", "2"]) == 1  # one that breaks does not end the others
    finally:
        make.train = own
    said = capsys.readouterr().err
    assert "2 runs could not be made: postln-d4-" in said
    assert len(list(out.glob("*.parquet"))) == 3

    gather, corpus = scripts("gather"), scripts("second_corpus")
    home = tmp_path / "home"
    home.mkdir()
    gather.gather(out, home, ("choose",))
    runs = corpus.read(("choose",), home)
    assert {run.family for run in runs} >= {"twin", "fast"}
    kept = make.columns_of(make.path_of(next(iter(recipes.recipes())), out))
    twin = next(run for run in runs if run.family == "twin")
    np.testing.assert_allclose(twin.columns["nll"], kept["nll"], rtol=2e-5)
    assert np.isfinite(twin.columns["loss.rise"][20:]).all()
    assert np.isfinite(twin.columns["held_out"][::10]).all()
    assert np.isnan(twin.columns["held_out"][1:10]).all()
    assert twin.diagnosis["verdict"] in ("healthy", "open")
    size = (home / "runs.csv").read_bytes()
    gather.gather(out, home, ("choose",))  # again: nothing new
    assert (home / "runs.csv").read_bytes() == size
    with pytest.raises(SystemExit, match="is not committed"):
        gather.gather(out, home, ("test",))


LEDGER = ("state_zeroed", "state_stale", "beta_changed", "decay_changed", "rate_jump", "layer_frozen",
          "weights_swapped", "accumulation_summed")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", LEDGER)
def test_what_was_done_is_in_the_ledger(scripts: Any, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """At toy size: a finding of the right kind at the row of the fault, and none of this kind in the twin."""
    families, training, score = scripts("second_families"), scripts("second_training"), scripts("second_score")
    monkeypatch.setattr(families, "begins", lambda seed: 12)
    monkeypatch.setattr(families, "STALE", 6)
    names = score.NAMES[family]
    for made in ("twin", family):
        recipe = training.Recipe("postln-d4", 9, made, families.FAMILIES[made].ends[-1])
        kept = training.train(recipe, 0.03, None, 16, probes=("grad_norm", "ln_input"))
        found = {kind: step for kind, step, *_ in kept.diagnosis["events"]}
        if made == "twin":
            assert not names & {*found}
        else:
            assert kept.at == 12
            assert {found[kind] for kind in names & {*found}} == {12}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "part"), [("attention_growth", "query_key"), ("norm_growth", "norms")])
def test_what_grows_is_done_by_the_step_and_nothing_else_moves(scripts: Any, family: str, part: str) -> None:
    """Once a knob grows, its part has an update multiplied by it and every other parameter the update of a run without
    it; autograd's count of writes sees no foreign hand (the ledger names none)."""
    families, training, subjects = scripts("second_families"), scripts("second_training"), scripts("subjects")
    seen: dict[float, tuple[list[torch.Tensor], dict[str, torch.Tensor]]] = {}
    for strength in (1.0, 7.0):
        plan = families.plan("twin", 0.03, 1.0, 9)
        plan.part, plan.faster = part, lambda row, strength=strength: strength
        models = []
        own = training.student

        def student(*given: Any, own: Any = own, models: list[Any] = models) -> Any:
            models.append(own(*given))
            return models[-1]

        training.student = student
        try:
            recipe = training.Recipe("postln-d4", 9, family)
            kept = training.train(recipe, 0.03, None, 1, plan, ("grad_norm",))
        finally:
            training.student = own
        assert "foreign_write" not in {kind for kind, *_ in kept.diagnosis["events"]}
        data = subjects.dataset("postln-d4", 9, None)
        fresh = subjects.student("postln-d4", 9, data, None)
        moved = [new - old for new, old in zip(*(training.parts(one, part) for one in (models[0], fresh)), strict=True)]
        new, old = (dict(one.model.named_parameters()) for one in (models[0], fresh))
        seen[strength] = moved, {name: new[name].detach() - old[name].detach() for name in new}
    for usual, grown in zip(seen[1.0][0], seen[7.0][0], strict=True):
        torch.testing.assert_close(grown, 7.0 * usual, rtol=1e-3, atol=1e-6)
    same = [name for name, own in seen[1.0][1].items() if torch.equal(own, seen[7.0][1][name])]
    other = {*seen[1.0][1]} - {*same}
    assert all(("norm" in name) if part == "norms" else ("qkv" in name) for name in other)
    assert other


@pytest.mark.slow
def test_units_sink_and_die(scripts: Any) -> None:
    families, training = scripts("second_families"), scripts("second_training")
    plan = families.plan("dead_units", 0.03, 1.0, 9)
    plan.sinks = lambda row: 1.0
    kept = training.train(training.Recipe("postln-d4", 9, "dead_units"), 0.03, None, 31, plan)
    silent = kept.columns["silent"][::10]
    assert silent[0] == 0.0
    assert silent[-1] == 1.0


@pytest.mark.slow
def test_states_are_those_of_the_model(scripts: Any) -> None:
    """A layer without gradient is two of eight sub-layers; queries and keys that are 64 times as large leave no
    entropy; the worth of the source is a difference of two losses of the fresh model, and the cosine that of its last
    layer."""
    families, training, subjects = scripts("second_families"), scripts("second_training"), scripts("subjects")
    plan = families.plan("attention_scale", 0.03, 64.0, 9)
    plan.gradients = lambda row, layers: [own.grad.zero_() for own in layers[1].parameters()]
    kept = training.train(training.Recipe("postln-d4", 9, "attention_scale"), 0.03, None, 1, plan)
    assert kept.columns["dead"][0] == 0.25
    assert kept.columns["attention_spent"][0] == 1.0
    assert kept.columns["silent"][0] == 0.0

    kept = training.train(training.Recipe("preln-ed4", 9, "twin"), 0.03, None, 1)
    data = subjects.dataset("preln-ed4", 9, None)
    fresh, held = subjects.student("preln-ed4", 9, data, None), data.held_out
    fresh.set_row(0)
    hidden: dict[str, torch.Tensor] = {}
    for name, stack in fresh.model.stacks.items():
        stack.layers[-1].register_forward_hook(lambda module, given, out, name=name: hidden.__setitem__(name, out))
    with torch.no_grad():
        losses = []
        for inputs in (held.of_other_sources(), held.inputs):  # the last pass is that of its own source
            chances = fresh.model(**inputs).double().log_softmax(-1).gather(-1, held.labels[..., None])[..., 0]
            losses.append(-float((chances * held.weight).sum() / held.weight.sum()))
    assert kept.columns["held_out"][0] == pytest.approx(losses[1], rel=1e-5)
    assert kept.columns["source_worth"][0] == pytest.approx(losses[0] - losses[1], abs=1e-4)
    cosines = []
    for name, out in hidden.items():
        found = []
        for sentence, real in zip(out.double(), held.masks[name], strict=True):
            units = torch.nn.functional.normalize(sentence[real.bool()], dim=-1)
            count = len(units)
            others = (units @ units.T).sum(1) - 1
            found += (others / (count - 1)).tolist() if count > 1 else [1.0] * count
        cosines.append(float(np.mean(found)))
    assert kept.columns["tokens_alike"][0] == pytest.approx(max(cosines), rel=1e-4)


def committed(folder: Path, *names: str) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=A", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)

    if not (folder / ".git").exists():
        git("init")
    git("add", *names)
    git("commit", "-m", "frozen")


def test_the_test_half_is_refused_until_what_was_frozen_is_committed(scripts: Any, tmp_path: Path) -> None:
    corpus = scripts("second_corpus")
    frozen = tmp_path / corpus.FROZEN
    assert not corpus.is_committed(frozen)
    frozen.write_text("{}")
    assert not corpus.is_committed(frozen)  # no repository
    (tmp_path / "other").write_text("")
    committed(tmp_path, "other")
    assert not corpus.is_committed(frozen)
    with pytest.raises(SystemExit, match="is not committed: make it with"):
        corpus.read(("test",), tmp_path)
    committed(tmp_path, corpus.FROZEN)
    assert corpus.is_committed(frozen)
    corpus.refuse_unfrozen(tmp_path)
    frozen.write_text('{"moved": 1}')
    with pytest.raises(SystemExit, match="is not committed"):
        corpus.refuse_unfrozen(tmp_path)
