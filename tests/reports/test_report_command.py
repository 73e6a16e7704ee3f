"""`stabilitylab report` and `claims` as a user meets them, on made-up runs."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from making import Made, layer_rows, make_run, sublayer_rows

from stabilitylab.reports import figures
from stabilitylab.reports.claims import CLAIMS

assert figures
STEPS = (0, 10, 20)


def some_runs(folder: Path, seeds: tuple[int, ...] = (3, 4, 5)) -> None:
    """Similarity .99 for DeepNorm and .9 for BranchNorm, with a spread over seeds that decides nothing away."""
    for seed in seeds:
        for arch, level in (("deepnorm", 0.99), ("branchnorm", 0.90)):
            tables = {
                "cosine_similarity": Made(
                    layer_rows(3),
                    ("raw", "centred"),
                    lambda step, row, a=level, s=seed: (a - s * 1e-4, a),
                    STEPS,
                    "mean",
                ),
                "grad_norm": Made(sublayer_rows(3), ("value",), lambda step, row: 0.1 * row.layer, STEPS),
            }
            loss = [7.0, 6.0, 5.0]
            metrics = {"loss": loss, "nll": loss, "grad_norm_total": [1.0, 2.0, 1.5], "lr": [1e-4] * 3,
                       "held_out_nll": loss, "held_out_accuracy": [0.1, 0.2, 0.3]}  # fmt: skip
            name = f"{arch}-{seed}"
            make_run(folder, name, arch=arch, seed=seed, layers=3, tables=tables, metrics=metrics, metric_steps=STEPS)


@pytest.mark.slow
@pytest.mark.printing_processes
def test_a_report_holds_page_figures_and_ledger(run, tmp_path: Path) -> None:
    some_runs(tmp_path / "runs")
    code, out, _ = run("report")
    assert code == 0
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "branchnorm:8" in page
    for kind in ("png", "pdf", "svg", "csv"):
        assert (tmp_path / "report" / "figures" / f"branchnorm-8.{kind}").stat().st_size > 0
    ledger = json.loads((tmp_path / "report" / "claims.json").read_text())["claims"]
    assert {entry["id"] for entry in ledger} == {*CLAIMS} > {f"C{n:02d}" for n in range(1, 47)}
    assert next(entry for entry in ledger if entry["id"] == "C41")["effects"][0]["mean"] == 1
    assert len(pd.read_csv(tmp_path / "report" / "claims.csv")) >= len(CLAIMS)
    assert "branchnorm:8" in out
    assert "stabilitylab sweep deepnet:4 --scale tiny" in out  # what could not be made, and what makes it
    assert "page: report/index.html" in out


@pytest.mark.usefixtures("unprinted")
@pytest.mark.parametrize(
    ("figure", "said", "on_the_page"),
    [
        ("branchnorm:8", "2 claims:", "C41"),
        ("deepnet:5", "These runs test no claim about these figures.", "None of these claims can be judged"),
        ("histograms:ridges", "No claim is about these figures.", "No claim is about these figures."),
    ],
)
def test_of_one_figure_nothing_is_said_about_other_claims(
    run, tmp_path: Path, figure: str, said: str, on_the_page: str
) -> None:
    some_runs(tmp_path / "runs")
    code, out, _ = run("report", "--figure", figure)
    assert (code, said in out, "test no claim of the papers" in out) == (0, True, False)
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert on_the_page in page
    assert "No claim can be judged" not in page


@pytest.mark.usefixtures("unprinted")
def test_trials_of_a_rate_search_that_stopped_early_are_counted_and_not_drawn(run, tmp_path: Path) -> None:
    metrics = {"loss": [7.0, 5.0], "nll": [7.0, 5.0], "held_out_nll": [7.0, 5.0], "held_out_accuracy": [0.1, 0.2]}
    decoder = {"stack": "decoder", "encoder_layers": 0}
    for lr, steps in ((1e-3, 40), (2e-3, 40), (2e-3, 100), (4e-3, 100)):
        train = {"lr": lr, "steps": steps, "horizon": 100}
        make_run(tmp_path / "runs", f"keel-lr{lr:g}-{steps}", arch="keel", layers=2, metrics=metrics,
                 settings={"model": decoder, "train": train})  # fmt: skip
    (tmp_path / "runs/choice.csv").touch()
    code, out, _ = run("report")
    assert code == 0
    assert "run:keel-lr0.002-100" in out
    assert "run:keel-lr0.002-40" not in out
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "2 layers, 100 updates" in page
    assert "2 layers, 40 updates" not in page
    assert "Not drawn: 2 runs of a rate search that stopped before the end of their schedule." in page
    code, out, _ = run("report", "--run", "keel-lr0.002-40", "--figure", "table:keel")
    assert "run:keel-lr0.002-40" in out


@pytest.mark.usefixtures("unprinted")
def test_json_is_one_object_and_names_what_is_missing(run, tmp_path: Path) -> None:
    some_runs(tmp_path / "runs", seeds=(3,))
    code, out, _ = run("report", "runs", "--figure", "8", "--figure", "deepnet:5", "--json", "--out", "elsewhere")
    assert code == 0
    facts = json.loads(out)
    assert [figure["id"] for figure in facts["figures"] if not figure["id"].startswith("run:")] == ["branchnorm:8"]
    (missing,) = facts["missing"]
    assert missing["id"] == "deepnet:5"
    assert missing["command"].startswith("stabilitylab ")
    assert Path(facts["page"]) == Path("elsewhere/index.html")


def test_claims_prints_every_claim_and_exits_0_whatever_it_says(run, tmp_path: Path) -> None:
    some_runs(tmp_path / "runs")
    code, out, _ = run("claims")
    assert code == 0
    assert all(id in out for id in CLAIMS)
    assert "not testable" in out
    words = " ".join(out.split())
    assert "pairs with DeepNorm above 1 [" in words
    assert "], n = 3; R: > 0.8; X: < 0.5; p = " in words
    assert "beside it: median difference 0.09 [" in words
    assert "3L-3L, 64-128-2, synthetic" in words
    assert "set after a look: " in words
    assert "of which 1 survives Holm over the 12 published claims of that paper" in words
    assert all(len(line.rstrip()) <= 120 or line.startswith("  stabilitylab ") for line in out.splitlines())
    code, out, _ = run("claims", "runs", "--claim", "c41", "--json")
    (only,) = json.loads(out)["claims"]
    assert (only["id"], only["verdict"], only["effects"][0]["n"]) == ("C41", "inconclusive", 3)
    assert json.loads(out)["headline"]["published"]["inconclusive"] == 1


@pytest.mark.usefixtures("unprinted")
def test_a_report_works_on_one_run_and_names_the_unreadable(run, tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "only", layers=1, metrics={"loss": [1.0], "nll": [1.0], "grad_norm_total": [1.0]})
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "run.json").write_text("{")
    code, _, err = run("report")
    assert code == 1  # that run has no part of the page
    assert "broken" in err
    code, out, err = run("report", "--quiet")
    assert (code, out.strip()) == (1, "report/index.html")
    assert err.startswith("broken: ")
    assert (tmp_path / "report" / "index.html").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["report", "nowhere"], 4, "no folder nowhere"),
        (["claims", "nowhere"], 4, "no folder nowhere"),
        (["report", "empty"], 4, "no run can be read"),
        (["report", "runs", "--figure", "branchnorm:99"], 2, "unknown figure"),
        (["report", "runs", "--run", "nobody"], 2, "no run 'nobody'"),
        (["claims", "runs", "--claim", "C99"], 2, "unknown claim"),
        (["claims", "runs", "--power", "--fast"], 2, "leave one of the two out"),
        (["claims", "runs", "--data", "synthetic"], 2, "--data is the data of the runs that --fast makes"),
    ],
)
def test_bad_input_is_one_sentence(run, tmp_path: Path, arguments: list[str], code: int, sentence: str) -> None:
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "runs", "x", metrics={"loss": [1.0]})
    found, out, err = run(*arguments)
    assert (found, out) == (code, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_an_out_that_cannot_be_written_is_named(run, tmp_path: Path) -> None:
    some_runs(tmp_path / "runs", seeds=(3,))
    (tmp_path / "taken").write_text("a file")
    code, _, err = run("report", "--out", "taken/report")
    assert code == 5
    assert "cannot write the report to taken/report" in err
    assert "choose another --out" in err
