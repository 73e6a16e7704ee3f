"""A model that is saved or copied while it is watched: it has no hook of ours, and needs none of our code."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_toys import ListSink, Toy, batch, loss_of
from torch import nn

import stabilitylab as sl
from stabilitylab.probes import Watcher
from stabilitylab.probes.places import copied

LOADS = """
import sys
for name in ("stabilitylab", "probe_toys"):
    sys.modules[name] = None  # as where it is not installed
import torch
model, x, wanted = torch.load(sys.argv[1], weights_only=False)
assert torch.equal(model(x), wanted)
model(x).sum().backward()
print("loaded")
"""


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2)))


@pytest.mark.parametrize("way", ["itself", "a copy", "a copy of a copy"])
def test_a_saved_model_is_loaded_where_the_package_is_not_installed(tmp_path: Path, way: str) -> None:
    model, x = plain(), torch.randn(3, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watcher(model, ListSink(), optimizer=optimizer, every=1, reference="first batch") as watcher:
        for _ in range(2):
            model(x).square().mean().backward()
            watcher.step()
            optimizer.step()
            optimizer.zero_grad()
        saved: Any = model
        for _ in range(way.count("copy")):
            saved = copy.deepcopy(saved)
        with torch.no_grad():
            torch.save((saved, x, model(x)), tmp_path / "model.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", LOADS, str(tmp_path / "model.pt")]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert found.stdout == "loaded\n", found.stderr


def hooks(model: nn.Module) -> list[Any]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [hook for module in model.modules() for kind in kinds for hook in vars(module)[kind].values()]


def test_the_hooks_of_each_probe_and_of_a_recorder_are_left_behind(tmp_path: Path) -> None:
    model = Toy()
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"probes": "all", "every": 1, "record": sl.Recorder(loss_of), "tracker": None}
    with sl.watch(model, out=tmp_path / "run", optimizer=optimizer, **options) as watcher:
        for t in range(2):
            content = watcher.batch(batch(t))
            loss = loss_of(model, content)
            assert hooks(model)
            assert all(isinstance(hook, copied.Copied) for hook in hooks(model))
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert all(hook(None, (), {}, 1) is None for hook in hooks(other))
                assert "stabilitylab" not in str([hook.__module__ for hook in hooks(other)])
                assert torch.equal(loss_of(other, content), loss)
            loss.backward()
            watcher.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()


def test_a_copy_of_a_watched_model_is_compiled_without_a_break() -> None:
    model = plain()
    with Watcher(model, ListSink(), every=1, reference=None):
        other = copy.deepcopy(model)
    assert hooks(other)
    x = torch.randn(3, 8)
    assert torch.equal(torch.compile(other, backend="eager", fullgraph=True)(x), model(x))


def test_models_that_older_versions_saved_are_loaded() -> None:
    assert copied._nothing_kept()(None, (), {}, 1) is None
