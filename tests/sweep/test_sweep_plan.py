"""What a sweep finds on disk, and the commands that it makes of it."""

from __future__ import annotations

import hashlib
import json
import shlex
import string
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO, TypeVar

import pytest
from edited_runs import edit
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_cases import config, experiment, finishes, leave, left, on, planned

from stabilitylab.config import Config, read_config_file, resolve
from stabilitylab.errors import InputError, ResourceError, UsageError
from stabilitylab.experiments import Experiment, experiments
from stabilitylab.store import load_runs
from stabilitylab.sweep import Job, commands, identity, plan, status_table, toml
from stabilitylab.sweep.jobs import prepare

T = TypeVar("T")


def only(jobs: list[T]) -> T:
    assert len(jobs) == 1
    return jobs[0]


@pytest.mark.parametrize(
    ("written", "found"),
    [("finished", "finished"), ("diverged", "finished"), ("interrupted", "interrupted"), ("failed", "failed")],
)
def test_states_are_read_from_the_run_directory(written: str, found: str, tmp_path: Path) -> None:
    job = only(planned(tmp_path, "a"))
    assert (job.state, job.step) == ("new", 0)
    left(job, written, reason="so it was", verdict="stuck")
    again = only(planned(tmp_path, "a"))
    judged = "stuck" if found == "finished" else ""  # before its end a run has no verdict
    assert (again.state, again.step, again.reason, again.verdict) == (found, 2, "so it was", judged)


def test_a_run_that_a_process_writes_is_running_and_one_that_it_left_is_interrupted(tmp_path: Path) -> None:
    job = only(planned(tmp_path, "a"))
    writer = leave(job, "running", step=3)
    assert (job.now().state, job.now().step) == ("running", 3)
    assert prepare(job).state == "running"
    assert commands([job.now()]) == []
    writer.close()  # what kill -9 leaves says "running" as well, but nobody holds it
    assert job.now().state == "interrupted"
    assert job.now().reason == "the process was killed, or its machine was lost"


@pytest.mark.parametrize(("checkpoint", "resumable"), [(0, False), (3, True), (4, True), (5, False)])
def test_a_checkpoint_can_be_gone_on_from_that_after_the_last_update_too(
    checkpoint: int, resumable: bool, tmp_path: Path
) -> None:
    job = only(planned(tmp_path, "a", steps=4))
    left(job, "interrupted", checkpoint=checkpoint)
    assert job.now().resumable is resumable


def test_what_cannot_be_resumed_is_moved_aside_and_no_report_counts_it(tmp_path: Path) -> None:
    job = only(planned(tmp_path, "a"))
    for number in (1, 2):
        left(job, "interrupted")
        ready = prepare(job.now())
        assert ready.state == "interrupted"
        assert not job.path.exists()
        aside = tmp_path / "sweep" / "aside" / f"a-{number}"
        assert (aside / "run.json.aside").is_file()
        assert list((aside / "metrics").glob("part-*.parquet"))
    assert load_runs(tmp_path) == []
    assert finishes(ready) == 0
    assert [run.name for run in load_runs(tmp_path)] == ["a"]


def test_preparing_writes_the_configuration_and_touches_nothing_that_ended(tmp_path: Path) -> None:
    job = only(planned(tmp_path, "a"))
    prepare(job)
    assert resolve(read_config_file(job.config_path)) == job.experiment.config
    left(job, "finished")
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*") if p.is_file())
    assert prepare(job).state == "finished"
    assert before == sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*") if p.is_file())


def test_a_run_of_the_same_name_counts_only_if_it_is_the_same_run(tmp_path: Path) -> None:
    left(only(planned(tmp_path, "a", lr=1e-3)), "finished")
    with pytest.raises(UsageError, match=r"a has train.lr = 0.001, where 0.002 is asked for: choose another --out"):
        planned(tmp_path, "a", lr=2e-3)
    with pytest.raises(UsageError, match="kind 'train', where 'onestep' is asked for"):
        plan([experiment("a", kind="onestep", lr=1e-3)], tmp_path)
    same = planned(tmp_path, "a", lr=1e-3, device="cpu", threads=2, arch="Deep-Norm")
    assert only(same).state == "finished"


def test_a_setting_that_did_not_exist_then_is_no_difference(tmp_path: Path) -> None:
    job = only(planned(tmp_path, "a"))
    left(job, "finished")
    document = json.loads((job.path / "run.json").read_text())
    del document["config"]["train"]["accumulate"]
    edit(job.path / "run.json", document)
    assert job.now().state == "finished"


def read(job: Job, texts: Path, state: str = "finished", **how: object) -> None:
    """Leave a run that read the files of ``texts`` as they are now."""
    left(job, state, **how)
    paths = [texts / name for name in ("a.de", "a.en", "v.de", "v.en")]
    digests = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    edit(job.path / "run.json", data={"files_sha256": digests})


