"""One flipped bit anywhere in a run is refused or told, or changes nothing that is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from edited_runs import as_schema
from flipping import KINDS, flip, flips, flips_that_pandas_reads, read, sound_run
from rest_slow import EVERY
from store_cases import contents, new_run

from stabilitylab.errors import DamagedError
from stabilitylab.schema import Cells
from stabilitylab.store import Run
from stabilitylab.store.verify import verify


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound_run(tmp_path_factory.mktemp("flips") / "run")


def test_the_run_is_sound_and_all_of_it_is_read(run: Path) -> None:
    assert verify(run).findings == []
    content, said = read(run)
    assert (said, len(content[5]["metrics"]["step"])) == ("", 8)
    assert {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()} >= {*KINDS.values()}


@pytest.mark.parametrize("kind", KINDS)
def test_no_flip_is_silent(run: Path, kind: str) -> None:
    found = flip(run, KINDS[kind], 12)
    assert found.silent == 0, found
    assert sum(found) == 12


@pytest.mark.slow
def test_pandas_reads_flipped_parts_as_other_numbers(tmp_path: Path) -> None:
    """As docs/runs.md says, which therefore gives the checked way first: a part of 200 rows of random numbers."""
    chance = np.random.default_rng(0)
    with new_run(tmp_path / "run") as writer:
        for step in range(200):
            cells = contents(step)["grad_norm"]
            values = chance.normal(size=cells.values.shape)
            writer.append(step, {"loss": float(chance.normal())}, {"grad_norm": Cells(values, cells.absent)})
    part, run = tmp_path / "run/probes/grad_norm/part-000001.parquet", Run.open(tmp_path / "run")
    assert flips_that_pandas_reads(part, 40) > 10
    before = run.arrow("grad_norm")
    for _ in flips(part, 40, seed=0):
        try:
            found = run.arrow("grad_norm")
        except DamagedError:
            continue
        assert found.equals(before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_flip_of_many_is_silent(run: Path, kind: str) -> None:
    """300 flips with ``EVERY=1``."""
    found = flip(run, KINDS[kind], 300 if EVERY else 150, seed=1)
    print(f"{kind}: {found._asdict()}")
    assert found.silent == 0, found
    assert found.harmless == 0, f"verify finds nothing: {found}"


@pytest.mark.slow
def test_the_count_sees_silent_flips_where_there_is_no_checksum(run: Path, tmp_path: Path) -> None:
    """As in schema 3, whose run.json is read as other settings."""
    old = as_schema(shutil.copytree(run, tmp_path / "old"), 3)
    found = flip(old, "run.json", 60)
    assert found.silent > 10, found
    assert verify(old).unchecked == 4 + 3, "JSON files, and the rows of the incident"
