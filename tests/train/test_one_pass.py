"""``train.one_pass``: AdamW that measures while it updates: its kernel against torch, its tables against others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from rest_slow import long
from tape import Tape
from torch import Tensor, nn

from stabilitylab.config import parse_set, resolve
from stabilitylab.errors import UsageError
from stabilitylab.store import Run, RunWriter
from stabilitylab.train import plan
from stabilitylab.train.adamw import LeanAdamW
from stabilitylab.train.fast import one_pass
from stabilitylab.train.fast.one_pass import OnePassAdamW, has_kernel
from stabilitylab.train.loop import Trainer

INTERPRETED = has_kernel() and os.environ.get("TRITON_INTERPRET") == "1"
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-3, "weight_decay": 0.1}


def tensors() -> list[nn.Parameter]:
    """Of several chunks, of less than a block, of one entry, and one that gets no gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((90, 400), (7, 3), (1,), (5, 5))
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(1 + step)
    for parameter in parameters[:3]:
        parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=generator)


def pieces(parameters: list[nn.Parameter]) -> list[one_pass.Piece]:
    return [(parameters[0], slice(0, 30)), (parameters[0], slice(30, 90)), *((each, None) for each in parameters[1:])]


def trained(kind: type[Any], steps: int = 3, force: bool = False) -> tuple[list[nn.Parameter], Any, list[Tensor]]:
    parameters = tensors()
    optimizer = kind(parameters, **SETTINGS)
    found = []
    for step in range(steps):
        give_gradients(parameters, step)
        if isinstance(optimizer, OnePassAdamW):
            optimizer.force = force
            optimizer.measure(pieces(parameters))
            assert optimizer.measured() is None
        optimizer.step()
        if isinstance(optimizer, OnePassAdamW):
            sums = optimizer.measured()
            assert sums is not None
            found.append(sums)
    return parameters, optimizer, found


def by_hand(steps: int) -> list[Tensor]:
    parameters = tensors()
    optimizer = LeanAdamW(parameters, **SETTINGS)
    found = []
    for step in range(steps):
        give_gradients(parameters, step)
        old = [parameter.detach().double().clone() for parameter in parameters]
        before = [parameter.detach().clone() for parameter in parameters]
        optimizer.step()
        rows = []
        for number, (parameter, part) in enumerate(pieces(parameters)):
            index, part = max(0, number - 1), part or slice(None)
            if parameter.grad is None:
                rows.append(torch.zeros(4, dtype=torch.float64))
                continue
            g = parameter.grad[part].double()
            moved = (parameter.detach() - before[index])[part].double()
            numbers = g.square().sum(), old[index][part].square().sum(), moved.square().sum(), (g.abs() < 1e-3).sum()
            rows.append(torch.stack([each.double() for each in numbers]))
        found.append(torch.stack(rows))
    return found


def test_around_a_step_the_update_is_adamws_and_the_sums_are_these() -> None:
    plain, _, _ = trained(LeanAdamW)
    parameters, _, found = trained(OnePassAdamW)
    assert all(map(torch.equal, plain, parameters))
    for sums, own in zip(found, by_hand(3), strict=True):
        torch.testing.assert_close(sums, own, rtol=1e-12, atol=0)
    assert 0 < found[0][0, 3] < 30 * 400


def test_pieces_cover_each_parameter_once() -> None:
    parameters = tensors()
    optimizer = OnePassAdamW(parameters, **SETTINGS)
    give_gradients(parameters, 0)
    lists = optimizer._gathered(optimizer.param_groups[0], (True, True, True, False))
    chunks = one_pass._chunks(pieces(parameters), lists)
    assert int(chunks.entries.sum()) == 36_000 + 21 + 1
    assert int(chunks.entries.max()) <= one_pass.CHUNK
    assert chunks.of_piece.tolist() == [0, 1, 1, 2, 3]
    assert chunks.start.tolist() == [0, 12_000, 12_000 + one_pass.CHUNK, 0, 0]
    with pytest.raises(ValueError, match="cover each parameter once"):
        one_pass._chunks(pieces(parameters)[1:], lists)


