"""A run under everything that can happen to it, in any order: what was acknowledged is read, or its loss is said.

Steps of a machine: rows, seals, forks, deaths, resumes, and files that are removed, copied over one another, swapped,
replaced by another run's, put back. After each step all of the run is read. Not among them is what
docs/reliability.md does not promise: an older copy of a file put back in its place.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forking import in_a_fork
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from rest_slow import EVERY
from store_cases import TABLES, cells

from stabilitylab.errors import StabilityLabError, UsageError
from stabilitylab.schema import Cells
from stabilitylab.store import Run, RunWriter, damage
from stabilitylab.store.evaluation import write_evaluation
from stabilitylab.store.identity import new_identity
from stabilitylab.store.journal import Journal
from stabilitylab.store.verify import verify

FOREIGN = -1.0  # the attempt that another run's rows name


def metrics(step: int, attempt: float) -> dict[str, float | None]:
    return {"loss": step * 2.0, "attempt": attempt} | ({"late": step * 3.0} if step % 5 == 4 else {})


def tables(step: int, attempt: float) -> dict[str, Cells]:
    """The first table at every step, the second at every third; each number says its attempt."""
    given = TABLES if step % 3 == 0 else TABLES[:1]
    made = {table.name: cells(table, step) for table in given}
    return {name: Cells(one.values + 1e6 * attempt, one.absent) for name, one in made.items()}


def foreign_run(path: Path) -> Path:
    """Another run's files under every name that the run of a machine may have."""
    writer = RunWriter.create(path, {"label": "foreign"})
    writer.open(TABLES)
    for step in range(24):
        writer.append(step, metrics(step, FOREIGN), tables(step, FOREIGN))
        if step % 2:
            writer.seal()
    writer.set_status("failed", 24, "foreign")
    writer.close()
    write_evaluation(path, {"bleu": 99.0})
    for number in range(1, 13):
        journal = Journal(path / f"journal-{number:06d}.records", TABLES, new_identity(), number)
        for step in range(2 * number, 2 * number + 3):
            journal.append(step, metrics(step, FOREIGN), tables(step, FOREIGN))
        journal.release()
    return path


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign_run(tmp_path_factory.mktemp("foreign") / "run")


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())


