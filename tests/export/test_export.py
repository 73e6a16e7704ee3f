"""What is exported reads back equal, and nothing is overwritten."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.csv
import pyarrow.parquet
import pytest

from stabilitylab.errors import InputError, ResourceError, UsageError
from stabilitylab.export import export
from stabilitylab.export.latex import escape, number
from stabilitylab.export.tensorboard import MOST_PLACES
from stabilitylab.histograms import COLUMNS
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import Run, RunWriter, load_runs

STEPS, LAYERS = 5, 3
ROWS = tuple(
    Row(f"en_coder.{n}.{part}", "en_coder", n, part) for n in range(1, LAYERS + 1) for part in ("self_attn", "ffn")
)


@pytest.fixture
def made(tmp_path: Path) -> Run:
    """Every kind of number: digits that round, NaN, inf, absent, a metric that is not always given."""
    draw = np.random.default_rng(0)
    tables = [
        Table("grad_norm", ("value", "bias"), ROWS, total="norm"),
        Table("update_ratio", ("value",), ROWS),
        Table("model_update", ("cumulative",), (Row("out_put", "en_coder", 0, "output"),)),
    ]
    with RunWriter.create(tmp_path / "my_run", {"config": {"seed": 1}, "label": "x"}) as run:
        run.open(tables)
        for step in range(STEPS):
            values = draw.standard_normal((6, 2)) * 10.0 ** draw.integers(-30, 30, (6, 2))
            values[0, 1], values[1, 0] = np.nan, np.inf
            absent = np.array([False] * 5 + [step < 2])
            cells = {
                "grad_norm": Cells(values, absent),
                "update_ratio": Cells(np.abs(values[:, :1]), np.zeros(6, bool)),
                "model_update": Cells(np.array([[step / 3]]), np.zeros(1, bool)),
            }
            run.append(step, {"loss": 1 / (step + 3), "nll": None if step % 2 else np.nan}, cells)
        run.set_status("finished", STEPS)
    return Run.open(tmp_path / "my_run")


@pytest.mark.parametrize("to", ["csv", "parquet"])
@pytest.mark.parametrize("tables", [None, ["grad_norm"]])
def test_an_export_is_no_run(made: Run, tmp_path: Path, to: str, tables: list[str] | None) -> None:
    own = tmp_path / "runs" / "own"
    shutil.copytree(made.path, own)
    export(made, to, tmp_path / "runs" / "exported", tables)
    broken: list[tuple[Path, str]] = []
    assert [run.path for run in load_runs(tmp_path / "runs", broken)] == [own]
    assert not broken
    (own / "status.json").unlink()  # a run that lost it is one still, whatever lies beside its run.json
    (own / "mine.csv").touch()
    assert [run.path for run in load_runs(tmp_path / "runs")] == [own]


@pytest.mark.parametrize("to", ["csv", "parquet"])
def test_files_read_back_bit_for_bit(made: Run, tmp_path: Path, to: str) -> None:
    done = export(made, to, tmp_path / "out")
    assert {path.name for path in done.files} == {
        *(f"{name}.{to}" for name in ("metrics", "grad_norm", "update_ratio", "model_update")),
        "run.json",
    }
    assert (tmp_path / "out" / "run.json").read_bytes() == (made.path / "run.json").read_bytes()
    for name in ("metrics", *made.tables):
        path = tmp_path / "out" / f"{name}.{to}"
        plain = pyarrow.csv.ConvertOptions(null_values=[""])  # by default it takes nan for missing, too
        read = pyarrow.csv.read_csv(path, convert_options=plain) if to == "csv" else pyarrow.parquet.read_table(path)
        stored = made.arrow(name)
        assert read.column_names == stored.column_names
        for column in stored.column_names:
            ours, theirs = stored[column].to_pylist(), read[column].to_pylist()
            assert list(map(repr, ours)) == list(map(repr, theirs)), (name, column)  # nan, None and -0.0 apart


def test_csv_is_plain_enough_for_pandas(made: Run, tmp_path: Path) -> None:
    export(made, "csv", tmp_path / "out", ["grad_norm"])
    read = pd.read_csv(tmp_path / "out" / "grad_norm.csv", engine="pyarrow")
    frame = made.frame("grad_norm")
    np.testing.assert_array_equal(read["value"], frame["value"])
    assert read["sublayer"].tolist() == frame["sublayer"].astype(str).tolist()


def test_layers_are_combined_by_the_tables_rule_and_others_kept(made: Run, tmp_path: Path) -> None:
    done = export(made, "parquet", tmp_path / "out", by="layer")
    assert done.as_they_are == ("update_ratio", "model_update")
    read = pyarrow.parquet.read_table(tmp_path / "out" / "grad_norm.parquet").to_pandas()
    assert len(read) == STEPS * LAYERS
    rows = made.frame("grad_norm")
    layer = rows[(rows["step"] == 3) & (rows["layer"] == 2)]["value"].to_numpy()
    combined = read[(read["step"] == 3) & (read["layer"] == 2)]["value"].item()
    assert combined == pytest.approx(np.hypot(*layer), rel=1e-14)
    assert len(pyarrow.parquet.read_table(tmp_path / "out" / "update_ratio.parquet")) == STEPS * len(ROWS)


def test_nothing_is_overwritten_and_wrong_names_are_refused(made: Run, tmp_path: Path) -> None:
    export(made, "csv", tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(UsageError, match="holds something already"):
        export(made, "parquet", tmp_path / "out")
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    with pytest.raises(UsageError, match="has no table 'grad_nrm'"):
        export(made, "csv", tmp_path / "new", ["grad_nrm"])
    with pytest.raises(UsageError, match="unknown format 'excel'"):
        export(made, "excel", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_run_that_recorded_nothing_is_refused(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "empty", {"config": {}}) as run:
        run.open([])
    with pytest.raises(InputError, match="recorded nothing"):
        export(Run.open(tmp_path / "empty"), "csv", tmp_path / "out")


def test_tensorboard_reads_the_same_scalars(made: Run, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    export(made, "tensorboard", tmp_path / "out")
    events = accumulator.EventAccumulator(str(tmp_path / "out"), size_guidance={"scalars": 0})
    events.Reload()

    def scalars(tag: str) -> dict[int, float]:
        return {event.step: event.value for event in events.Scalars(tag)}

    loss = scalars("metrics/loss")
    assert list(loss) == list(range(STEPS))
    np.testing.assert_array_equal(list(loss.values()), np.float32(made.metrics["loss"].to_numpy()))
    assert list(scalars("metrics/nll")) == [0, 2, 4]  # where it was given
    frame = made.frame("grad_norm")
    with np.errstate(over="ignore", under="ignore"):  # TensorBoard keeps float32
        for name, combine in (("min", np.min), ("median", np.median), ("max", np.max)):
            usual = [g["value"].to_numpy()[np.isfinite(g["value"])] for _, g in frame.groupby("step")]
            expected = np.array([combine(values) for values in usual]).astype(np.float32)
            np.testing.assert_array_equal(list(scalars(f"grad_norm.value/en_coder/{name}").values()), expected)
        last = frame[(frame["layer"] == 3) & (frame["sublayer"] == "ffn")].set_index("step")
        tag = scalars("grad_norm.value/en_coder/003.ffn")
        assert list(tag) == [2, 3, 4]  # absent before
        np.testing.assert_array_equal(list(tag.values()), last.loc[[2, 3, 4], "value"].to_numpy().astype(np.float32))
    assert "model_update.cumulative/en_coder/out_put" in events.Tags()["scalars"]


def test_a_deep_stack_keeps_its_tags_within_the_limit(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    rows = tuple(Row(f"layers.{n}", "layers", n) for n in range(1, 201))
    with RunWriter.create(tmp_path / "deep", {"config": {}}) as run:
        run.open([Table("ln_input", ("value",), rows)])
        run.append(0, {"loss": 1.0}, {"ln_input": Cells(np.arange(200.0)[:, None], np.zeros(200, bool))})
    export(Run.open(tmp_path / "deep"), "tensorboard", tmp_path / "out")
    events = accumulator.EventAccumulator(str(tmp_path / "out"))
    events.Reload()
    places = [tag.rpartition("/")[2] for tag in events.Tags()["scalars"] if re.search(r"/\d+$", tag)]
    assert len(places) == MOST_PLACES
    assert (places[0], places[-1]) == ("001", "200")


def test_without_tensorboard_it_says_what_to_install(
    made: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ResourceError, match="pip install tensorboard"):
        export(made, "tensorboard", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_latex_is_a_table_with_as_many_cells_in_each_line(made: Run, tmp_path: Path) -> None:
    (path,) = export(made, "latex", tmp_path / "out").files
    text = path.read_text()
    body = [line for line in text.splitlines() if not line.startswith("%")]
    assert body[0] == r"\begin{tabular}{lrrrr}"  # probe, step, layers 1 to 3
    assert [line for line in body if "rule" in line] == [r"\toprule", r"\midrule", r"\bottomrule"]
    lines = [line for line in body if line.endswith(r"\\")]
    assert {line.count(" & ") for line in lines} == {4}
    assert lines[0] == r"probe & step & en\_coder 1 & en\_coder 2 & en\_coder 3 \\"
    assert [line.split(" & ")[:2] for line in lines[1:]] == [
        [r"grad\_norm", "0"],
        ["", str(STEPS - 1)],
        [r"update\_ratio", "0"],
        ["", str(STEPS - 1)],
    ]
    assert not re.search(r"(?<!\\)[_#]", "\n".join(body))
    assert text.count("{") == text.count("}")
    combined = made.frame("grad_norm", by="layer")
    first = combined[(combined["step"] == 0) & (combined["layer"] == 2)]["value"].item()
    assert lines[1].split(" & ")[3] == number(first)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "$0$"),
        (1.2345, "$1.23$"),
        (-0.05, "$-0.05$"),
        (1.5e-25, r"$1.50\times10^{-25}$"),
        (123456.0, r"$1.23\times10^{5}$"),
        (float("nan"), "NaN"),
        (float("-inf"), r"$-\infty$"),
        (None, "--"),
    ],
)
def test_numbers_in_latex(value: float | None, text: str) -> None:
    assert number(value) == text


def test_special_signs_are_escaped() -> None:
    assert escape("a_b & 5% of ~x^2 {\\}") == (
        r"a\_b \& 5\% of \textasciitilde{}x\textasciicircum{}2 \{\textbackslash{}\}"
    )


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here; the structure is tested above")
def test_latex_compiles(made: Run, tmp_path: Path) -> None:
    export(made, "latex", tmp_path / "out")
    head = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\\input{out/layers}\\end{document}"
    (tmp_path / "all.tex").write_text(head)
    done = subprocess.run(["pdflatex", "-halt-on-error", "all.tex"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0


def test_the_command(run, made: Run, tmp_path: Path) -> None:
    code, out, err = run("export", "my_run", "--to", "csv", "--by", "layer", "--tables", "metrics,update_ratio")
    assert (code, out) == (0, "3 files in my_run-csv\n")
    assert err == "rows cannot be combined and stay as they are: update_ratio\n"
    assert run("export", "my_run", "--to", "csv")[0] == 2  # my_run-csv is there
    facts = json.loads(run("export", "my_run", "--to", "latex", "--out", "paper", "--json")[1])
    assert facts == {"out": "paper", "files": ["paper/layers.tex"], "not_combined": []}
    assert run("export", "my_run", "--to", "excel")[0] == 2
    assert run("export", "nowhere", "--to", "csv")[0] == 4


def test_histograms_are_tensorboards_histograms(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    rows = (Row("layers.0.weight", "layers", 1, "weight"), Row("head.bias", "", 0, "bias"))
    counts = np.zeros((2, len(COLUMNS)))
    for column, count in (("-2^0", 3), ("-below", 1), ("zero", 2), ("+2^-2", 5), ("+above", 1), ("nonfinite", 7)):
        counts[0, COLUMNS.index(column)] = count
    with RunWriter.create(tmp_path / "run", {"kind": "watched", "config": {}}) as writer:
        writer.open([Table("histograms_gradient", COLUMNS, rows, "entries", "counts", main="zero", log=False)])
        cells = Cells(counts, np.array([False, True]))  # the bias has no gradient
        writer.append(4, {"loss": 1.0}, {"histograms_gradient": cells})
        writer.set_status("finished", 5)
    export(Run.open(tmp_path / "run"), "tensorboard", tmp_path / "out")
    events = accumulator.EventAccumulator(str(tmp_path / "out"))
    events.Reload()
    assert events.Tags()["histograms"] == ["histograms_gradient/layers/layers.0.weight"]
    (event,) = events.Histograms("histograms_gradient/layers/layers.0.weight")
    value = event.histogram_value
    assert (event.step, value.num, value.min, value.max) == (4, 12, -2.0, 2.0**17)
    held = {limit: count for limit, count in zip(value.bucket_limit, value.bucket, strict=True) if count}
    assert held == {-1.0: 3, 0.0: 1, 5e-324: 2, 0.5: 5, 2.0**17: 1}
    assert value.sum == pytest.approx(3 * -1.5 - 2.0**-65 + 5 * 0.375 + 1.5 * 2**16)
    assert not any(tag.startswith("histograms") for tag in events.Tags()["scalars"])
