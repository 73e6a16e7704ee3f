"""Every registered probe, and some that are not ours, from the training loop to the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from making import load
from test_page import Document
from torch import nn

import stabilitylab as sl
from stabilitylab.probes import PROBES, Mean, Norm, ParameterProbe, Probe, Site
from stabilitylab.reports.diagnosis import diagnose
from stabilitylab.reports.page import html, press
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import Run, RunWriter

LAYERS = 2


@pytest.fixture
def foreign() -> Iterator[None]:
    """Three probes as somebody else writes them, gone after the test."""
    with PROBES.restored():
        _register_foreign_probes()
        yield


def _register_foreign_probes() -> None:
    @sl.probe("tanh_saturation", on="forward", at=lambda sites: _tanhs(sites), unit="share of units")
    class Saturation(Probe):
        """Share of units beyond .9."""

        def measure(self, site, x, y, weight):
            return (y.abs() > 0.9).float().mean(dim=-1)

    @sl.probe(
        "spread", on="reference", at=lambda sites: sites.layers, columns={"low": Mean(), "high": Mean()}, main="high",
        unit={"low": "units of x", "high": "decades"}, log=False,
    )  # fmt: skip
    class Spread(Probe):
        """Smallest and largest entry of a token."""

        def measure(self, site, x, y, weight):
            return {"low": y.amin(dim=-1), "high": y.amax(dim=-1)}

    @sl.probe("weight_norm", on="step", phase="step", unit="L2 norm", total="norm", columns={"value": Norm()}, log=True)
    class WeightNorm(ParameterProbe):
        """||theta||_2."""

        def collect(self, parameters):
            squares = parameters.squares(parameters.tensors)
            return {"value": parameters.by_row(squares)}, parameters.seen(parameters.tensors, [""])


def _tanhs(sites):
    return [Site(path, m, *sites.place(path)) for path, m in sites.modules.items() if isinstance(m, nn.Tanh)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.act, self.outer = nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.act(self.inner(self.norm(x))))


class Foreign(nn.Module):
    """A model of somebody else: no stack of ours, no attention, no configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def watched(out: Path, probes: str) -> None:
    torch.manual_seed(0)
    model = Foreign()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(4, 5, 8)
    with sl.watch(model, out=out, probes=probes, every=1, optimizer=optimizer, reference=lambda: model(x)) as w:
        for _ in range(4):
            loss = (model(torch.randn(4, 5, 8)) - 1).square().mean()
            loss.backward()
            w.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()


def shown(document: Document, run: Run) -> dict[str, list[dict]]:
    """Table -> the panels on the page that show it; asserts that each stands there under its title, with numbers."""
    (plots,) = [plots for name, plots in document.plots.items() if name.startswith("run-")]
    headings = [text for _, text in document.named("h4")]
    found: dict[str, list[dict]] = {}
    for table in run.tables:
        title = "Model update" if table == "model_update" else table.replace("_", " ")
        found[table] = [plot for plot in plots if plot["title"] == title or plot["title"].startswith(f"{title}, ")]
        assert found[table], f"{table} is not on the page"
        for plot in found[table]:
            assert any(heading.endswith(plot["title"]) for heading in headings)
            assert plot["map"] is None or plot["map"]["cells"]
            assert plot["map"] is not None or any(y is not None for trace in plot["traces"] for y in trace["y"])
    return found


def units(plots: list[dict]) -> set[str]:
    return {plot["map"]["unit"] if plot["map"] else plot["y"]["title"] for plot in plots}


def logs(plots: list[dict]) -> set[bool]:
    return {plot["map"]["log"] if plot["map"] else plot["y"]["log"] for plot in plots}


class NoPress:
    """Prints nothing: pictures of forty panels take matplotlib their time, and the page is made without them."""

    def __init__(self, *_: object) -> None: ...

    def submit(self, *_: object) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def shutdown(self, **_: object) -> None: ...


