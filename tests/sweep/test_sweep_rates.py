"""The choice of a rate by runs of a sweep: rungs that go on from each other, and a call that was stopped."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stabilitylab.cli import main
from stabilitylab.commands import _rate_choice
from stabilitylab.config import parse_set, resolve
from stabilitylab.errors import InputError
from stabilitylab.experiments import Experiment
from stabilitylab.lr_find import Choice, RateTrial, Rungs
from stabilitylab.lr_find.search import RateResult, middle
from stabilitylab.store import Run
from stabilitylab.sweep import Job, Ledger, Outcome, SweptTrainer, Unfinished, choose_rate, examine, run, write_table
from stabilitylab.sweep.cells import COLUMNS
from stabilitylab.sweep.identity import key_of
from stabilitylab.sweep.rates import result_of

Say = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("forked_runs")


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """The command line: exit code, stdout, stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["stabilitylab", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return call


SETTINGS = (
    "model.arch=branchnorm model.T=2 train.schedule=linear train.warmup=2 train.steps=8 data.sentences=2 "
    'data.held_out=4 data.validation=20 data.vocab_size=64 train.evaluations=4 probes.names=["none"] '
    "probes.update_every=8"
)
HORIZON = 8
RUNGS = Rungs((1e-3, 2e-3, 4e-3), (100,), first=3, last=HORIZON)


def trainer(folder: Path, ran: list[list[str]] | None = None) -> SweptTrainer:
    def runner(jobs: Sequence[Job]) -> Outcome:
        if ran is not None:
            ran.append([job.name for job in jobs])
        return run(jobs, workers=2)

    base = Experiment("branchnorm-2", resolve(parse_set(SETTINGS.split()), depth=2))
    return SweptTrainer(base, HORIZON, folder, Ledger(folder / "ledger.csv"), runner)


@pytest.mark.slow
def test_a_longer_trial_goes_on_from_the_shorter_one(tmp_path: Path) -> None:
    first, last = RateTrial(1e-3, 100, 3), RateTrial(1e-3, 100, HORIZON)
    ran: list[list[str]] = []
    own = trainer(tmp_path / "own", ran)
    short = own.run([first])[first]
    path = tmp_path / "own" / own.trial(first).name
    assert Run.open(path).status.step == 3
    job = examine(own.trial(last), tmp_path / "own")
    assert (job.state, job.resumable, job.step) == ("interrupted", True, 3)
    long = own.run([last])[last]
    assert len(Run.open(path).manifest["attempts"]) == 2
    assert own.run([first, last]) == {first: short, last: long}  # from the ledger
    assert len(ran) == 2
    alone = trainer(tmp_path / "alone").run([last])[last]
    assert alone == long
    assert long.source_worth is not None
    assert not long.eligible  # eight updates teach nobody to read


@pytest.mark.slow
def test_the_choice_is_made_once_and_its_table_holds_every_trial(tmp_path: Path) -> None:
    ran: list[list[str]] = []
    own = trainer(tmp_path, ran)
    choice = choose_rate(own, RUNGS)
    assert choice.rate is None
    assert {trial.updates for trial in choice.results} == {3, HORIZON}
    again = choose_rate(trainer(tmp_path, more := []), RUNGS)
    assert again == choice
    assert more == []
    write_table(tmp_path / "choice.csv", {"branchnorm-2": choice})
    with (tmp_path / "choice.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(choice.results)
    assert {line["eligible"] for line in lines} == {line["chosen"] for line in lines} == {"0"}
    own.discard()
    assert not list(tmp_path.glob("branchnorm-2-lr*/checkpoints/*.pt"))


@pytest.mark.slow
def test_a_search_that_is_stopped_says_so_and_keeps_what_it_has(tmp_path: Path) -> None:
    def stopped(jobs: Sequence[Job]) -> Outcome:
        done = run(jobs[:1])
        return Outcome([*done.jobs, *jobs[1:]], signal=2)

    base = trainer(tmp_path)
    with pytest.raises(Unfinished, match="1 finished") as raised:
        choose_rate(SweptTrainer(base.experiment, HORIZON, tmp_path, base.ledger, stopped), RUNGS)
    assert raised.value.outcome.exit_code == 130
    assert len(base.ledger.cells()) == 1


def test_a_trial_that_ended_on_other_data_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Its line in the ledger has the key of the data that it read."""

    def ended(jobs: Sequence[Job]) -> Outcome:
        return Outcome([replace(job, state="finished") for job in jobs])

    own = replace(trainer(tmp_path), runner=ended)
    with pytest.raises(InputError, match=r"the data of .*/branchnorm-2-lr0.001-s100 have changed since it started"):
        own.run([RateTrial(1e-3, 100, 3)])


@pytest.mark.parametrize(
    ("verdict", "metrics", "eligible", "loss"),
    [
        ("trained", "validation_nll=3.5 held_out_nll=3.0 source_worth=0.4", True, 3.5),
        ("ignores its source", "validation_nll=3.5 source_worth=0.001", False, 3.5),
        ("trained", "held_out_nll=3.0", True, 3.0),  # a decoder alone
        ("stuck", "held_out_nll=6.0", False, 6.0),
        ("diverged", "validation_nll=9.0 source_worth=0.4", False, float("inf")),
        ("diverged", "validation_nll=nan", False, float("inf")),
    ],
)
def test_a_line_of_the_ledger_is_a_result(verdict: str, metrics: str, eligible: bool, loss: float) -> None:
    found = result_of({"verdict": verdict, "metrics": metrics})
    assert (found.eligible, found.loss) == (eligible, loss)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["arch=deepnorm", "--choose-rate"], "goes with --grid"),
        (["arch=deepnorm", "--choose-rate", "--grid", "--print"], "goes with --grid"),
        (["lr=1e-3,2e-3,4e-3", "--choose-rate", "--grid"], "needs an axis beside rates"),
        (["arch=deepnorm", "lr=0,1,2", "--choose-rate", "--grid"], "give learning rates that are all above 0"),
        (["arch=deepnorm", "lr=1e-3,2e-3", "--choose-rate", "--grid"], "give three or more"),
        (["arch=deepnorm", "lr=1e-3", "--choose-rate", "--grid"], "1 rate cannot be searched: give three"),
        (["arch=deepnorm", "--choose-rate", "--grid", "--set", "train.lr=1e-3"], "leave it out of --set"),
        (["arch=deepnorm", "--choose-rate", "--grid", "--steps", "4"], "4 updates are too few for a search"),
    ],
)
def test_a_wrong_search_is_refused_in_a_sentence(words: list[str], message: str, tmp_path: Path, say: Say) -> None:
    code, _, err = say("sweep", *words, "--out", str(tmp_path))
    assert code == 2
    assert message in err
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_source_has_no_column_of_its_worth(capsys: pytest.CaptureFixture[str]) -> None:
    for worth in (None, 0.3):
        results = {RateTrial(1e-3, 100, 40): RateResult(3.0, source_worth=worth)}
        _rate_choice._show("one", Choice(1e-3, 1e-3, {1e-3: 3.0}, results=results))
        assert ("source worth" in capsys.readouterr().out) == (worth is not None)


def test_the_command_prints_the_losses_of_each_rate_and_writes_them(tmp_path: Path, say: Say) -> None:
    """With the ledger's lines made up, so that nothing is run."""
    ledger = Ledger(tmp_path / "ledger.csv")
    base = resolve(parse_set(["model.arch=deepnorm", "train.steps=100"]), depth=2)
    owner = SweptTrainer(Experiment("deepnorm-2", base), 100, tmp_path, ledger, run)
    lines = []
    for rate in (1e-3, middle(1e-3, 2e-3), 2e-3, 4e-3):
        metrics = f"validation_nll={3 + abs(rate - 2e-3) * 100:.6f} source_worth={0.3 if rate < 4e-3 else 0.0}"
        for trial in (RateTrial(rate, seed, updates) for seed in range(100, 106) for updates in (40, 100)):
            own = {"key": key_of(owner.trial(trial).config), "verdict": "trained", "metrics": metrics}
            lines.append({**own, "finished": "2026-01-01T00:00:00+00:00"})
    with ledger.path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    axes = "arch=deepnorm", "depth=2", "lr=1e-3,2e-3,4e-3"
    where = "--steps", "100", "--out", str(tmp_path / "runs"), "--ledger", str(ledger.path), "-q"
    code, out, _ = say("sweep", "--grid", "--choose-rate", *axes, *where)
    assert code == 0
    assert out.splitlines()[0] == "deepnorm-2: the learning rate is 0.002"
    assert [line.split() for line in out.splitlines()[2:9]] == [
        ["0.001", "40", "2", "3.100", "0.300", "2", "of", "2"],
        ["0.001", "100", "2", "3.100", "0.300", "2", "of", "2"],
        ["0.00141", "100", "2", "3.059", "0.300", "2", "of", "2"],
        ["0.002", "40", "2", "3.000", "0.300", "2", "of", "2", "chosen"],
        ["0.002", "40", "4", "3.000", "0.300", "4", "of", "4", "confirms"],
        ["0.002", "100", "2", "3.000", "0.300", "2", "of", "2", "chosen"],
        ["0.004", "40", "2", "3.200", "0.000", "0", "of", "2"],
    ]
    with (tmp_path / "runs/choice.csv").open() as file:
        assert {line["lr"] for line in csv.DictReader(file) if line["chosen"] == "1"} == {"0.002"}