@pytest.mark.parametrize(
    ("state", "checkpoint", "refused"),
    [("finished", 0, True), ("diverged", 0, True), ("interrupted", 2, True), ("failed", 2, True),
     ("interrupted", 0, False), ("failed", 0, False)],
)  # fmt: skip
def test_a_run_whose_data_have_changed_is_neither_finished_nor_continued(
    state: str, checkpoint: int, refused: bool, texts: Path, tmp_path: Path
) -> None:
    wanted = [Experiment("a", on(texts, train={"steps": 4}))]
    read(plan(wanted, tmp_path)[0], texts, state, checkpoint=checkpoint)
    ended = only(plan(wanted, tmp_path)).state
    original = (texts / "v.en").read_text()
    (texts / "v.en").write_text(f"{original}one more line\n")
    if refused:
        with pytest.raises(InputError, match=r"the data of .*/a have changed since it started \(.*/v\.en\): restore"):
            plan(wanted, tmp_path)
    else:  # it is moved aside, and begins anew with the files as they are
        assert only(plan(wanted, tmp_path)).state == ended
    (texts / "v.en").write_text(original)
    assert only(plan(wanted, tmp_path)).state == ended
    (texts / "v.en").unlink()
    assert only(plan(wanted, tmp_path)).state == ended, "a file that is gone proves no change"


def test_a_shorter_run_is_continued_only_with_its_data(texts: Path, tmp_path: Path) -> None:
    short, long = ([Experiment("a", on(texts, train={"steps": steps, "horizon": 8}))] for steps in (2, 8))
    read(plan(short, tmp_path)[0], texts, checkpoint=2)
    assert only(plan(long, tmp_path)).resumable
    (texts / "a.de").write_text("another text\n")
    with pytest.raises(InputError, match="have changed since it started"):
        plan(long, tmp_path)


def test_a_run_of_an_older_version_has_no_digests_to_compare(texts: Path, tmp_path: Path) -> None:
    wanted = [Experiment("a", on(texts))]
    left(plan(wanted, tmp_path)[0], "finished")
    (texts / "a.de").write_text("another text\n")
    assert only(plan(wanted, tmp_path)).state == "finished"


def test_a_file_is_read_once_for_all_runs(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [Experiment(name, on(texts)) for name in "abcde"]
    for job in plan(wanted, tmp_path):
        read(job, texts)
    files: list[str] = []
    digest = hashlib.file_digest

    def counted(file: BinaryIO, name: str) -> object:
        files.append(Path(file.name).name)
        return digest(file, name)

    monkeypatch.setattr(identity.hashlib, "file_digest", counted)
    for _ in range(2):
        assert {job.state for job in plan(wanted, tmp_path)} == {"finished"}
    assert sorted(files) == ["a.de", "a.en", "v.de", "v.en"]


def test_of_a_run_of_one_step_only_what_it_measures_must_agree(tmp_path: Path) -> None:
    left(only(plan([experiment("a", kind="onestep", lr=1e-3)], tmp_path)), "finished", step=1)
    assert only(plan([experiment("a", kind="onestep", lr=1e-4, steps=1)], tmp_path)).state == "finished"
    with pytest.raises(UsageError, match=r"train.seed = 3, where 4 is asked for"):
        plan([experiment("a", kind="onestep", seed=4)], tmp_path)
    with pytest.raises(UsageError, match=r"model.arch = 'deepnorm', where 'postln' is asked for"):
        plan([experiment("a", kind="onestep", arch="postln")], tmp_path)


def test_a_process_that_failed_before_it_had_a_directory_is_known_by_its_log(tmp_path: Path) -> None:
    job = only(planned(tmp_path, "a"))
    job.log_path.parent.mkdir()
    job.log_path.write_text("$ python -m stabilitylab probe\nstabilitylab: no such file x.\n\n[exit 4]\n")
    assert (job.now().state, job.now().reason) == ("failed", "no such file x.")
    job.log_path.write_text("$ python -m stabilitylab probe\n[exit 0]\n")
    assert job.now().state == "new"


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "sweep"])
def test_names_that_are_no_file_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot name a run"):
        planned(tmp_path, name)


def test_two_runs_of_one_name_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'a' cannot name two runs"):
        planned(tmp_path, "a", "a")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds files but no run"):
        planned(tmp_path, "a")


