"""How figures and claims choose among runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from edited_runs import edit
from making import Made, layer_rows, load, make_run

from stabilitylab.errors import InputError
from stabilitylab.reports import build
from stabilitylab.reports.base import Panel, Series
from stabilitylab.reports.measures.comparison import comparable, hidden


def test_a_record_knows_what_it_is_chosen_by(tmp_path: Path) -> None:
    table = Made(layer_rows(2), ("raw",), lambda step, row: step + row.layer, steps=(0, 10), total="mean")
    make_run(tmp_path, "a/one", arch="deepnorm", seed=4, layers=2, tables={"cosine_similarity": table})
    (record,) = load(tmp_path)
    assert (record.name, record.label, record.seed, record.layers, record.depth) == ("a/one", "deepnorm", 4, (2, 2), 2)
    assert record.kind == "train"
    assert record.verdict == "trained"
    assert record.at("cosine_similarity")["raw"].tolist() == [11, 12, 11, 12]
    assert record.at("cosine_similarity", 4)["step"].unique().tolist() == [0]


def test_groups_hold_what_may_be_compared(tmp_path: Path) -> None:
    for arch in ("deepnorm", "branchnorm"):
        for seed in (3, 4):
            make_run(tmp_path, f"{arch}-{seed}", arch=arch, seed=seed)
    make_run(tmp_path, "other-lr", arch="deepnorm", settings={"train": {"lr": 1e-3}})
    make_run(tmp_path, "other-depth", arch="deepnorm", layers=3)
    first, *others = load(tmp_path).groups()
    assert (len(first), first.labels, first.seeds) == (4, ["deepnorm", "branchnorm"], [3, 4])
    assert [len(group) for group in others] == [1, 1]
    by_depth = load(tmp_path).groups("model.encoder_layers", "model.decoder_layers")
    assert [len(group) for group in by_depth] == [5, 1]


def test_a_repeated_run_counts_once(tmp_path: Path) -> None:
    for name in ("x", "x-2"):
        make_run(tmp_path, name)
    (group,) = load(tmp_path).groups()
    assert [record.name for record in group] == ["x-2"]


def test_models_of_different_formula_do_not_stand_for_each_other(tmp_path: Path) -> None:
    """Recorded with one label, as they were before labels told t0."""
    for t0 in (0, 1, 50):
        path = make_run(tmp_path, f"t0-{t0}", settings={"model": {"T": 100, "t0": t0}}) / "run.json"
        edit(path, label="branchnorm")
    (group,) = load(tmp_path).groups()
    assert group.labels == ["branchnorm", "branchnorm t0=0", "branchnorm t0=50"]
    assert [len(comparable(group)), len(comparable(group)[0])] == [1, 3]
    assert group.describe().endswith("seed 3, T = 100")


def test_runs_of_different_length_are_described_by_the_shortest_and_the_longest(tmp_path: Path) -> None:
    for steps in (150, 600, 1200):
        make_run(tmp_path, f"of-{steps}", settings={"train": {"steps": steps}})
    runs = load(tmp_path)
    assert "150 to 1200 updates" in runs.describe()
    assert "wide, 600 updates," in runs.where(lambda run: run.name == "of-600").describe()


def test_rates_are_described_by_architecture_where_they_differ(tmp_path: Path) -> None:
    for arch, lr in (("deepnorm", 2e-3), ("branchnorm", 1e-3)):
        make_run(tmp_path, arch, arch=arch, settings={"train": {"lr": lr}})
    runs = load(tmp_path)
    assert ", lr 0.001 (BranchNorm), 0.002 (DeepNorm), warm-up" in runs.describe()
    assert ", lr 0.002, warm-up" in runs.where(label="deepnorm").describe()


def test_a_trial_of_a_rate_search_that_stopped_early_is_known_by_the_search_beside_it(tmp_path: Path) -> None:
    for name, steps in (("cut", 40), ("whole", 100)):
        make_run(tmp_path, name, settings={"train": {"steps": steps, "horizon": 100}})
    assert len(load(tmp_path).without_cut_trials()) == 2, "a run may stop early for another reason"
    (tmp_path / "choice-ledger.csv").touch()
    assert [run.name for run in load(tmp_path).without_cut_trials()] == ["whole"]
    assert [run.name for run in load(tmp_path / "cut").without_cut_trials()] == ["cut"], "the run that was asked for"


def test_a_ramp_is_told_where_alpha_grows_and_the_label_does_not_say_how_long(tmp_path: Path) -> None:
    cases = [
        ({"T": 100}, 100),
        ({"T": 1}, None),
        ({"T": 7, "t0": 7}, None),
        ({"alpha": 0.5}, None),
        ({"arch": "deepnorm"}, None),
    ]
    cases += [({"arch": "postln", "decoder_arch": "branchnorm", "T": 9}, 9), ({"arch": "mine", "T": 9}, 9)]
    for number, (model, _) in enumerate(cases):
        make_run(tmp_path, f"{number}", settings={"model": model})
    assert [record.ramp for record in load(tmp_path)] == [ramp for _, ramp in cases]


def test_pilots_and_open_runs_are_no_evidence(tmp_path: Path) -> None:
    make_run(tmp_path, "pilot", seed=1)
    make_run(tmp_path, "wide", seed=1, settings={"model": {"d_model": 128}})
    make_run(tmp_path, "open", seed=5, state="interrupted")
    make_run(tmp_path, "fine", seed=3)
    assert [record.name for record in load(tmp_path).evidence()] == ["fine", "wide"]


def test_where_reads_settings_tables_and_labels(tmp_path: Path) -> None:
    make_run(tmp_path, "a", arch="postln", settings={"train": {"warmup": 0}})
    make_run(tmp_path, "b", arch="postln")
    make_run(tmp_path, "c", arch="admin", kind="onestep")
    runs = load(tmp_path)
    assert [run.name for run in runs.where(train__warmup=0)] == ["a"]
    assert [run.name for run in runs.where(label="postln")] == ["a", "b"]
    assert [run.name for run in runs.where(kind="onestep")] == ["c"]
    assert not runs.where(table="ln_input")
    assert runs.labels == ["postln", "admin"]


def test_a_damaged_run_is_named_and_the_others_stay(tmp_path: Path) -> None:
    make_run(tmp_path, "fine")
    make_run(tmp_path, "broken")
    (tmp_path / "broken" / "run.json").write_text("{")
    broken: list[tuple[Path, str]] = []
    from stabilitylab.reports.collection import Runs

    assert [run.name for run in Runs.load(tmp_path, broken)] == ["fine"]
    assert broken[0][0] == tmp_path / "broken"
    with pytest.raises(InputError):
        Runs.load(tmp_path)


def test_a_run_from_before_a_setting_existed_goes_with_those_at_its_default(tmp_path: Path) -> None:
    old = make_run(tmp_path, "old", seed=3) / "run.json"
    manifest = json.loads(old.read_text())
    assert manifest["config"]["model"].pop("norm") == "layernorm"
    edit(old, manifest)
    make_run(tmp_path, "new", seed=4)
    make_run(tmp_path, "rms", seed=5, settings={"model": {"norm": "rmsnorm"}})
    first, second = load(tmp_path).groups()
    assert sorted(record.name for record in first) == ["new", "old"]
    assert [record.name for record in second] == ["rms"]
    assert [record.name for record in load(tmp_path).where(model__norm="layernorm")] == ["new", "old"]


def test_runs_of_three_folders_of_one_name_have_three_names(tmp_path: Path) -> None:
    folders = [tmp_path / letter / "runs" for letter in "abc"]
    for place, folder in enumerate(folders):
        make_run(folder, "x", seed=3 + place, metrics={"held_out_nll": [8.0, 5.0 + place]})
    runs, _ = build.load(*folders)
    assert [record.name for record in runs] == ["x", "runs/x", str(folders[2] / "x")]
    assert [record.seed for record in runs] == [3, 4, 5]


def test_a_run_that_is_named_twice_keeps_its_name(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "x", metrics={"loss": [1.0]})
    both = tmp_path / "runs", tmp_path / "runs" / "x"
    first, _ = build.load(*both)
    again, _ = build.load(*both, known=first)
    assert [record.name for record in [*first, *again]] == ["x", "x"]


def test_a_note_names_a_line_once() -> None:
    """Two lines of one label in one panel, as of two experiments."""
    lines = [Series("rezero llama", [1, 2], [0.0, 0.5]), Series("rezero llama", [1, 2], [0.5, 0.0])]
    panels = [Panel("Decoder", "layer", "y", lines, log_y=True)]
    assert hidden(panels) == ["Exactly 0 in places, so not on the logarithmic axis: rezero llama (Decoder)."]
