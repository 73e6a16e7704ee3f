"""What docs/own-arch.md shows runs as it stands: a scheme with two streams, by following the page alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stabilitylab.arch_notes import note
from stabilitylab.errors import UsageError
from stabilitylab.models import ARCHS, Residual, build_model
from stabilitylab.store import Run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own-arch.md").read_text(encoding="utf-8")
(SCHEME,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
G = 0.2


def norm(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def test_the_scheme_is_its_formula() -> None:
    with ARCHS.restored():
        exec(compile(SCHEME, "docs/own-arch.md", "exec"), {"__name__": "my_arch"})
        torch.manual_seed(0)
        settings = {"d_model": 16, "d_ffn": 32, "heads": 2, "source_vocab": 11, "target_vocab": 11}
        model = build_model(arch="echo", depth=6, options={"g": G}, dropout=0.0, **settings).double().eval()
        seen: list[tuple[np.ndarray, np.ndarray]] = []  # of each sub-layer of the encoder: its x and its F
        encoder: Any = model.encoder
        for residual in model.residuals():
            if residual.place.stack == "encoder":
                residual.branch.register_forward_hook(lambda _, given, out: seen.append(out.detach().numpy()))
        ends: list[np.ndarray] = []
        encoder.register_forward_hook(lambda *given: ends.append(given[-1].detach().numpy()))
        entering: list[np.ndarray] = []
        first = next(model.residuals())
        first.register_forward_pre_hook(lambda _, given: entering.append(given[0][0].detach().numpy()))
        tokens = torch.randint(5, 11, (2, 7))
        model(source=tokens, target=tokens)
        x, beside = entering[0], np.zeros_like(entering[0])
        for branch in seen:
            x, beside = norm(x + branch), (1 - G) * beside + G * branch
        np.testing.assert_allclose(ends[0], x + norm(beside), atol=1e-10)
        assert len(seen) == 2 * 3


def test_a_restored_registry_has_no_note_of_the_scheme() -> None:
    with ARCHS.restored():
        exec(compile(SCHEME, "docs/own-arch.md", "exec"), {"__name__": "my_arch"})
        own = note("echo")
        assert own is not None
        assert own.look == ("#7B3294", "d")
    assert note("echo") is None


def test_a_marker_without_a_shape_is_refused_by_name() -> None:
    with ARCHS.restored(), pytest.raises(UsageError, match=r"architecture 'echo': marker '8' is none of o v \^"):
        exec(compile(SCHEME.replace('marker="d"', 'marker="8"'), "docs/own-arch.md", "exec"), {"__name__": "my_arch"})
    assert note("echo") is None


def test_the_page_names_what_an_architecture_may_say() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE.split("## What there is to say")[1], re.MULTILINE)
    named = {name.split("(")[0] for row in rows for name in re.findall(r"`([^`]+)`", row)} - {"Residual"}
    assert [name for name in named if not hasattr(Residual, name)] == []
    public = {name for name in vars(Residual) if not name.startswith("_")} - {"learns"}
    assert public - named == set(), "docs/own-arch.md leaves out a question that an architecture may answer"


@pytest.mark.slow
def test_it_trains_and_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "my_arch.py").write_text(SCHEME, encoding="utf-8")
    small = ("data.sentences=4", "data.held_out=6", "data.validation=40", "arch.g=0.2")
    words = ("--plugin", "my_arch", "probe", "--arch", "echo", "--depth", "4", "--steps", "4", "--quiet", "--set")
    command = [sys.executable, "-m", "stabilitylab", *words, *" --set ".join(small).split()]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    run = Run.open(tmp_path / ended.stdout.strip())
    assert run.frame("grad_norm")["value"].gt(0).all()
    assert len(run.frame("cosine_similarity", by="layer").query("step == 0")) == 4