@pytest.mark.parametrize("last", ["write_document", "write_run_json"])
def test_a_run_that_died_while_it_began_is_new(last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise ResourceError("no space left on the device")

    with monkeypatch.context() as patch:
        patch.setattr(f"stabilitylab.store.writer.{last}", full)
        with pytest.raises(ResourceError):
            left(planned(tmp_path, "a")[0], "running")
    assert (tmp_path / "a/inventory.jsonl").exists()
    job = planned(tmp_path, "a")[0]
    assert (job.state, job.resumable) == ("new", False)
    left(job, "finished", step=4, verdict="learning")
    assert job.now().state == "finished"


@pytest.mark.slow
def test_printed_commands_say_it_all_and_run_in_a_shell(tmp_path: Path) -> None:
    out = tmp_path / "a folder"
    new, old = planned(out, "new", "old", steps=4, threads=2)
    left(old, "interrupted", checkpoint=2)
    one = plan([experiment("one", kind="onestep")], out)[0]
    first, second, third = commands([new, old.now(), one])
    own = f"{shlex.quote(sys.executable)} -m stabilitylab"
    assert shlex.split(first) == shlex.split(
        f"OMP_NUM_THREADS=2 {own} probe --resume auto --config '{out}/sweep/new.toml' --name new --out '{out}' -q"
    )
    again = first.replace("/new.toml", "/old.toml").replace("--name new ", "--name old ")
    assert second == again  # one line starts it and goes on with it
    assert shlex.split(third) == shlex.split(
        f"OMP_NUM_THREADS=1 {own} onestep --config '{out}/sweep/one.toml' --name one --out '{out}' -q"
    )
    assert resolve(read_config_file(new.config_path)) == new.experiment.config
    dry = first.replace(f"--name new --out {shlex.quote(str(out))} -q", "--dry-run --json")
    shown = subprocess.run(["bash", "-c", dry], capture_output=True, text=True, check=True)
    assert '"steps": 4' in shown.stdout


def test_a_printed_command_moves_aside_what_cannot_be_resumed(tmp_path: Path) -> None:
    job = only(plan([experiment("a", kind="onestep")], tmp_path))
    left(job, "failed", reason="no")
    line = only(commands([job.now()]))
    assert job.path.exists()
    moves, dots, _ = line.rpartition(" && ")
    assert dots
    subprocess.run(["bash", "-c", moves], check=True)
    assert not job.path.exists()
    assert (tmp_path / "sweep/aside/a-1/run.json.aside").is_file()
    assert job.now().state == "new"


@pytest.mark.slow
def test_a_printed_command_of_a_training_run_may_be_given_again_and_again(tmp_path: Path) -> None:
    job = only(planned(tmp_path, "a", steps=2))
    left(job, "failed", reason="no")
    line = only(commands([job.now()]))
    for _ in range(2):
        assert (
            subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout == f"{job.path}\n"
        )
        assert job.now().state == "finished"
    assert (tmp_path / "sweep/aside/a-1/run.json.aside").is_file()
    assert not (tmp_path / "sweep/aside/a-2").exists()


def test_the_status_table_in_words(tmp_path: Path) -> None:
    jobs = planned(tmp_path, "new", "done", "broken", steps=4)
    left(jobs[1], "finished", step=4, verdict="trained")
    left(jobs[2], "failed", step=1, reason="out of memory")
    keys = ("run", "state", "verdict", "step", "reason")
    assert [tuple(row[key] for key in keys) for row in status_table(job.now() for job in jobs)] == [
        ("new", "new", "-", "-", ""),
        ("done", "finished", "trained", "4/4", ""),
        ("broken", "failed", "-", "1/4", "out of memory"),
    ]


@pytest.mark.parametrize("figure", ["branchnorm:5", "deepnet:4", "claims:fast"])
def test_configurations_survive_the_file(figure: str, tmp_path: Path) -> None:
    for number, each in enumerate(experiments(figure)):
        path = tmp_path / f"{number}.toml"
        path.write_text(toml.dumps(each.config), encoding="utf-8")
        assert resolve(read_config_file(path)) == each.config


texts = st.text(st.characters(exclude_categories=["Cs"])) | st.text(string.punctuation + "\x00\x7f\n\t")


@settings(deadline=None)
@given(
    source=texts,
    names=st.lists(texts, max_size=3),
    lr=st.floats(1e-300, 1e38),
    alpha=st.none() | st.floats(0, 1e38),
    every=st.integers(1, 10**9) | st.just("log"),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_configuration_survives_the_file(source, names, lr, alpha, every, seed, tmp_path_factory) -> None:
    base = config("branchnorm").model_dump()
    base["data"].update(source=source, valid=None)
    base["probes"].update(names=tuple(names), every=every)
    base["train"].update(lr=lr, seed=seed)
    base["model"]["alpha"] = alpha
    wanted = Config.model_validate(base)
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(toml.dumps(wanted).encode())
    assert resolve(read_config_file(path)) == wanted


@pytest.mark.slow
def test_the_parent_process_needs_neither_torch_nor_what_draws() -> None:
    check = (
        "import sys, stabilitylab.sweep as s, pathlib, stabilitylab.experiments as e; "
        "s.status_table(s.plan(e.experiments('8'), pathlib.Path('nowhere'))); s.grid(['arch=postln', 'seed=3']); "
        "sys.exit(str({'torch', 'pandas', 'matplotlib', 'scipy.stats', 'parsl'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert result.stderr.strip() == "set()"
