"""What docs/own-probe.md shows runs as it stands, and records what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of
from torch import nn

from stabilitylab.probes import PROBES, Watcher

PAGE = (Path(__file__).parents[2] / "docs" / "own-probe.md").read_text(encoding="utf-8")
PROBE, LOOP, TABLE, OF_PARAMETERS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

pytestmark = pytest.mark.usefixtures("scratch")


def run(*blocks: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/own-probe.md", "exec"), names)
    return names


def test_the_probe_is_ten_lines() -> None:
    lines = [line for line in PROBE.splitlines() if line.strip()]
    assert len(lines) <= 10


def test_the_gates_of_a_llama(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    seen: list[list[list[float]]] = [[], [], []]  # of each layer, of each step, the gates of all real tokens

    class Spied(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if self.training and torch.is_grad_enabled():  # not in the reference pass
                seen[self.layer].append(y.detach().double()[names["real"]].flatten().tolist())
            return y

    before, after = LOOP.split("with sl.watch")
    names = run(PROBE, before)
    for number, layer in enumerate(names["model"].model.layers):
        layer.mlp.gate_proj.__class__ = Spied
        layer.mlp.gate_proj.layer = number
    for block in (f"with sl.watch{after}", TABLE):
        exec(compile(block, "docs/own-probe.md", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4
    table = pd.read_parquet("runs/gates/probes/gates").sort_values(["step", "layer"])
    assert list(table["layer"]) == [1, 2, 3] * 4
    assert set(table["sublayer"]) == {"mlp"}
    for row in table.itertuples():
        gates = seen[row.layer - 1][row.step]
        assert row.lowest == pytest.approx(-min(gates), rel=1e-6)
        assert row.closed == pytest.approx(sum(gate < -4 for gate in gates) / len(gates))
    assert (tmp_path / "runs" / "gates" / "probes" / "grad_norm").is_dir()


def test_the_gates_count_those_below_minus_four() -> None:
    run(PROBE)
    measure = PROBES["gates"]().measure
    y = torch.tensor([[-5.0, -3.0, 2.0, -4.1]])
    numbers = measure(None, None, y, torch.ones(1, dtype=torch.bool))  # pyright: ignore
    assert isinstance(numbers, dict)
    assert {name: value.tolist() for name, value in numbers.items()} == {"closed": [0.5], "lowest": [5.0]}


def test_the_norm_of_weights() -> None:
    run("import stabilitylab as sl", OF_PARAMETERS)
    model, sink = Toy().double(), ListSink()
    watcher = Watcher(model, sink, probes="weight_norm")
    loss_of(model, batch()).backward()
    watcher.step()
    watcher.flush()
    watcher.close()
    expected = {}
    for row in sink.tables["weight_norm"].rows:
        own = [p.flatten() for name, p in model.named_parameters() if name.startswith(f"{row.site}.")]
        expected[row.site] = torch.cat(own).norm().item()
    assert sink.column(0, "weight_norm", "value") == pytest.approx(expected, rel=1e-12)
