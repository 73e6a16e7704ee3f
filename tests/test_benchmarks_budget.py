"""The benchmark of an update's budget: its floor against counts of another kind, and its table at toy size."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loose_scripts import scripts_of
from rest_slow import rest_slow
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("model.d_model=16", "model.d_ffn=48", "model.heads=2", "data.sentences=4", "train.precision=fp32")


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.chdir(ROOT)
    with scripts_of("benchmarks") as load:
        yield load("budget")


@pytest.mark.parametrize("stack", rest_slow(["encoder-decoder", "decoder", "encoder"], ["decoder"]))
def test_the_floor_counts_what_torch_counts(budget: Any, stack: str, tmp_path: Path) -> None:
    """Products of matrices, by torch's own counter, in a forward and backward pass; attention by its definition."""
    sets = (*budget.SETS, *SMALL, "train.attention=math", f"model.stack={stack}", "probes.names=['none']")
    plan = budget.prepared(6, *sets)
    made = budget.trainer(plan, tmp_path / "run")
    batch = plan.dataset.micro_batch(0)
    with FlopCounterMode(display=False) as counter:
        made.forward_backward([batch], torch.tensor(float(batch.tokens)))
    made.watcher.close()
    counted: Counter[str] = Counter()
    for operator, flops in counter.get_flop_counts()["Global"].items():
        counted["products" if str(operator) in ("aten.mm", "aten.addmm") else "attention"] += flops
    found = budget.work(made.model, batch)
    assert found.products == counted["products"]
    # torch counts all pairs; of a causal sub-layer half of them are masked
    masked = {"encoder-decoder": 3 / 9, "decoder": 1.0, "encoder": 0.0}[stack]  # share of its attention
    assert found.attention == pytest.approx(counted["attention"] * (1 - masked / 2))
    parameters = list(made.model.parameters())
    assert found.optimizer == 28 * sum(p.numel() for p in parameters)
    short = budget.work(made.model, batch, 2)
    assert short.optimizer - found.optimizer == 6 * sum(p.numel() for p in parameters if p.dim() == 2)
    assert short.stream == found.stream / 2
    sublayers = {"encoder-decoder": 2 * 3 + 3 * 3, "decoder": 12, "encoder": 12}[stack]
    assert found.stream == 6 * 4 * sublayers * 16 * next(iter(batch.masks.values())).numel()


def test_what_is_reached_stands_beside_the_floor(budget: Any) -> None:
    floor = budget.Work(4e12, 1e12, 2e9, 1e9).seconds(1e15, 1e12)
    assert floor == pytest.approx({"products": 4e-3, "attention": 1e-3, "optimizer": 2e-3, "stream": 1e-3})
    kinds = Counter({"matrix products": 5e-3, "optimizer": 3e-3, "copies": 2e-3, "number": 900})
    bare = budget.Reached(np.array([0.015, 0.016, 0.017]), kinds, 3 << 30, 4000)
    probed = budget.Reached(np.array([0.0168]), kinds, 4 << 30, 4000)
    text = budget.table(floor, {"graphs": bare, "graphs, probes": probed})
    rows = {
        cells[0]: cells[1:] for line in text.splitlines() if (cells := [c.strip() for c in line.strip("| ").split("|")])
    }
    assert rows["matrix products"] == ["4.00", "5.00", "5.00"]
    assert rows["LayerNorm"] == ["1.00", "0.00", "0.00"]
    assert rows["copies"][:2] == ["", "2.00"]
    assert rows["idle"][1:] == ["6.00", "6.80"]
    assert rows["an update"] == ["8.00", "16.00", "16.80"]
    assert rows["over the floor"][1].startswith("2.000 [")
    assert rows["target tokens/s"][1] == "250,000"
    assert rows["GiB reserved"][1:] == ["3.0", "4.0"]
    assert budget.costs({"graphs": bare, "graphs, probes": probed}) == [
        "graphs, probes: probes in every row cost 1.050 (goal 1.03)."
    ]


@pytest.mark.slow
def test_it_runs_at_toy_size(budget: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sets = [word for setting in SMALL for word in ("--set", setting)]
    monkeypatch.setattr(budget, "SIDE", {"cpu": 64})
    monkeypatch.setattr(budget, "bandwidth", lambda device: 1e10)
    given = ["--depth", "2", "--rounds", "2", *sets, "--out", str(tmp_path / "budget")]
    monkeypatch.setattr(sys, "argv", ["budget.py", *given])
    budget.main()
    text = (tmp_path / "budget.md").read_text()
    assert "1L-1L 16-48-2" in text
    head = next(line for line in text.splitlines() if line.startswith("| ms"))
    assert head == "| ms | floor | direct | probes | direct, again |"
    assert "probes: probes in every row cost" in text
    monkeypatch.setattr(sys, "argv", ["budget.py", *given, "--minutes", "0"])
    budget.main()
    text = (tmp_path / "budget.md").read_text()
    assert "Not measured: probes; direct, again." in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from torch._dynamo
def test_compiled_layers_are_timed_beside_the_others(
    budget: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from stabilitylab.train.fast import compiling

    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")  # writes no C++
    sets = [word for setting in SMALL for word in ("--set", setting)]
    out = tmp_path / "layers"
    monkeypatch.setattr(sys, "argv", ["x.py", "--depth", "2", "--rounds", "2", *sets, "--out", str(out)])
    importlib.import_module("compiled_layers").main()
    torch._dynamo.reset()
    lines = [line for line in out.with_suffix(".md").read_text().splitlines() if line.startswith("| ")][1:]
    ratios = {tuple(cell.strip() for cell in line.strip("|").split("|")[:2]) for line in lines}
    assert ("compiled, probed", "compiled") in ratios
    assert len(lines) == 5


def test_norms_from_a_layernorms_statistics_lose_digits_where_eps_outweighs_the_variance(
    budget: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("norm_statistics").main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    errors = {float(scale): (float(one), float(other)) for scale, one, other in rows}
    assert errors[1][0] < 1e-6
    assert errors[1e-4][0] > 1e-5
    assert all(other < 1e-6 for _, other in errors.values())
