"""What comes back: few files, small enough, complete at any moment, from which another machine goes on."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from made_verdict import made_verdict

from stabilitylab.config import resolve
from stabilitylab.probes._engine.cadence import is_due
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import Run, RunWriter


def ended_run(path: Path, steps: int, state: str = "finished") -> None:
    config = resolve({"train": {"steps": steps, "seed": 3}}, depth=2)
    table = Table("grad_norm", ("value",), (Row("encoder.1", "encoder", 1),), "L2 norm", "", "norm")
    with RunWriter.create(path, {"label": "branchnorm", "config": config.model_dump(mode="json")}) as run:
        run.open([table])
        for step in range(steps):
            run.append(
                step, {"loss": 1.0 / (step + 1)}, {"grad_norm": Cells(np.array([[step / 7]]), np.zeros(1, bool))}
            )
        run.set_status(state, steps, "", verdict=made_verdict("trained"))  # type: ignore[arg-type]
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / "step-00000120.pt").write_bytes(b"weights")


def names_in(piece: Path) -> list[str]:
    with tarfile.open(piece) as archive:
        return archive.getnames()


@pytest.mark.parametrize("whole", [2**20, 1])
def test_archives_hold_ended_runs_without_weights_and_another_machine_goes_on(script, monkeypatch, whole: int) -> None:
    monkeypatch.setattr(script.collect, "WHOLE", whole)
    place = script.at()
    folder = Path("runs/h200/branchnorm-3")
    ended_run(folder / "two", 120)
    ended_run(folder / "cut", 9, "interrupted")
    place.state.parts["checks"] = {"state": "complete", "seconds": 1.0, "sentence": "fine"}
    place.log.line("hello")
    script.place.CACHE.mkdir()
    (script.place.CACHE / "bpe-1.npz").write_bytes(b"vocabulary")
    size = sum(len(data) for _, data in script.collect._files(folder / "two"))
    monkeypatch.setattr(script.collect, "PIECE", 3 * size // 2)
    assert [piece.name for piece in place.keep()] == ["cache.tar.gz", "kept-0.tar.gz", "kept-1.tar.gz"]
    first = Path("out/kept-1.tar.gz").read_bytes()
    ended_run(folder / "one", 120)  # by its name it would come first
    pieces = place.keep()
    assert [piece.name for piece in pieces][1:] == ["kept-0.tar.gz", "kept-1.tar.gz", "kept-2.tar.gz"]
    assert Path("out/kept-1.tar.gz").read_bytes() == first  # so no run is lost where a call ends between two of them
    inside = [name for piece in pieces for name in names_in(piece)]
    assert len(inside) == len({*inside})
    assert not any("checkpoints" in name or "/cut/" in name for name in inside)
    before = {name: Run.open(folder / name) for name in ("one", "two")}
    kept = {name: (run.metrics, run.frame("grad_norm")) for name, run in before.items()}

    again = script.at(place.work / "elsewhere")
    assert script.collect.unpack(Path("nowhere"), place.work / "out") == 4
    assert script.collect.unpack(place.work / "out") == 0  # what is there is not written over
    state = script.place.State.read(Path("state.json"))
    assert (state.stands("checks"), state.kept) == ("complete", [f"{folder}/two", f"{folder}/one"])
    assert Path("cache/bpe-1.npz").read_bytes() == b"vocabulary"
    for name, (metrics, table) in kept.items():
        run = Run.open(folder / name)
        pd.testing.assert_frame_equal(run.metrics, metrics)
        steps = [whole > 1 or is_due(step, "log") or step in (50, 100, 119) for step in table["step"]]
        pd.testing.assert_frame_equal(run.frame("grad_norm"), table[steps].reset_index(drop=True))
    script.collect.runs(Path("runs.csv"))
    assert [*pd.read_csv("runs.csv")["run"]] == ["h200/branchnorm-3/one", "h200/branchnorm-3/two"]
    assert again.work.name == "elsewhere"


def test_there_are_at_most_eight_files_however_much_there_is_and_what_has_no_room_is_named(script, monkeypatch) -> None:
    place = script.at()
    for name in "abcdefg":
        ended_run(Path(f"runs/h200/x/{name}"), 30)
    Path("checks").mkdir()
    Path("checks/kernels.json").write_text("{}")
    Path("checks/core.bin").write_bytes(b"no")
    size = sum(len(data) for _, data in script.collect._files(Path("runs/h200/x/a")))
    monkeypatch.setattr(script.collect, "PIECE", 3 * size // 2)
    Path("checks/big.txt").write_bytes(b"x" * 2 * size)
    place.keep()
    script.collect.tables(place)
    place.keep()
    files = [path.name for path in Path("out").iterdir()]
    assert len(files) <= 8
    assert all(re.fullmatch(r"[\w.-]+", name, re.ASCII) for name in files)
    assert "parts.md" in files
    assert len(place.state.decided["left_out"]) == 7 - script.collect.PIECES
    inside = [name for path in Path("out").glob("kept-*") for name in names_in(path)]
    assert not any(run in name for run in place.state.decided["left_out"] for name in inside)
    assert "checks/kernels.json" in inside
    assert not {"checks/core.bin", "checks/big.txt"} & {*inside}
    most = script.collect
    monkeypatch.undo()
    assert (most.PIECES + 2) * most.PIECE + 2 * most.TEXT < 100 * 2**20