class Machine(RuleBasedStateMachine):
    """``expected``: acknowledged steps, with the attempt that recorded each; ``loose``: those that a resume which was
    refused may have moved aside. ``clean``: no file is other than the run wrote it."""

    foreign: Path

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path, self.copies, self.attempt, self.clean = self.folder / "run", 0, 0, True
        self.expected: dict[int, int] = {}
        self.loose: set[int] = set()
        self.checkpoint: tuple[int, dict[int, int], int] = (1, {}, 0)
        self.step = 0
        self.writer: RunWriter | None = None

    @initialize()
    def begins(self) -> None:
        self.writer = RunWriter.create(self.path, {"label": "mine"})
        self.writer.open(TABLES)

    # what a training does

    @precondition(lambda self: self.writer is not None)
    @rule(count=st.integers(1, 4))
    def append(self, count: int) -> None:
        for _ in range(count):
            if not self._acted(lambda: self._put(self.step)):
                return
            self.expected[self.step] = self.attempt
            self.step += 1

    @precondition(lambda self: self.writer is not None)
    @rule(whole=st.booleans())
    def begin_a_step(self, whole: bool) -> None:
        """What is known of a step first; then the rest, or the death."""
        known = {"loss": self.step * 2.0, "attempt": float(self.attempt)}
        if not self._acted(lambda: self._alive.begin(self.step, known, tables(self.step, self.attempt))):
            return
        if whole:
            self.append(1)
        else:
            self.loose.add(self.step)
            self.expected[self.step] = self.attempt
            self.kill()

    @precondition(lambda self: self.writer is not None)
    @rule()
    def seal(self) -> None:
        self._acted(self._checkpoint)

    @precondition(lambda self: self.writer is not None)
    @rule()
    def flush(self) -> None:
        self._acted(self._alive.flush)

    @precondition(lambda self: self.writer is not None)
    @rule()
    def fork(self) -> None:
        """A worker inherits the writer, tries to record, ends its ``with`` block and exits."""
        alive = self._alive
        said = in_a_fork(
            lambda: self._put(self.step),
            alive.seal,
            lambda: alive.set_status("finished", 99, "the fork"),
            lambda: alive.__exit__(None, None, None),
            alive.close,
        )
        assert [one.partition(":")[0] for one in said] == ["UsageError", "UsageError", "", "", ""], said

    @precondition(lambda self: self.writer is not None)
    @rule()
    def kill(self) -> None:
        """As the kernel does: nothing more is written, and the lock is free."""
        assert self.writer is not None
        self.writer._lock.release()
        self.writer = None

    @precondition(lambda self: self.writer is not None)
    @rule()
    def close(self) -> None:
        def close() -> None:
            self._alive.close()
            self._alive.set_status("finished", self.step)

        if self._acted(close):
            self.writer = None

    @precondition(lambda self: self.writer is None)
    @rule()
    def resume(self) -> None:
        part, expected, step = self.checkpoint
        try:
            writer = RunWriter.resume(self.path, part)
            writer.open(TABLES)
        except StabilityLabError as error:
            self._must_be_damaged(error)
            self.loose |= {step for step in self.expected if step not in expected}
            return
        self.writer, self.attempt, self.step = writer, self.attempt + 1, step
        self.expected, self.loose = dict(expected), set()

    @precondition(lambda self: self.writer is None)
    @rule()
    def copy_the_run(self) -> None:
        """The whole directory goes elsewhere, as from a cluster, and training goes on there."""
        self.copies += 1
        there = self.folder / f"copy-{self.copies}"
        shutil.copytree(self.path, there)
        shutil.rmtree(self.path)
        self.path = there

    # what somebody else does to the files

    @rule(
        which=st.integers(0, 10**6),
        other=st.integers(0, 10**6),
        how=st.sampled_from(["unlink", "copy", "swap", "foreign"]),
    )
    def damage_and_restore(self, which: int, other: int, how: str) -> None:
        """Damage, a look, and the file put back, as the sentences advise."""
        if (names := self._damaged(which, other, how)) is None:
            return
        before = {name: (self.path / name).read_bytes() for name in names}
        clean, self.clean = self.clean, False
        self._damage(how, names)
        self.what_was_acknowledged_is_read_or_its_loss_is_said()
        for name, data in before.items():
            (self.path / name).write_bytes(data)
        self.clean = clean

    @precondition(lambda self: len(self.expected) > 4)
    @rule(
        which=st.integers(0, 10**6),
        other=st.integers(0, 10**6),
        how=st.sampled_from(["unlink", "copy", "swap", "foreign"]),
    )
    def damage(self, which: int, other: int, how: str) -> None:
        if (names := self._damaged(which, other, how)) is not None:
            self.clean = False
            self._damage(how, names)

    # what must hold

    @invariant()
    def what_was_acknowledged_is_read_or_its_loss_is_said(self) -> None:
        if not self.path.exists():
            return
        damage._told.clear()
        heard, log = Heard(), logging.getLogger("stabilitylab")
        log.addHandler(heard)
        said: list[str] = []
        missing: set[Any] = set()
        try:
            run = Run.open(self.path)
        except StabilityLabError as error:
            self._must_be_damaged(error)
            return
        finally:
            log.removeHandler(heard)
        if run.manifest["label"] == "foreign":  # run.json says whose run it is: what else is foreign fits it
            assert not self.clean, "a run.json that nobody touched"
            assert self._all_read(run) or verify(self.path).findings, "another run's run.json in silence"
            return
        log.addHandler(heard)
        try:
            for look in (self._metrics, *(lambda run, table=table: self._table(run, table) for table in TABLES)):
                try:
                    missing |= look(run)
                except StabilityLabError as error:
                    said.append(str(error))
            try:
                status = run.status
                assert status.reason not in ("foreign", "the fork")
                assert (run.evaluation or {}).get("bleu") != 99.0
            except StabilityLabError as error:
                said.append(str(error))
        finally:
            log.removeHandler(heard)
        said += heard.words
        missing -= {(name, step) for name, step in missing if step in self.loose}
        if self.clean:
            assert not said, said
            assert not missing, missing
            assert run.manifest["label"] == "mine"
        elif missing and not said:
            findings = verify(self.path).findings
            assert findings, f"lost in silence: {sorted(missing)[:5]}"

    def teardown(self) -> None:
        if self.writer is not None:
            self.kill()
        if self.path.exists() and self.clean:
            assert verify(self.path).findings == []
        shutil.rmtree(self.folder)

    # how

    @property
    def _alive(self) -> RunWriter:
        assert self.writer is not None
        return self.writer

    def _put(self, step: int) -> None:
        self._alive.append(step, metrics(step, self.attempt), tables(step, self.attempt))

    def _checkpoint(self) -> None:
        self.checkpoint = (self._alive.seal(), dict(self.expected), self.step)

    def _must_be_damaged(self, error: StabilityLabError) -> None:
        assert not self.clean, f"a run that nobody touched: {error}"
        assert not isinstance(error, UsageError), f"nobody used it wrongly: {error}"

    def _acted(self, act: Any) -> bool:
        """Whether the writer did it; one that says why it cannot is gone."""
        try:
            act()
        except StabilityLabError as error:
            self._must_be_damaged(error)
            self.kill()
            return False
        return True

    def _files(self) -> list[str]:
        found = (path for path in sorted(self.path.rglob("*")) if path.is_file() and "aside" not in path.parts)
        return [path.relative_to(self.path).as_posix() for path in found if not path.name.startswith(".")]

    def _damaged(self, which: int, other: int, how: str) -> list[str] | None:
        """The names of the files that the damage changes; None where it changes none."""
        files = self._files()
        if not files:
            return None
        name = files[which % len(files)]
        if how == "unlink":
            return [name]
        if how == "foreign":
            return [name] if (self.foreign / name).exists() else None
        alike = [one for one in files if one != name and Path(one).suffix == Path(name).suffix]
        return [name, alike[other % len(alike)]] if alike else None

    def _damage(self, how: str, names: list[str]) -> None:
        first, *rest = (self.path / name for name in names)
        if how == "unlink":
            first.unlink()
        elif how == "foreign":
            shutil.copy(self.foreign / names[0], first)
        elif how == "copy":
            shutil.copy(first, rest[0])
        else:
            os.rename(first, first.with_name(".between"))
            os.rename(rest[0], first)
            os.rename(first.with_name(".between"), rest[0])

    def _all_read(self, run: Run) -> bool:
        """Whether the rows of every acknowledged step are there: a resume that met another run.json went on as that
        run, and what it acknowledged since is that run's."""
        if not self.expected:
            return True
        try:
            found = run.arrow("metrics").to_pydict()
        except StabilityLabError:
            return False
        at = {step: place for place, step in enumerate(found["step"])}
        return all(
            step in at
            and all(name in found and found[name][at[step]] == v for name, v in metrics(step, attempt).items())
            for step, attempt in self.expected.items()
        )

    def _metrics(self, run: Run) -> set[tuple[str, int]]:
        found = run.arrow("metrics").to_pydict()
        for place, step in enumerate(found["step"]):
            assert step in self.expected, f"step {step} was never acknowledged"
            known = metrics(step, self.expected[step])
            if step in self.loose:
                known = {name: value for name, value in known.items() if name != "late"}
            for name, value in known.items():
                assert found[name][place] == value, (name, step, found[name][place], value)
        assert found["step"] == sorted(set(found["step"])), found["step"]
        return {("metrics", step) for step in self.expected.keys() - {*found["step"]}}

    def _table(self, run: Run, table: Any) -> set[tuple[str, int]]:
        due = {step for step in self.expected if table.name in tables(step, 0)}
        if table.name not in run.tables:
            return {(table.name, step) for step in due}
        found = run.frame(table.name)
        steps = found["step"].to_numpy()[:: len(table.rows)]
        values = found[list(table.columns)].to_numpy().reshape(-1, len(table.rows), len(table.columns))
        for place, step in enumerate(steps.tolist()):
            assert step in due, f"step {step} of {table.name} was never acknowledged"
            made = tables(step, self.expected[step])[table.name]
            np.testing.assert_array_equal(values[place], np.where(made.absent[:, None], np.nan, made.values))
        assert steps.tolist() == sorted({*steps.tolist()})
        return {(table.name, step) for step in due - {*steps.tolist()}}


