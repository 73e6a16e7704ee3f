"""LeanAdamW against torch's AdamW, bit for bit: updates, state, checkpoints in both directions, probes' tables."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from stabilitylab.config import ModelConfig, TrainConfig, parse_set, resolve
from stabilitylab.models import build_model
from stabilitylab.store import Run
from stabilitylab.train import loop, plan, recipe, start
from stabilitylab.train.adamw import LeanAdamW
from stabilitylab.train.run import Nobody

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}


def model(dtype: torch.dtype) -> nn.Module:
    """The reference Transformer with tied weights: shapes from 16 entries to hundreds."""
    config = ModelConfig(arch="deepnorm", encoder_layers=2, decoder_layers=2, d_model=16, d_ffn=24, tie="all")
    return build_model(config, source_vocab=40, target_vocab=40, seed=3).to(dtype)


def give(net: nn.Module, row: int, absent: int | None = None) -> None:
    """Gradients of row ``row``; every ``absent``-th parameter has none."""
    random = torch.Generator().manual_seed(row)
    for place, p in enumerate(net.parameters()):
        gradient = torch.randn(p.shape, generator=random, dtype=torch.float64).to(p.dtype) * 10.0 ** -(place % 9)
        p.grad = None if absent and place % absent == 0 else gradient


def run(net: nn.Module, optimizer: torch.optim.Optimizer, rows: range, absent: int | None = None) -> None:
    for row in rows:
        optimizer.param_groups[0]["lr"] = 1e-3 / (1 + row)
        give(net, row, absent if row % 3 == 1 else None)
        optimizer.step()
        optimizer.zero_grad()


def equal(one: nn.Module, first: torch.optim.Optimizer, other: nn.Module, second: torch.optim.Optimizer) -> bool:
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    same = all(torch.equal(a, b) for a, b in pairs)
    for a, b in pairs:
        mine, yours = first.state.get(a, {}), second.state.get(b, {})
        same &= mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)
    return same


def torchs(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), **SETTINGS, fused=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("absent", [None, 4])
def test_twenty_updates_are_those_of_torch(dtype: torch.dtype, absent: int | None) -> None:
    one = model(dtype)
    other = copy.deepcopy(one)
    lean, ordinary = LeanAdamW(one.parameters(), **SETTINGS), torchs(other)
    before = [p.detach().clone() for p in one.parameters()]
    run(one, lean, range(20), absent)
    run(other, ordinary, range(20), absent)
    assert equal(one, lean, other, ordinary)
    assert not any(torch.equal(p, old) for p, old in zip(one.parameters(), before, strict=True))
    run(one, lean, range(20, 21))
    assert not equal(one, lean, other, ordinary)  # the comparison can fail


def test_it_is_adamw_written_out_in_float64() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer = LeanAdamW([weight], lr=0.01, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3)
    theta, m, v = weight.detach().clone(), torch.zeros(3).double(), torch.zeros(3).double()
    for t in range(1, 6):
        g = torch.tensor([0.5, -1e-4, 2.0], dtype=torch.float64) * t
        weight.grad = g.clone()
        optimizer.step()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        theta = theta * (1 - 0.01 * 0.3) - 0.01 * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-3)
        assert torch.allclose(weight, theta, rtol=1e-13, atol=0)


def test_a_parameter_that_never_had_a_gradient_has_no_state_and_stays() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = LeanAdamW([used, unused], lr=0.1)
    used.grad = torch.ones(3)
    optimizer.step()
    assert set(optimizer.state) == {used}
    assert torch.equal(unused, torch.ones(2))
    unused.grad = torch.ones(2)  # used has one still: their counts differ from here on
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in (used, unused)] == [2.0, 1.0]
    used.grad = None
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in (used, unused)] == [2.0, 2.0]


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        LeanAdamW(table.parameters(), **SETTINGS).step()


@pytest.mark.parametrize("back", [False, True])
def test_each_loads_what_the_other_saved(back: bool, tmp_path: Path) -> None:
    one = model(torch.float32)
    other = copy.deepcopy(one)
    lean, ordinary = LeanAdamW(one.parameters(), **SETTINGS), torchs(other)
    run(one, lean, range(4), absent=4)
    run(other, ordinary, range(4), absent=4)
    saved = (lean if back else ordinary).state_dict()
    assert saved["state"].keys() == (ordinary if back else lean).state_dict()["state"].keys()
    torch.save(saved, tmp_path / "optimizer.pt")
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    target, fresh = (other, torchs(other)) if back else (one, LeanAdamW(one.parameters(), **SETTINGS))
    fresh.load_state_dict(loaded)
    pair = (one, lean, target, fresh) if back else (target, fresh, other, ordinary)
    for net, optimizer in (pair[:2], pair[2:]):
        run(net, optimizer, range(4, 9), absent=4)  # type: ignore[arg-type]
    assert equal(*pair)  # type: ignore[arg-type]


def test_loading_twice_forgets_the_first_state() -> None:
    net = model(torch.float32)
    lean = LeanAdamW(net.parameters(), **SETTINGS)
    run(net, lean, range(2))
    early = copy.deepcopy(lean.state_dict())
    weights = copy.deepcopy(net.state_dict())
    run(net, lean, range(2, 5))
    wanted = [p.detach().clone() for p in net.parameters()]
    net.load_state_dict(weights)
    lean.load_state_dict(early)
    run(net, lean, range(2, 5))
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), wanted, strict=True))


def test_groups_keep_their_own_settings_and_one_may_be_added() -> None:
    one = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(2))]
    other = copy.deepcopy(one)
    for parameters, kind in ((one, LeanAdamW), (other, torch.optim.AdamW)):
        extra = {} if kind is LeanAdamW else {"fused": True}
        groups = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:2], "betas": (0.5, 0.6)}]
        optimizer = kind(groups, **SETTINGS, **extra)
        for row in range(3):
            if row == 1:
                optimizer.add_param_group({"params": parameters[2:], "weight_decay": 0.7})
            for p in parameters:
                p.grad = torch.full_like(p, 1.0 + row)
            optimizer.step(lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert len({p[0].item() for p in one}) == 3


def test_a_rate_may_be_a_tensor() -> None:
    one, other = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(7))
    rate = torch.tensor(0.25)
    optimizers = LeanAdamW([one], lr=rate, capturable=True), LeanAdamW([other], lr=0.25)
    for value in (0.25, 0.5):
        rate.fill_(value)
        optimizers[1].param_groups[0]["lr"] = value
        for p, optimizer in zip((one, other), optimizers, strict=True):
            p.grad = torch.ones(7)
            optimizer.step()
    assert torch.equal(one, other)


def test_the_recipe_leaves_shards_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    assert type(recipe.adamw(TrainConfig(), parameters)) is LeanAdamW
    assert type(recipe.adamw(TrainConfig(), parameters, lean=False)) is torch.optim.AdamW
    monkeypatch.setattr(recipe, "local", lambda tensor: tensor.detach())  # as of a DTensor, whose shard is another one
    assert type(recipe.adamw(TrainConfig(), parameters)) is torch.optim.AdamW


@pytest.mark.slow
def test_a_whole_run_and_all_its_tables_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["model.T=6", "train.steps=6", "probes.every=1", "probes.update_every=3", "data.sentences=4"]
    prepared = plan(resolve(parse_set([*settings, "probes.names=['default','adam']"]), depth=4))
    lean = Run.open(start(prepared, tmp_path, "lean", Nobody()).path)
    monkeypatch.setattr(loop, "optimizer_of", lambda *given, **options: recipe.adamw(*given, **options, lean=False))
    ordinary = Run.open(start(prepared, tmp_path, "ordinary", Nobody()).path)
    assert lean.tables == ordinary.tables
    assert {"adam", "update_ratio", "grad_norm"} <= {*lean.tables}
    for name in lean.tables:
        pd.testing.assert_frame_equal(lean.frame(name), ordinary.frame(name), check_exact=True)
        assert len(lean.frame(name))
    clocks = ["tokens_per_second", "memory_bytes"]
    pd.testing.assert_frame_equal(lean.metrics.drop(columns=clocks), ordinary.metrics.drop(columns=clocks))


@pytest.mark.gpu
def test_a_captured_update_follows_its_rate() -> None:
    one, other = (nn.Parameter(torch.ones(7, device="cuda")) for _ in range(2))
    rate = torch.tensor(0.25, device="cuda")
    lean, ordinary = LeanAdamW([one], lr=rate, capturable=True), LeanAdamW([other], lr=0.25)
    one.grad, other.grad = torch.ones(7, device="cuda"), torch.ones(7, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        lean.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lean.step()
    ordinary.step()
    for value in (0.5, 0.1):
        rate.fill_(value)
        ordinary.param_groups[0]["lr"] = value
        graph.replay()
        ordinary.step()
    assert torch.allclose(one, other, rtol=1e-6, atol=0)
    assert float(lean.state[one]["step"]) == 3


WITHOUT_COMPILER = """
import sys
from stabilitylab import cli
sys.argv = ["stabilitylab", *{arguments!r}]
try:
    cli.main()
except SystemExit as end:
    assert not end.code, end.code
assert "torch._dynamo" not in sys.modules, "torch's compiler was imported"
"""


@pytest.mark.slow
def test_a_run_and_its_resumption_do_not_wait_for_torchs_compiler(tmp_path: Path) -> None:
    """The import of torch._dynamo takes as long as that of torch."""
    for arguments in (
        ["probe", "--depth", "2", "--steps", "2", "--quiet", "--name", "a"],
        ["probe", "--resume", "runs/a", "--steps", "3", "--quiet"],
        ["onestep", "--depth", "2", "--quiet"],
    ):
        code = WITHOUT_COMPILER.format(arguments=arguments)
        ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, f"{arguments}: {ended.stderr}"
