"""A part that would not fit into memory is refused by its footer, and what does not fit ends in one sentence."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from edited_runs import as_schema
from store_cases import new_run

from stabilitylab.errors import DamagedError, ResourceError
from stabilitylab.store import Run, RunWriter, parts
from stabilitylab.store.inventory import entry_of
from stabilitylab.store.parts import MOST_CELLS, _label


def zeros(path: Path, rows: int, columns: int, metadata: dict[bytes, bytes] | None = None) -> None:
    """A Parquet file of constant columns, which takes next to nothing on the disk."""
    group = pa.table(
        {"step": pa.array(range(10**5)), **{f"c{i}": pa.nulls(10**5, pa.float64()) for i in range(columns)}}
    )
    group = group.replace_schema_metadata(metadata)
    with pq.ParquetWriter(path, group.schema, compression="zstd") as writer:
        for _ in range(rows // 10**5):
            writer.write_table(group)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    writer = new_run(tmp_path / "run", 0, 1)
    writer.close()
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the footer may be looked at."""
    read = pq.ParquetFile.read

    def small(file: pq.ParquetFile, *rest: object, **options: object) -> pa.Table:
        assert file.metadata.num_rows < 1000, "it was read"
        return read(file, *rest, **options)

    monkeypatch.setattr(pq.ParquetFile, "read", small)


@pytest.mark.slow
def test_a_part_beyond_all_bounds_is_refused_by_its_footer(run: Path) -> None:
    """Such a file of 2.6 MB cost 7.5 GB."""
    as_schema(run, 2)
    path = run / "metrics/part-000001.parquet"
    zeros(path, 10**6, 120)
    assert path.stat().st_size < 4 * 10**6
    with pytest.raises(DamagedError, match=r"it holds 121,000,000 cells, more than 100,000,000") as caught:
        _ = Run.open(run).metrics
    assert (caught.value.run, caught.value.exit_code) == (run, 4)


def test_a_part_of_more_rows_than_the_inventory_lists_is_refused(run: Path) -> None:
    own = Run.open(run).identity
    path = run / "metrics/part-000001.parquet"
    zeros(path, 10**5, 3, _label(own, "metrics", 1))
    with pytest.raises(DamagedError, match="its footer is not what was written"):
        _ = Run.open(run).metrics
    entry = entry_of("metrics", 1, pa.array([0, 1]).to_numpy(), memoryview(path.read_bytes()), own)  # a forger's line
    (run / "inventory.jsonl").write_text("")
    parts.inventory.add(run, [entry])
    with pytest.raises(DamagedError, match="it holds 100,000 rows, and 2 were written"):
        _ = Run.open(run).metrics


def test_a_part_that_unpacks_to_gigabytes_is_refused_by_its_footer(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_schema(run, 2)
    monkeypatch.setattr(parts, "LARGEST", 10**6)
    zeros(run / "metrics/part-000001.parquet", 2 * 10**5, 3)
    with pytest.raises(DamagedError, match=r"it unpacks to \d+ MB, more than 1 MB"):
        _ = Run.open(run).metrics


def test_metrics_of_ever_new_names_make_parts_that_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name is a column of all rows: the journal becomes parts before that is too much, and so do the parts."""
    monkeypatch.setattr("stabilitylab.store.writer.MOST_CELLS", 4000)
    monkeypatch.setattr(parts, "MOST_CELLS", 4000)
    with RunWriter.create(tmp_path / "run", {}) as writer:
        for step in range(300):
            writer.append(step, {f"loss_{step}": 1.0}, {})
    run = Run.open(tmp_path / "run")
    found = run.arrow("metrics")
    assert found["step"].to_pylist() == [*range(300)]
    assert found.num_columns == 301
    for path in (tmp_path / "run/metrics").iterdir():
        metadata = pq.read_metadata(path)
        assert metadata.num_rows * metadata.num_columns <= 4000


def test_the_bound_is_far_above_what_a_writer_makes() -> None:
    from stabilitylab.store.writer import JOURNAL_LIMIT

    narrowest = 8 + 1 / 8  # bytes of a row with one column
    assert 3 * (JOURNAL_LIMIT / narrowest) * 7 < MOST_CELLS


@pytest.mark.parametrize("where", ["stabilitylab.store.pieces.read_part", "pyarrow.concat_tables"])
def test_what_does_not_fit_into_memory_is_one_sentence(run: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    opened = Run.open(run)

    def too_much(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(where, too_much)
    with pytest.raises(ResourceError, match=r"'metrics' of .*run does not fit into memory: read fewer columns="):
        _ = opened.metrics


def test_no_internal_error_from_memory(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stabilitylab import cli

    def too_much(*_: object, **__: object) -> None:
        raise MemoryError("malloc of size 7,500,000,000 failed")

    monkeypatch.setattr("stabilitylab.store.verify.verify", too_much)
    monkeypatch.setattr("sys.argv", ["stabilitylab", "verify", str(run)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    err = capsys.readouterr().err
    assert (end.value.code, "internal error" in err) == (5, False)
    assert "out of memory (malloc of size 7,500,000,000 failed): give fewer or smaller runs" in err


def test_a_document_that_does_not_fit_is_one_sentence(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("stabilitylab.store.documents.json.loads", too_much)
    with pytest.raises(DamagedError, match="it needs more memory than there is"):
        Run.open(run)