def go(foreign: Path, examples: int, steps: int, **more: Any) -> None:
    machine = type("Machine", (Machine,), {"foreign": foreign})
    health = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=health,
            print_blob=True,
            **more,
        ),
    )


def test_what_was_acknowledged_is_read_or_its_loss_is_said(foreign: Path) -> None:
    go(foreign, examples=5, steps=15, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_was_acknowledged_is_read_or_its_loss_is_said_for_long(foreign: Path) -> None:
    """60 ways with ``EVERY=1``."""
    go(foreign, examples=60 if EVERY else 30, steps=40)


def test_a_run_that_was_resumed_under_another_run_json_goes_on_as_that_run(foreign: Path) -> None:
    """What it acknowledges afterwards is read, and nothing is damaged any more: the rows of before went aside."""
    state: Machine = type("Machine", (Machine,), {"foreign": foreign})()
    state.begins()
    state.append(count=4)
    state.begin_a_step(whole=False)
    state.damage(which=state._files().index("run.json"), other=0, how="foreign")
    for _ in range(2):
        state.resume()
        state.append(count=1)
        state.what_was_acknowledged_is_read_or_its_loss_is_said()
        state.close()
        state.copy_the_run()
    assert Run.open(state.path).manifest["label"] == "foreign"
    assert state.expected
    assert verify(state.path).findings == []
    state.what_was_acknowledged_is_read_or_its_loss_is_said()
    state.teardown()
