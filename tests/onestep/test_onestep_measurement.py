"""A one-step run as a directory: what stands in it, beside row 0 of a training run, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from onestep_cases import config_of
from rest_slow import MORE_ARCHS, rest_slow

from stabilitylab.commands.listing import run_table
from stabilitylab.config import Config, merge, resolve
from stabilitylab.errors import InputError, ResourceError, UsageError
from stabilitylab.labels import label
from stabilitylab.models import ARCHS
from stabilitylab.onestep import measure
from stabilitylab.store import Run, RunWriter
from stabilitylab.store.older import facts
from stabilitylab.train import plan, start

ORDINARY = [
    *("grad_norm", "activation_grad_norm", "ln_input", "cosine_similarity", "activation_sparsity", "branch_variance"),
]
CURVATURE = ["critical_sharpness", "preconditioned_sharpness", "sharpness"]  # where they are asked for
OWN = ["update_rate", "perturbation", "ln_jacobian", "lemma41"]


def changed(config: Config, **sections: Any) -> Config:
    return resolve(merge(config.model_dump(), sections))


@pytest.mark.parametrize("arch", rest_slow(ARCHS, {"branchnorm"}, MORE_ARCHS | {"attnres", "mhc"}))
def test_a_finished_run_of_kind_onestep_with_everything_at_step_0(arch: str, tmp_path: Path) -> None:
    config = config_of(arch)
    path = measure(config, tmp_path, "one")
    assert path == tmp_path / "one"
    run = Run.open(path)
    assert (run.status.state, run.status.step) == ("finished", 0)
    assert [row["step"] for row in run_table(tmp_path)] == ["0"]
    post_ln = ("postln", "postln-init", "dsinit", "dsinit-code", "deepnorm", "branchnorm", "admin")
    theorem = ["theorem43"] if arch in post_ln else []
    norms = {"ln_input", "ln_jacobian"} if arch in ("rezero", "rfixup", "tfixup") else set()
    assert set(run.tables) == {*ORDINARY, *OWN, *theorem} - norms
    assert run.manifest["kind"] == "onestep"
    assert run.manifest["precision"] == "float64"
    assert run.manifest["label"] == label(config.model)
    assert run.config == config.model_dump(mode="json")
    assert {"data", "unigram", "best_nll", "parameters", "torch", "git_revision", "threads"} <= run.manifest.keys()
    assert run.metrics["step"].tolist() == [0]
    metrics = run.metrics.iloc[0]
    assert metrics["alpha"] == 0.1 if arch == "branchnorm" else np.isnan(metrics["alpha"])
    for name in run.tables:
        table, frame = run.table(name), run.frame(name)
        assert frame["step"].tolist() == [0] * len(table.rows)
        assert not frame["absent"].any()
        assert table.unit
        told = facts(name, {"columns": list(table.columns), "unit": table.unit})  # of runs from before tables said it
        assert told == {fact: getattr(table, fact) for fact in told}
        assert len(table.definition) > 40
        columns = table.columns[:1] if name in ORDINARY else table.columns  # an embedding has no vo_ffn, say
        assert np.isfinite(frame[[*columns]].to_numpy()).all()
    assert not list(path.glob("journal-*"))


@pytest.mark.slow
@pytest.mark.parametrize(("stack", "theorem"), [("encoder", "theorem42"), ("decoder", "theorem42")])
def test_single_stacks(stack: str, theorem: str, tmp_path: Path) -> None:
    config = changed(config_of("deepnorm", stack), probes={"names": ["default", *CURVATURE]})
    run = Run.open(measure(config, tmp_path, "one"))
    assert set(run.tables) == {*ORDINARY, *OWN, *CURVATURE, theorem}
    assert all(np.isfinite(run.frame(name)["value"]).all() for name in CURVATURE)
    sites = set(run.frame("update_rate")["site"])
    assert f"sgd.{stack}" in sites
    assert not {"sgd.cross_attn", f"sgd.{'decoder' if stack == 'encoder' else 'encoder'}"} & sites


class Nobody:
    def opened(self, path: Path, manifest: Any) -> None:
        pass

    def show(self, report: Any) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("arch", rest_slow(["branchnorm", "admin", "preln"], ["admin"]))
def test_the_ordinary_tables_are_row_0_of_a_training_run(arch: str, tmp_path: Path) -> None:
    config = changed(config_of(arch), train={"steps": 1}, probes={"names": ORDINARY})
    trained = Run.open(start(plan(config), tmp_path, "train", Nobody()).path)
    one = Run.open(measure(config, tmp_path, "one"))
    for name in ("grad_norm", "activation_grad_norm", "ln_input"):  # the others are over the held-out batch there
        columns = [column for column in one.table(name).columns if column != "p99"]
        theirs = trained.frame(name).query("step == 0")[columns].to_numpy()
        scale = np.nanmax(np.abs(theirs))
        np.testing.assert_allclose(one.frame(name)[columns].to_numpy(), theirs, rtol=2e-4, atol=1e-6 * scale)
        assert one.table(name) == trained.table(name)
    assert one.table("branch_variance").rows == trained.table("branch_variance").rows
    for run in (one, trained):  # no column is hidden by a method of pandas
        for name in ("metrics", *run.tables):
            assert [column for column in run.frame(name).columns if hasattr(pd.DataFrame, column)] == []
    for name in ("loss", "nll", "grad_norm_total", "alpha", "grad_norm_nonbranch", "grad_norm_branch_encoder"):
        assert one.metrics[name][0] == pytest.approx(trained.metrics[name][0], rel=1e-4, nan_ok=True)


def tables_of(path: Path) -> dict[str, np.ndarray]:
    run = Run.open(path)
    return {name: run.frame(name).select_dtypes("float64").to_numpy() for name in (*run.tables, "metrics")}


def same(one: Path, other: Path) -> bool:
    a, b = tables_of(one), tables_of(other)
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name], equal_nan=True) for name in a)


@pytest.mark.slow
def test_precision_dropout_and_accumulation_of_training_change_nothing_and_a_seed_does(tmp_path: Path) -> None:
    config = config_of("admin")
    plain = measure(config, tmp_path, "plain")
    training = {"precision": "bf16", "accumulate": 2, "lr": 0.1}
    other = changed(config, train=training, model={"dropout": 0.5, "attention_dropout": 0.1})
    assert same(plain, measure(other, tmp_path, "other"))
    assert not same(plain, measure(changed(config, train={"seed": 4}), tmp_path, "seed"))


@pytest.mark.slow
def test_what_exists_is_refused(tmp_path: Path) -> None:
    config = config_of("postln")
    path = measure(config, tmp_path, "one")
    before = (path / "run.json").read_bytes()
    with pytest.raises(UsageError, match="exists already and is never overwritten"):
        measure(config, tmp_path, "one")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="exists already and is never overwritten"):
        measure(config, tmp_path, "mine")
    assert (path / "run.json").read_bytes() == before
    assert [entry.name for entry in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_data_that_cannot_be_read_leave_nothing_behind(tmp_path: Path) -> None:
    config = changed(config_of("postln"), data={"source": f"text:{tmp_path}/a,{tmp_path}/b"})
    with pytest.raises(InputError):
        measure(config, tmp_path / "runs", "one")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_failure_while_writing_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: RunWriter, *args: Any) -> None:
        raise ResourceError("no space is left: free some.")

    monkeypatch.setattr(RunWriter, "append", full)
    with pytest.raises(ResourceError, match="no space is left"):
        measure(config_of("postln"), tmp_path, "one")
    assert not (tmp_path / "one").exists()
    monkeypatch.undo()
    assert Run.open(measure(config_of("postln"), tmp_path, "one")).status.state == "finished"


def test_what_does_not_fit_into_memory_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000, total=2**40))
    with pytest.raises(ResourceError, match="give a smaller --depth"):
        measure(config_of("postln"), tmp_path, "one")
    assert not (tmp_path / "one").exists()


def test_running_out_of_memory_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(subject: Any) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr("stabilitylab.onestep.measurement.everything", out_of_memory)
    with pytest.raises(ResourceError, match="out of memory on cpu: give a smaller --depth"):
        measure(config_of("postln"), tmp_path, "one")


@pytest.mark.parametrize("start", [0, 30])
def test_closed_branches_of_prores_are_said(start: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = {"prores": "linear", "prores_T": 10, "prores_t0": start}
    run = Run.open(measure(changed(config_of("preln"), model=model), tmp_path, "one"))
    rates = run.frame("update_rate").set_index("site")["value"]
    assert (rates["adam.vo_ffn"] == 0) == (start == 0)
    assert ("model.prores closes all branches in row 0" in caplog.text) == (start == 0)
