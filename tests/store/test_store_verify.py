"""``verify``: a sound run is ok, and each kind of damage is one finding."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from edited_runs import edit
from rest_slow import rest_slow
from store_cases import TABLES, contents, new_run, put

from stabilitylab.errors import InputError
from stabilitylab.store import Run, RunWriter
from stabilitylab.store.digest import Hashed
from stabilitylab.store.journal import Journal
from stabilitylab.store.verify import Verified, verify


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "run"
    writer = new_run(path)
    for first in (0, 3, 6):
        put(writer, *range(first, first + 3))
        writer.seal()
    writer.close()
    writer.set_status("finished", 8)
    (path / "checkpoints").mkdir()
    with (path / "checkpoints/step-00000008.pt").open("xb") as file:
        hashed = Hashed(file, writer.run_id)
        hashed.write(b"some weights" * 100 + b"\0\0")
        hashed.seal()
    return path


@pytest.fixture
def sound(made: Path, tmp_path: Path) -> Path:
    """Three parts, the steps 0-8 of 8 updates, a checkpoint."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def test_a_sound_run_is_ok_finished_killed_or_going(sound: Path, tmp_path: Path) -> None:
    found = verify(sound)
    assert (found.findings, found.rows, found.unchecked, found.live) == ([], 9, 0, False)
    writer = new_run(tmp_path / "going", 0, 1, 2)
    assert verify(tmp_path / "going").findings == []
    assert verify(tmp_path / "going").live
    writer._lock.release()
    assert verify(tmp_path / "going").findings == []
    with pytest.raises(InputError, match="no run"):
        verify(tmp_path / "nowhere")


def test_a_fault_of_a_live_run_is_one_that_a_second_look_finds_too(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_run(tmp_path / "going", 0, 1, 2)
    looks: list[Path] = []

    def half_written(run: Run, found: Verified) -> None:
        looks.append(run.path)
        if len(looks) == 1:
            found.say("the file was half written")

    monkeypatch.setattr("stabilitylab.store.verify._incident_rows", half_written)
    assert verify(tmp_path / "going").findings == []
    assert len(looks) == 2
    looks.clear()
    assert verify(sound).findings == ["the file was half written"]
    assert len(looks) == 1


def crop(run: Path) -> None:
    path = run / "metrics/part-000003.parquet"
    path.write_bytes(path.read_bytes()[:-10])


def swap(run: Path) -> None:
    """A part of another step under this one's name: every checksum of its own holds."""
    shutil.copy(run / "probes/grad_norm/part-000001.parquet", run / "probes/grad_norm/part-000002.parquet")


def flip(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        data = bytearray((run / name).read_bytes())
        data[len(data) // 2] ^= 4
        (run / name).write_bytes(data)

    return damage


def forget(run: Path) -> None:
    document = json.loads((run / "run.json").read_text())
    document["tables"].pop("grad_norm")
    edit(run / "run.json", document)


def lie(run: Path) -> None:
    edit(run / "status.json", step=20)


def journal_again(run: Path) -> None:
    writer = new_run(run.parent / "other", 3, 4)
    shutil.copy(writer.path / "journal-000001.records", run / "journal-000002.records")
    writer._lock.release()


def lying_journal(run: Path) -> None:
    """A journal that says something else than its part, which checks."""
    lying = Journal(run / "journal-000002.records", TABLES, Run.open(run).identity, 2)
    lying.append(3, {"loss": -1.0}, contents(3))
    lying.release()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a part is cut": (crop, "part-000003.parquet is not what was written"),
    "a part is another": (swap, "part-000002.parquet is not what was written"),
    "a part is lost": (lambda run: (run / "metrics/part-000002.parquet").unlink(), "part 2 of metrics (steps 3 to 5)"),
    "its steps too": (lambda run: (run / "metrics/part-000002.parquet").unlink(), "steps 3 to 5 are missing"),
    "the last part is lost": (lambda run: (run / "metrics/part-000003.parquet").unlink(), "its rows end at step 5"),
    "a table is lost": (lambda run: shutil.rmtree(run / "probes/grad_norm"), "part 1 of grad_norm"),
    "a bit of a part": (flip("probes/grad_norm/part-000001.parquet"), "part-000001.parquet is not what was written"),
    "a bit of the inventory": (flip("inventory.jsonl"), "1 lines of inventory.jsonl are damaged"),
    "no inventory": (lambda run: (run / "inventory.jsonl").unlink(), "inventory.jsonl is missing"),
    "a bit of a checkpoint": (flip("checkpoints/step-00000008.pt"), "step-00000008.pt is not what was written"),
    "a table is not declared": (forget, "run.json has no table 'grad_norm'"),
    "the status says more": (lie, "it finished at step 20, and its rows end at step 8"),
    "no status": (lambda run: (run / "status.json").unlink(), "status.json is missing"),
    "half of run.json": (lambda run: (run / "run.json").write_text("{"), "run.json is damaged"),
    "a foreign file": (lambda run: (run / "metrics/x").write_text(""), "holds 'x'"),
    "a journal of another run": (journal_again, "2 records of another run or journal were left out"),
    "a journal that lies": (lying_journal, "does not say what its journal says"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_and_said(sound: Path, case: str) -> None:
    damage, words = DAMAGE[case]
    damage(sound)
    findings = verify(sound).findings
    assert any(words in finding for finding in findings), findings
    assert all("\n" not in finding for finding in findings)


@pytest.mark.parametrize("flips", rest_slow([15, 150], [15]))
def test_every_flipped_bit_is_found(sound: Path, flips: int) -> None:
    chance = random.Random(5)
    files = [path for path in sound.rglob("*") if path.is_file() and path.stat().st_size]
    for _ in range(flips):
        path = chance.choice(files)
        data = path.read_bytes()
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        found = verify(sound)
        assert found.findings or found.unchecked, path  # a checkpoint's digest that lost its name
        path.write_bytes(data)
    assert verify(sound).findings == []


def test_a_journal_that_was_compacted_and_not_removed_is_no_finding(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", *range(4))
    shutil.copy(tmp_path / "run/journal-000001.records", tmp_path / "kept")
    writer.close()
    shutil.copy(tmp_path / "kept", tmp_path / "run/journal-000001.records")
    assert verify(tmp_path / "run").findings == []
    with RunWriter.resume(tmp_path / "run", part=2) as writer:
        writer.open(TABLES)
        put(writer, 4)
    assert verify(tmp_path / "run").findings == []


def test_a_run_that_died_in_its_first_row_is_sound(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run")
    writer.begin(0, {"loss": 1.0}, {})
    writer._lock.release()
    assert verify(tmp_path / "run").findings == []


def test_the_command(run, sound: Path, tmp_path: Path) -> None:
    new_run(tmp_path / "more/b", 0).close()
    code, out, err = run("verify", str(sound), str(tmp_path / "more"))
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{sound}: ok (9 rows, 12 files)",
        f"{tmp_path / 'more/b'}: ok (1 rows, 5 files)",
    ]
    crop(sound)
    code, out, _ = run("verify", "-q", str(sound), str(tmp_path / "more"))
    assert code == 1
    assert out.splitlines()[0].startswith(f"{sound}: ")
    assert "things wrong (6 rows, 12 files)" in out.splitlines()[0]
    code, out, _ = run("verify", "--json", str(sound))
    assert (code, json.loads(out)["runs"][0]["ok"]) == (1, False)
    assert run("verify", str(tmp_path / "nothing"))[0] == 4
