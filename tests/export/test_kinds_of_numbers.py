"""Absent, missing, 0, NaN, inf and -inf stay six different findings wherever a run goes; docs/reliability.md prints
how."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stabilitylab.export import export
from stabilitylab.reports import diagnosis
from stabilitylab.reports.base import FINDINGS
from stabilitylab.reports.collection import Record
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import Run, RunWriter

KINDS = ("absent", "missing", "0", "NaN", "+inf", "-inf")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
STACKS = ("encoder", "decoder")  # of three layers, which LaTeX shows all
ROWS = tuple(Row(f"{stack}.{n}", stack, n, "") for stack in STACKS for n in (1, 2, 3))
CELLS = Cells(
    np.array([[math.nan], [math.nan], [0.0], [math.nan], [math.inf], [-math.inf]]),
    np.array([kind == "absent" for kind in KINDS]),
    np.array([[kind == "missing"] for kind in KINDS]),
)
TABLE = Table("finding", ("value",), ROWS)
METRICS = {"missing": None, "0": 0.0, "NaN": math.nan, "+inf": math.inf, "-inf": -math.inf}


@pytest.fixture
def found(tmp_path: Path) -> Run:
    """A run of one row, a layer a kind of number."""
    with RunWriter.create(tmp_path / "run", {"config": {}, "label": "x"}) as run:
        run.open([TABLE])
        run.append(0, METRICS, {"finding": CELLS})
        run.set_status("finished", 0)
    return Run.open(tmp_path / "run")


def word(value: Any) -> str:
    if value is None or value == "":
        return "empty"
    value = float(value)
    if math.isfinite(value):
        return f"{value:g}"
    return "NaN" if math.isnan(value) else f"{value:+}"


def in_csv(run: Run, out: Path) -> list[str]:
    export(run, "csv", out)
    with (out / "finding.csv").open(newline="") as file:
        return [f"{word(row['value'])}, absent {row['absent']}" for row in csv.DictReader(file)]


def in_parquet(run: Run, out: Path) -> list[str]:
    import pyarrow.parquet

    export(run, "parquet", out)
    rows = pyarrow.parquet.read_table(out / "finding.parquet").to_pylist()
    null = {True: "null", False: None}
    return [f"{null[row['value'] is None] or word(row['value'])}, absent {str(row['absent']).lower()}" for row in rows]


def in_pandas(run: Run, out: Path) -> list[str]:
    frame = run.frame("finding")
    return [
        f"{word(value)}, absent {str(absent).lower()}"
        for value, absent in zip(frame["value"], frame["absent"], strict=True)
    ]


def in_arrow(run: Run, out: Path) -> list[str]:
    data = run.arrow("finding").to_pydict()
    return [
        f"{'null' if value is None else word(value)}, absent {str(absent).lower()}"
        for value, absent in zip(data["value"], data["absent"], strict=True)
    ]


def in_latex(run: Run, out: Path) -> list[str]:
    (path,) = export(run, "latex", out).files
    line = next(line for line in path.read_text().splitlines() if line.startswith("finding"))
    return line.removesuffix(r" \\").split(" & ")[2:]


def in_tensorboard(run: Run, out: Path) -> list[str]:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    export(run, "tensorboard", out)
    events = EventAccumulator(str(out))
    events.Reload()
    values = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert {tag: values.pop(tag) for tag in list(values) if "not_finite" in tag} == {
        "finding.value/decoder/not_finite": [3.0]
    }
    points = [values.get(f"finding.value/{row.stack}/{row.layer:03d}", []) for row in ROWS]
    return [word(*point) if point else "no point" for point in points]


def in_trackers(run: Run, out: Path) -> list[str]:
    pytest.importorskip("accelerate")
    from stabilitylab.trackers import aggregates

    told = []
    for place, kind in enumerate(KINDS):
        own = Table("finding", ("value",), (ROWS[place],))
        assert CELLS.missing is not None
        cells = Cells(CELLS.values[[place]], CELLS.absent[[place]], CELLS.missing[[place]])
        values = aggregates({}, {"finding": cells}, {"finding": own})
        tags = {tag.rsplit("/", 1)[1]: value for tag, value in values.items()}
        assert tags.keys() in (set(), {"min", "median", "max"}, {"not_finite"}), kind
        told.append(" ".join(f"{tag} {value:g}" for tag, value in tags.items() if tag in ("max", "not_finite")))
    return [each or "no number" for each in told]


def in_page(run: Run, out: Path) -> list[str]:
    """The cells of the run's heat maps, by what the page's legend calls their colour."""
    panels = diagnosis.diagnose(Record(run, "run")).panels
    maps = {panel.map.origin.stack: panel.map for panel in panels if panel.map is not None and panel.map.origin}
    found = []
    for row in ROWS:
        drawn = maps[row.stack]
        at = list(drawn.y).index(row.layer), 0
        kind = int(drawn.finding[at])
        found.append(FINDINGS[kind] if kind else "no cell" if np.isnan(drawn.z[at]) else word(drawn.z[at]))
    return found


DESTINATIONS = {
    "CSV": in_csv,
    "Parquet": in_parquet,
    "`Run.arrow`": in_arrow,
    "pandas (`Run.frame`)": in_pandas,
    "TensorBoard": in_tensorboard,
    "LaTeX": in_latex,
    "trackers": in_trackers,
    "page": in_page,
}


def written() -> dict[str, list[str]]:
    """The rows of the page's table."""
    text = PAGE.read_text(encoding="utf-8")
    block = re.search(r"<!-- kinds of numbers -->\n(.*?)<!-- /kinds of numbers -->", text, re.DOTALL)
    assert block is not None
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block[1].splitlines() if line]
    assert rows[0] == ["where", *KINDS]
    return {name: cells for name, *cells in rows[2:]}


@pytest.mark.parametrize("where", DESTINATIONS)
def test_each_kind_of_number_arrives_as_the_page_says(found: Run, tmp_path: Path, where: str) -> None:
    cells = DESTINATIONS[where](found, tmp_path / "out")
    assert [f"`{cell}`" for cell in cells] == written()[where]


@pytest.mark.parametrize("where", DESTINATIONS)
def test_a_measured_number_is_told_from_one_that_is_not_there(where: str) -> None:
    """Of the table, which the test above holds to the code: nothing measured looks like nothing."""
    none, here = split(zip(KINDS, written()[where], strict=True))
    assert not none & here


def split(cells: Iterable[tuple[str, str]]) -> tuple[set[str], set[str]]:
    """What stands for a number that does not exist, and what for one that was measured."""
    pairs = list(cells)
    nothing = {cell for kind, cell in pairs if kind == "absent"}
    return nothing, {cell for kind, cell in pairs if kind not in ("absent", "missing")}


def test_the_page_tells_of_every_destination() -> None:
    assert set(written()) == set(DESTINATIONS)
    assert not math.isnan(CELLS.values[2, 0])


def test_metrics_that_are_not_given_are_told_from_nan(found: Run) -> None:
    row = found.arrow("metrics").to_pylist()[0]
    assert {name: row[name] for name in METRICS if name not in ("NaN", "missing")} == {
        name: METRICS[name] for name in METRICS if name not in ("NaN", "missing")
    }
    assert row["missing"] is None
    assert math.isnan(row["NaN"])
