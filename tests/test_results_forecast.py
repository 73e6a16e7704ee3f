"""results/forecast: the search finds the edge that there is, an outcome is what README says, a stopped call goes on."""

from __future__ import annotations

import gzip
import math
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from loose_scripts import scripts_of
from rest_slow import rest_slow

from stabilitylab.models import ARCHS

ROOT = Path(__file__).resolve().parents[1]
FORECAST = ROOT / "results" / "forecast"


def called(*words: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Python with the folder's modules at hand."""
    start = f"import sys; sys.path[:0] = [{str(FORECAST)!r}, {str(ROOT)!r}]; sys.argv = sys.argv[:1] + sys.argv[2:]; "
    command = [sys.executable, "-c", start + str(words[0]), "-", *map(str, words[1:])]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.fixture
def truth() -> Iterator[ModuleType]:
    with scripts_of("results/forecast") as load:
        yield load("truth")


def searched(truth: ModuleType, last: int, guess: int, step: int, unclear: tuple[int, ...] = ()) -> tuple[dict, list]:
    """What the search tries where all rates up to ``last`` train."""
    known: dict[int, str] = {}
    while (k := truth.wanted(known, guess, step)) is not None:
        assert k not in known
        assert truth.LOWEST <= k <= truth.HIGHEST
        known[k] = "cannot tell" if k in unclear else "trains" if k <= last else "fails"
    return known, sorted(known)


def test_the_search_finds_every_edge_from_every_start(truth: ModuleType) -> None:
    for last in range(truth.LOWEST, truth.HIGHEST):
        for guess in range(truth.LOWEST - 3, truth.HIGHEST + 3):
            for step in (truth.NEAR, truth.FAR):
                known, tried = searched(truth, last, guess, step)
                assert truth.edge(known) == (last, last + 1, True)
                assert len(tried) <= 10
    assert len(searched(truth, 5, 5, truth.NEAR)[1]) == 2  # from another seed that has the same edge


def test_an_edge_outside_the_grid_is_open(truth: ModuleType) -> None:
    known, _ = searched(truth, truth.HIGHEST, 4, truth.FAR)
    assert truth.edge(known) == (truth.HIGHEST, math.inf, True)
    known, _ = searched(truth, truth.LOWEST - 1, 4, truth.FAR)
    assert truth.edge(known) == (-math.inf, truth.LOWEST, True)
    assert math.isnan(truth.Cell("postln", 12, 40, 3).middle(truth.edge(known)))
    assert not truth.edge({}).done


def test_what_cannot_be_told_makes_the_interval_wider(truth: ModuleType) -> None:
    known, tried = searched(truth, 5, 4, truth.FAR, unclear=(6, 7))
    assert truth.edge(known) == (5, 8, True)
    assert {6, 7, 8} <= set(tried)
    known, _ = searched(truth, 5, 4, truth.FAR, unclear=tuple(range(6, 30)))
    assert truth.edge(known) == (5, math.inf, True)  # none of the next fails: the interval is open


def test_what_trains_above_a_rate_that_fails_is_not_below_the_edge(truth: ModuleType) -> None:
    assert truth.edge({3: "trains", 4: "fails", 6: "trains", 7: "fails"}) == (3, 4, True)


def test_rates_of_the_grid(truth: ModuleType) -> None:
    cell = truth.Cell("postln", 12, 40, 3)
    rates = [cell.rate(k) for k in range(truth.LOWEST, truth.HIGHEST + 1)]
    assert rates[-truth.LOWEST] == 1e-3
    assert [b / a for a, b in pairwise(rates)] == pytest.approx([1.3] * (len(rates) - 1), rel=0.01)
    between = truth.Cell("postln", 60, 40, 3, 0.5).rate(0)
    assert between == pytest.approx(1e-3 * math.sqrt(1.3), rel=0.01)
    assert cell.middle(truth.Edge(0, 1, True)) == pytest.approx(math.log10(between), abs=1e-3)
    assert truth.Cell("postln", 60, 40, 3, 0.5).middle(truth.Edge(0, 1, True)) == pytest.approx(math.log10(1.3e-3))


@pytest.mark.parametrize(
    ("seen", "what"),
    [
        ([(150, "trained", -0.6)], "trains"),
        ([(150, "trained", -0.4)], None),  # some came back
        ([(150, "trained", -0.4), (300, "trained", -0.51)], "trains"),
        ([(150, "diverged", 3.0)], None),
        ([(150, "diverged", 3.0), (300, "diverged", 2.0)], "fails"),
        ([(150, "diverged", 3.0), (300, "trained", -0.6)], "trains"),
        ([(150, "diverged", math.nan)], "fails"),
        ([(150, "stuck", 0.1), (300, "stuck", 0.1)], None),
        ([(150, "stuck", 0.1), (300, "stuck", 0.1), (600, "stuck", 0.1)], "fails"),
        ([(150, "stuck", 0.1), (300, "cannot tell", 0.1), (600, "cannot tell", 0.1)], None),
        ([(150, "stuck", 0.1), (300, "descending", 0.1), (600, "stuck", 0.1)], None),
        ([(150, "stuck", 0), (300, "descending", 0.1), (600, "stuck", 0.1), (1200, "cannot tell", 0)], "fails"),
        ([(150, "stuck", 0), (300, "descending", 0.1), (600, "cannot tell", 0), (1200, "cannot tell", 0)], "fails"),
        ([(150, "stuck", 0), (300, "descending", 0.1), (600, "descending", 0), (1200, "trained", -0.3)], "trains"),
        ([(150, "stuck", 0), (300, "descending", 0.1), (600, "learning", 0), (1200, "learning", -0.1)], "cannot tell"),
    ],
)
def test_what_became_of_a_run(truth: ModuleType, seen: list, what: str | None) -> None:
    assert truth.outcome([truth.Judged(*one) for one in seen]) == what


def test_every_architecture_of_its_time_but_t_fixup_has_its_cells(truth: ModuleType) -> None:
    later = {"keel", "gpas", "mix-ln", "hybridnorm", "hybridnorm-star", "completep"}
    later |= {"hyper-connections", "hyper-connections-static", "mhc", "siamese-norm", "attnres", "attnres-block"}
    assert {*truth.FIRST, *truth.OTHERS} | {"tfixup"} == set(ARCHS) - later
    assert len({*truth.FIRST, *truth.OTHERS}) == len(truth.FIRST) + len(truth.OTHERS)
    cells = list(truth.cells("first"))
    assert len(cells) == len(set(cells)) == 8 * 2 * 2 * 3
    assert {cell.seed for cell in cells[:32]} == {3}  # all with one seed first


def test_a_search_starts_at_the_nearest_edge(truth: ModuleType) -> None:
    cell, other, far = (truth.Cell(*own) for own in (("a", 12, 40, 4), ("a", 12, 40, 3), ("b", 12, 40, 3)))
    edge_at = {low: {low: "trains", low + 1: "fails"} for low in (2, 9)}
    assert truth.start(cell, {}) == (truth.START, truth.FAR)
    assert truth.start(cell, {far: edge_at[9]}) == (9, truth.FAR)
    assert truth.start(cell, {far: edge_at[9], other: edge_at[2]}) == (2, truth.NEAR)
    assert truth.start(cell, {other: {2: "trains"}}) == (truth.START, truth.FAR)  # not found yet


MAKE = """
import make, truth
truth.JUDGED = (8, 16, 32)
truth.LOWEST, truth.HIGHEST = 3, 4
truth.SEEDS = (3,)
truth.STAGES = {"first": (("deepnorm", "postln")[:int(sys.argv.pop())], (2,), 0.0)}
make.main()
"""


def test_the_table_of_the_docs_is_that_of_the_ledger() -> None:
    with scripts_of("results/forecast") as load:
        tell = load("tell")
        page = (ROOT / "docs" / "edges.md").read_text(encoding="utf-8")
        assert tell.anew(page) == page, "run results/forecast/tell.py --write"
        seeds = tell.edges(FORECAST)["postln", 12, 40]
        runs = pd.read_csv(FORECAST / "runs.csv")
        own = runs[(runs["arch"] == "postln") & (runs["layers"] == 12) & (runs["warmup"] == 40)]
        trained = own[own["outcome"] == "trains"].groupby("seed")["lr"].max().min()
        failed = own[own["outcome"] == "fails"].groupby("seed")["lr"].min().max()
        assert tell.between(seeds) == f"{trained:.2g}, {failed:.2g} ({own['seed'].nunique()})"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, lines in (("train", 120), ("val", 40)):
        for language in ("de", "en"):
            text = "".join(f"{name[0]}{n % 7} {language} ab{n % 5} {n}\n" for n in range(lines))
            (folder / f"{name}.{language}.gz").write_bytes(gzip.compress(text.encode()))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("source", rest_slow(["text", "synthetic"], (), ()))
def test_the_runs_are_made_once_each_and_decided(corpus: Path, tmp_path: Path, source: str) -> None:
    few = [word for one in ("data.vocab_size=128", "data.sentences=4", "data.held_out=6") for word in ("--set", one)]
    out, data = tmp_path / "out", corpus if source == "text" else source
    options = ["first", "--data", data, "--runs", tmp_path / "runs", "--out", out, *few]
    first = called(MAKE, *options, "1", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    lines = (out / "runs.csv").read_text()
    second = called(MAKE, *options, "2", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert (out / "runs.csv").read_text().startswith(lines)  # what stands there is not made again
    runs, course = pd.read_csv(out / "runs.csv"), pd.read_csv(out / "course.csv")
    assert list(dict.fromkeys(runs["arch"])) == ["deepnorm", "postln"]
    assert set(runs["warmup"]) == {0, 40}
    assert not runs.duplicated(["arch", "warmup", "k"]).any()
    assert set(runs["lr"]) <= {2.2e-3, 2.86e-3}
    assert set(runs["outcome"]) <= {"trains", "fails", "cannot tell"}
    for run, its in zip(runs.to_dict("records"), course.to_dict("records"), strict=True):
        steps, losses = (list(map(float, its[name].split())) for name in ("steps", "losses"))
        assert len(steps) == len(losses) >= 8
        assert steps[-1] == run["updates"]
        count = (8, 16, 32).index(run["updates"]) + 1
        assert len(run["states"].split()) == len(str(run["gaps"]).split()) == count
    assert not list((tmp_path / "runs").glob("*/checkpoints/*.pt"))
    assert len(list((tmp_path / "runs").glob("*/run.json"))) == len(runs)  # figures are drawn from them
