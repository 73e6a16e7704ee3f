"""``ledger.jsonl``: facts that changed, a line each, with a checksum; torn, damaged, foreign and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import stabilitylab as sl
from stabilitylab.errors import DamagedError
from stabilitylab.store.verify import verify

FILE = "ledger.jsonl"


def watched(path: Path, rates: list[float], resume: dict | None = None, out: str = "run") -> dict:
    """Train a linear model, one update a rate; return the checkpoint after two updates."""
    torch.manual_seed(0)
    model, saved = nn.Linear(3, 2), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=rates[0])
    with sl.watch(
        model, out=path / out, optimizer=optimizer, reference=None, probes="none", record="ledger", resume=resume
    ) as w:
        for number, rate in enumerate(rates, start=1):
            optimizer.param_groups[0]["lr"] = rate
            loss = model(torch.ones(1, 3)).square().sum()
            loss.backward()
            w.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            if number == 2:
                saved = w.checkpoint()
    return saved


def rates_of(path: Path) -> list[tuple[int, float]]:
    return [(f["step"], f["after"]) for f in sl.Run.open(path).ledger if f["name"].endswith(" lr")]


def test_a_run_holds_what_changed(tmp_path: Path) -> None:
    watched(tmp_path, [0.1, 0.1, 0.2])
    assert rates_of(tmp_path / "run") == [(0, 0.1), (2, 0.2)]
    assert verify(tmp_path / "run").findings == []
    watched(tmp_path, [0.1, 0.1], out="other")
    assert sl.Run.open(tmp_path / "other").ledger[0].keys() == {"step", "kind", "name", "before", "after"}


def test_a_resumed_run_has_each_fact_once(tmp_path: Path) -> None:
    saved = watched(tmp_path, [0.1, 0.1, 0.2])
    watched(tmp_path, [0.1, 0.3], resume=saved)
    assert rates_of(tmp_path / "run") == [(0, 0.1), (3, 0.3)]


def test_a_torn_line_is_none_and_a_damaged_one_is_said(tmp_path: Path) -> None:
    watched(tmp_path, [0.1, 0.2])
    path = tmp_path / "run" / FILE
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 2, "ki')
    assert rates_of(tmp_path / "run") == [(0, 0.1), (1, 0.2)]
    path.write_bytes(whole.replace(b"0.2", b"0.3"))
    with pytest.raises(DamagedError, match=r"line \d+ of .*ledger.jsonl is damaged"):
        _ = sl.Run.open(tmp_path / "run").ledger


def test_lines_of_another_run_are_refused(tmp_path: Path) -> None:
    watched(tmp_path, [0.1])
    watched(tmp_path, [0.1], out="other")
    (tmp_path / "run" / FILE).write_bytes((tmp_path / "other" / FILE).read_bytes())
    with pytest.raises(DamagedError, match="belongs to another run"):
        _ = sl.Run.open(tmp_path / "run").ledger
