"""``train.compile``: the layers of the reference Transformer compiled, one compilation for all of a kind.

A compiled run is not the run of eager code bit for bit: sums are taken in another order, and dropout draws otherwise.
What is the same bit for bit: a compiled run with and without probes, interrupted and not, recorded and not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rest_slow import SOME_ARCHS, long, rare, rest_slow
from tape import Tape
from torch._dynamo.utils import counters

from stabilitylab.config import parse_set, resolve
from stabilitylab.errors import ResourceError, UsageError
from stabilitylab.models import ARCHS
from stabilitylab.models.archs.postln import PostLN
from stabilitylab.store import Run, RunWriter
from stabilitylab.train import checkpoint, plan
from stabilitylab.train.fast import compiling
from stabilitylab.train.fast.compiling import is_compiled
from stabilitylab.train.fast.graph_replays import Replays, shapes_of
from stabilitylab.train.fast.micro_replays import ReplaysApart
from stabilitylab.train.loop import Trainer
from stabilitylab.train.ranks import Team

pytestmark = [
    pytest.mark.two_runs,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # from torch._dynamo
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from inside torch._inductor
]
CLOCKS = ["tokens_per_second", "memory_bytes"]
COMMON = (
    "data.sentences=4 data.held_out=6 data.max_length=12 data.validation=40 model.d_model=16 model.d_ffn=32 model.T=10 "
    "train.steps=8 train.warmup=3 train.lr=1e-3 train.evaluations=4 probes.every=3 probes.update_every=5"
)
ON = "train.compile=on"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traces as inductor's runs do, and writes no C++."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def trainer(folder: Path, *settings: str, depth: int = 4, recorder: Any = None, state: Any = None) -> Trainer:
    prepared = plan(resolve(parse_set([*COMMON.split(), *settings]), depth=depth))
    if state is None:
        writer = RunWriter.create(folder, {"config": prepared.config.model_dump(mode="json")})
    else:
        writer = RunWriter.resume(folder, part=state["part"], manifest={})
    given = prepared.config, prepared.dataset, writer, prepared.device
    made = Trainer(*given, state, recorder=recorder, compiled=prepared.compiled)
    if recorder is None:  # the rate as a recorded run has it
        for group in made.optimizer.param_groups:
            group["lr"] = torch.zeros(())
    return made


def fit(folder: Path, *settings: str, **others: Any) -> Trainer:
    made = trainer(folder, *settings, **others)
    made.fit(lambda: False, lambda report: None)
    made.watcher.close()
    return made


def weights_equal(first: Trainer, second: Trainer) -> bool:
    return all(map(torch.equal, first.model.parameters(), second.model.parameters()))


def same(first: Trainer, second: Trainer) -> None:
    """Bit for bit."""
    one, two = Run.open(first.run.path), Run.open(second.run.path)
    assert one.tables == two.tables
    for name in one.tables:
        assert len(one.frame(name))
        pd.testing.assert_frame_equal(one.frame(name), two.frame(name), check_exact=True)
    pd.testing.assert_frame_equal(
        *(run.metrics.drop(columns=CLOCKS) for run in (one, two)), check_like=True, check_exact=True
    )
    assert weights_equal(first, second)


def close(eager: Trainer, compiled: Trainer, loss: float = 1e-5, row: float = 1e-4) -> None:
    """Losses of all rows within ``loss``, relatively; the tables of row 0, of equal weights, within ``row``; parameters
    within what AdamW makes of rounding: some of a rate each step, where a gradient is all but 0."""
    one, two = Run.open(eager.run.path), Run.open(compiled.run.path)
    assert one.tables == two.tables
    np.testing.assert_allclose(two.metrics["loss"].dropna(), one.metrics["loss"].dropna(), rtol=loss)
    for name in set(one.tables) - {"attention_heads"}:  # which names what is compiled, and has no number of it
        frames = [run.frame(name).query("step == 0") for run in (one, two)]
        for column in frames[0].columns[1:]:
            a, b = (frame[column] for frame in frames)
            if a.dtype.kind != "f":
                assert a.equals(b)
            elif "p99" not in column:  # a token on the border of a bin moves a quantile by 4 %
                assert (np.isfinite(a) == np.isfinite(b)).all()
                noise = 1e-7 * a[np.isfinite(a)].abs().max()
                np.testing.assert_allclose(b, a, rtol=row, atol=noise, err_msg=f"{name}.{column}")
    moved = sum(eager.rate(t) for t in range(8))
    for a, b in zip(eager.model.parameters(), compiled.model.parameters(), strict=True):
        assert float((a - b).detach().abs().max()) < 0.2 * moved


@pytest.mark.slow
@pytest.mark.parametrize("arch", rest_slow(sorted(ARCHS), {"branchnorm"}, SOME_ARCHS))
def test_the_run_is_that_of_eager_code_to_rounding_and_that_without_probes_bit_for_bit(
    arch: str, tmp_path: Path
) -> None:
    settings = f"model.arch={arch}", "data.max_length=6"
    eager = fit(tmp_path / "eager", *settings)
    compiled = fit(tmp_path / "compiled", *settings, ON)
    graphs, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    close(eager, compiled)
    kinds = 4 if arch == "resi-dual" else 2  # the first layer's two streams are one tensor
    assert (graphs, breaks) == (kinds * shapes_of(compiled.dataset), {})
    counters.clear()
    bare = fit(tmp_path / "bare", *settings, ON, "probes.names=['none']")
    assert counters["stats"]["unique_graphs"] == graphs
    assert weights_equal(compiled, bare)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("train.activation_checkpointing=true", "model.dropout=0.1"),
        long("model.stack=decoder", "model.qk_norm=true", "model.norm=rmsnorm"),
        long("model.dropout=0.1", "model.attention_dropout=0.1", "model.activation_dropout=0.1", "train.accumulate=2"),
        long("train.precision=bf16", "train.working_weights=true"),
        rare("train.precision=bf16", "train.clip_norm=0.5", "model.tie=none"),
        rare("model.stack=encoder", "train.optimizer=radam"),
    ],
    ids=lambda settings: " ".join(settings),
)
def test_whatever_the_settings(settings: tuple[str, ...], tmp_path: Path) -> None:
    settings = "data.max_length=6", *settings
    every = ("probes.names=['all']", "probes.every=1", "probes.update_every=1")
    watched = fit(tmp_path / "watched", ON, *settings, *every)
    bare = fit(tmp_path / "bare", ON, *settings, "probes.names=['none']")
    assert weights_equal(watched, bare)
    if not any("dropout" in setting for setting in settings):  # which inductor draws otherwise; aot_eager does not
        eager = fit(tmp_path / "eager", *settings, *every)
        short = any("bf16" in setting for setting in settings)
        close(eager, watched, loss=2e-2 if short else 1e-5, row=0.2 if short else 2e-4)
    table = Run.open(watched.run.path).frame("activation_grad_norm")
    assert (table["value"] > 0).all()


@pytest.mark.slow
def test_deep_models_compile_what_shallow_ones_do_while_alpha_grows(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", ON, "train.steps=10", depth=24)
    seen = []
    for _ in range(10):
        made.update()
        made.row += 1
        seen.append((counters["stats"]["unique_graphs"], float(made.model.schedule.alpha)))
    made.watcher.close()
    assert len({alpha for _, alpha in seen}) == 10
    assert seen[-1][0] == 2 * shapes_of(made.dataset)
    assert not counters["graph_break"]


@pytest.mark.slow
def test_a_run_that_was_interrupted(tmp_path: Path) -> None:
    settings = ON, "train.checkpoint_every=5", "model.dropout=0.1", "data.max_length=6"
    whole = fit(tmp_path / "whole", *settings)
    seen: list[int] = []
    broken = trainer(tmp_path / "broken", *settings)
    assert broken.fit(lambda: len(seen) >= 7, lambda report: seen.append(report.row)) is None  # at a plain row
    broken.watcher.close()
    rest = trainer(tmp_path / "broken", *settings, state=checkpoint.load(broken.run.path / "checkpoints", whole.device))
    rest.fit(lambda: False, lambda report: None)
    rest.watcher.close()
    same(whole, rest)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", rest_slow([1, 4], [4], ()))
def test_recorded_too(accumulate: int, tmp_path: Path) -> None:
    """The first update of each shape compiles and runs directly; what is recorded is the compiled code."""
    many = f"train.accumulate={accumulate}", "train.steps=12"
    direct = fit(tmp_path / "direct", ON, *many)
    graphs = counters["stats"]["unique_graphs"]
    counters.clear()
    tape = Tape()
    recorded = fit(tmp_path / "recorded", ON, *many, recorder=tape)
    same(direct, recorded)
    assert counters["stats"]["unique_graphs"] == graphs
    assert isinstance(recorded.apply, ReplaysApart if accumulate > 1 else Replays)
    assert tape.replayed > 12


def test_who_compiles(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def asked(value: str, device: str = "cpu", kind: Any = "none") -> bool:
        config = resolve(parse_set([f"train.compile={value}", f"train.parallel={kind}"]), depth=4)
        return is_compiled(config, torch.device(device), Team(kind, 0, 1 if kind == "none" else 2))

    assert asked("on")
    assert asked("on", "cuda")
    assert not any(asked(value, device) for value in ("auto", "off") for device in ("cpu", "cuda"))
    monkeypatch.setattr(compiling, "COMPILED_BY_DEFAULT", True)  # as a GPU's numbers may have it one day
    assert asked("auto", "cuda")
    assert not asked("auto", "cpu")
    assert not asked("auto", "cuda", "ddp")
    with pytest.raises(UsageError, match="--compile on: --parallel fsdp spreads layers that are not compiled"):
        asked("on", "cuda", "fsdp")
    assert not caplog.messages
    monkeypatch.setattr(compiling, "_missing", lambda device: "Triton")
    with pytest.raises(ResourceError, match="--compile on needs Triton: install it, or leave --compile at auto"):
        asked("on", "cuda")
    assert not asked("auto", "cuda")
    assert caplog.messages == ["layers are not compiled: that needs Triton."]


def test_an_architecture_that_cannot_be_compiled_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: PostLN, x: torch.Tensor, *context: torch.Tensor | None) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    monkeypatch.setattr(PostLN, "forward", forward)
    made = trainer(tmp_path / "run", ON, "model.arch=postln")
    with pytest.raises(UsageError, match=r"--compile on: these layers cannot be compiled \(.+\): use --compile off\."):
        made.update()
    made.watcher.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # of a C++ compiler
def test_the_same_holds_under_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "BACKEND", "inductor")
    settings = "model.stack=decoder", "data.max_length=6", "data.validation=0"
    eager = fit(tmp_path / "eager", *settings, depth=3)
    compiled = fit(tmp_path / "compiled", *settings, ON, depth=3)
    bare = fit(tmp_path / "bare", *settings, ON, "probes.names=['none']", depth=3)
    close(eager, compiled, row=1e-3)
    assert weights_equal(compiled, bare)
    assert Run.open(compiled.run.path).config["train"]["compile"] == "on"