@pytest.mark.slow
@pytest.mark.usefixtures("foreign")
def test_every_registered_probe_and_a_foreign_one_reach_the_page(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run of the command line: all that are registered, with those that this file registers."""
    monkeypatch.setattr(press, "ProcessPoolExecutor", NoPress)
    code, _, err = run("probe", "--depth", "4", "--steps", "5", "--probes", "all", "--out", "R", "--quiet")
    assert code == 0, err
    (record,) = load(tmp_path / "R")
    nowhere = {"tanh_saturation", "router", "mixing_gain"}  # in this model
    by_name = {name for name, probe in PROBES.items() if probe.by_name}
    assert set(record.run.tables) == {*PROBES} - nowhere - by_name
    code, out, err = run("report", "R", "--figure", "branchnorm:8", "--run", record.name, "--json")
    assert (code, json.loads(out)["failed"]) == (0, []), err
    found = shown(Document(tmp_path / "report" / "index.html"), record.run)
    assert units(found["attention"]) == {"entropy [nats]"}
    assert units(found["branch_variance"]) == {"branch [variance over d]"}
    assert units(found["spread"]) == {"high [decades]"}
    assert (logs(found["grad_norm"]), logs(found["cosine_similarity"]), logs(found["spread"])) == (
        {True}, {False}, {False},
    )  # fmt: skip
    assert [len(plot["traces"]) for plot in found["output_norm"]] == [2]  # a line a stack
    assert [len(plot["traces"]) for plot in found["logits"]] == [1]


@pytest.mark.slow
@pytest.mark.usefixtures("foreign")
def test_a_foreign_model_under_watch_reaches_the_page_with_foreign_probes(run, tmp_path: Path) -> None:
    watched(tmp_path / "runs" / "mine", "ln_input,tanh_saturation,spread,weight_norm,ln_gain,adam")
    (record,) = load(tmp_path / "runs")
    assert {"tanh_saturation", "spread", "weight_norm", "ln_input"} <= {*record.run.tables}
    code, out, err = run("report", "runs", "--figure", "branchnorm:8", "--run", record.name, "--json")
    assert (code, json.loads(out)["failed"]) == (0, []), err
    found = shown(Document(tmp_path / "report" / "index.html"), record.run)
    assert units(found["tanh_saturation"]) == {"share of units"}
    printed = tmp_path / "report" / "figures" / "run-mine.png"
    assert printed.stat().st_size > 0, sorted(path.name for path in printed.parent.iterdir())
    facts = {name: record.run.table(name) for name in ("tanh_saturation", "spread", "weight_norm", "ln_gain", "adam")}
    assert [table.phase for table in facts.values()] == ["forward", "reference", "step", "step", "update"]
    assert [table.main for table in facts.values()] == ["value", "high", "value", "rms", "rms_t"]
    assert [table.log for table in facts.values()] == [None, False, True, False, True]


@pytest.mark.parametrize("log", [True, False, None])
@pytest.mark.parametrize("values", [[1.0, 1e6], [1.0, 2.0], [-1.0, 1e6], [0.0, np.nan]])
def test_a_table_that_only_its_run_knows_is_drawn_as_it_says(tmp_path: Path, log: bool | None, values) -> None:
    """Whatever the numbers: what cannot be logarithmic is not, and what the table leaves open goes by decades."""
    rows = tuple(Row(f"l{n}", "mine", n) for n in (1, 2))
    table = Table("of_somebody", ("a", "b"), rows, "stones", phase="update", main="b", log=log)
    with RunWriter.create(tmp_path / "run", {"label": "x", "config": {}}) as writer:
        writer.open([table])
        for step in range(3):
            cells = Cells(np.array([[0.5, value] for value in values]), np.zeros(2, bool))
            writer.append(step, {"loss": 1.0}, {"of_somebody": cells})
        writer.set_status("finished", 3)
    (record,) = load(tmp_path)
    picture = diagnose(record)
    (heat,) = [panel.map for panel in picture.panels if panel.map is not None]
    usual = [value for value in values if np.isfinite(value) and value != 0]
    possible = bool(usual) and min(usual) > 0
    assert heat.log is (possible and (max(usual) > 30 * min(usual) if log is None else log))
    assert heat.unit == "b [stones]"
    html.PageSection("run:x", "x", "", picture, {}, "runs").check()


def test_every_registered_probe_says_how_it_is_drawn() -> None:
    for name, probe in PROBES.items():
        assert isinstance(probe.log, bool), name
        assert probe.main in probe.columns
        assert probe.units.keys() == probe.columns.keys()
        assert all(probe.units.values()), name