def test_the_kernel_against_torch() -> None:
    if not INTERPRETED:
        pytest.skip("the kernel is run by Triton's interpreter: install triton, and set TRITON_INTERPRET=1")
    plain, torchs, _ = trained(LeanAdamW, steps=5)
    parameters, own, found = trained(OnePassAdamW, steps=5, force=True)
    for a, b in zip(plain, parameters, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-6, atol=1e-7)
        for name in torchs.state[a]:
            torch.testing.assert_close(own.state[b][name], torchs.state[a][name], rtol=2e-6, atol=2e-10)
    for sums, other in zip(found, by_hand(5), strict=True):
        torch.testing.assert_close(sums[:, (0, 3)], other[:, (0, 3)], rtol=1e-12, atol=0)
        torch.testing.assert_close(sums[:, 1:3], other[:, 1:3], rtol=1e-4, atol=0)  # of weights that round otherwise
    asked, _, _ = trained(OnePassAdamW, steps=5, force=True)
    silent = tensors()
    optimizer = OnePassAdamW(silent, **SETTINGS)
    optimizer.force = True
    for step in range(5):
        give_gradients(silent, step)
        optimizer.step()
    assert all(map(torch.equal, asked, silent))  # whoever asks


COMMON = (
    "data.sentences=4 data.held_out=6 data.max_length=12 model.d_model=16 model.d_ffn=32 train.steps=12 train.warmup=4 "
    "train.lr=1e-3 train.eps=1e-4 probes.every=3 probes.update_every=5"
)
ON = "train.one_pass=true"


def fit(folder: Path, *settings: str, recorder: Any = None) -> Trainer:
    prepared = plan(resolve(parse_set([*COMMON.split(), *settings]), depth=4))
    writer = RunWriter.create(folder, {"config": prepared.config.model_dump(mode="json")})
    made = Trainer(prepared.config, prepared.dataset, writer, prepared.device, recorder=recorder)
    made.fit(lambda: False, lambda report: None)
    made.watcher.close()
    return made


def close(first: Trainer, second: Trainer, clocks: tuple[str, ...] = ("tokens_per_second", "memory_bytes")) -> None:
    """The same weights bit for bit, tables and metrics but for the order of sums in float64."""
    one, two = Run.open(first.run.path), Run.open(second.run.path)
    assert one.tables == two.tables
    for name in one.tables:
        pd.testing.assert_frame_equal(one.frame(name), two.frame(name), rtol=1e-10, atol=0)
    frames = [run.metrics.drop(columns=list(clocks)) for run in (one, two)]
    pd.testing.assert_frame_equal(*frames, check_like=True, rtol=1e-10, atol=0)
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))
    assert first.judging.evaluations == second.judging.evaluations


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("probes.names=['grad_norm']", "train.accumulate=2"),
        long("probes.names=['all']", "probes.every=1"),
        long("probes.names=['update_ratio']"),
        long("probes.names=['ln_input']"),
        long("probes.names=['standard']", "model.arch=admin"),
    ],
    ids=lambda settings: " ".join(settings) or "defaults",
)
def test_a_run_has_the_tables_and_weights_that_it_has_without(settings: tuple[str, ...], tmp_path: Path) -> None:
    plain, own = fit(tmp_path / "plain", *settings), fit(tmp_path / "own", ON, *settings)
    close(plain, own)
    assert Run.open(own.run.path).metrics["grad_norm_total"].notna()[:-1].all()


@pytest.mark.slow
def test_recorded_and_replayed(tmp_path: Path) -> None:
    direct, replayed = fit(tmp_path / "direct", recorder=Tape()), fit(tmp_path / "replayed", ON, recorder=Tape())
    close(direct, replayed)


@pytest.mark.slow
def test_it_keeps_no_copy_of_the_weights(tmp_path: Path) -> None:
    own = fit(tmp_path / "own", ON)
    (board,) = (board for board in own.watcher._watched.boards if board.table.name == "update_ratio")
    assert not board.probe._theta


def test_a_loss_that_is_not_finite_is_seen(tmp_path: Path) -> None:
    """By the norm of the gradient, which comes with the step."""
    bad = "train.lr=1e30", "train.warmup=0", "train.steps=4"
    plain, own = fit(tmp_path / "plain", *bad), fit(tmp_path / "own", ON, *bad)
    assert plain.judging.non_finite is not None
    assert own.judging.non_finite == plain.judging.non_finite


@pytest.mark.parametrize("other", ["train.clip_norm=1", "train.optimizer=radam", "train.parallel=ddp"])
def test_what_it_does_not_go_with(other: str) -> None:
    with pytest.raises(UsageError, match=r"train\.one_pass needs train\.optimizer = 'adamw'"):
        resolve(parse_set([ON, other]), depth=2)
