"""Replayed updates equal direct ones: losses, parameters and every table, bit for bit where the kernels allow it.

On a CPU a tape stands for CUDA graphs (tape.py); the same tests run with CUDA graphs where there is a GPU.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from rest_slow import SOME_ARCHS, long, rare, rest_slow
from tape import Refused, Tape
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stabilitylab.config import parse_set, resolve
from stabilitylab.errors import ResourceError, UsageError
from stabilitylab.models import ARCHS
from stabilitylab.probes import CudaGraphs, Watcher
from stabilitylab.probes.library.gradients import GradNorm
from stabilitylab.store import Run, RunWriter
from stabilitylab.train import checkpoint, plan
from stabilitylab.train.fast.graph_replays import MOST, Replays, kinds, recorder_for, shapes_of, some_run_directly
from stabilitylab.train.fast.micro_replays import ReplaysApart
from stabilitylab.train.fast.pass_replays import ReplayedPass
from stabilitylab.train.loop import Trainer
from stabilitylab.train.ranks import Team

pytestmark = pytest.mark.two_runs

CLOCKS = ["tokens_per_second", "memory_bytes"]
COMMON = (
    "model.T=20 train.warmup=10 train.lr=1e-3 train.evaluations=9 probes.every=3 probes.update_every=7 "
    "data.sentences=4 data.held_out=6 model.d_model=16 model.d_ffn=32 data.max_length=12"
)


@dataclass
class Machine:
    """Where updates run, and what records them there."""

    device: torch.device
    recorder: Callable[[], Any]
    exact: bool  # do the same kernels on the same numbers give the same bits?
    steps: int

    def trainer(self, folder: Path, *settings: str, recorder: Any = None, depth: int = 4) -> Trainer:
        own = [f"train.device={self.device.type}", f"train.steps={self.steps}"]
        own += [] if self.exact else ["train.attention=math"]  # the fused kernels add up dq in no fixed order
        config = resolve(parse_set([*COMMON.split(), *own, *settings]), depth=depth)
        prepared = plan(config)
        facts = {"config": config.model_dump(mode="json")}
        writer = RunWriter.create(folder, facts)
        trainer = Trainer(prepared.config, prepared.dataset, writer, prepared.device, recorder=recorder)
        if recorder is None:  # the rate as a float32 tensor too: a float64 of the host is another number
            for group in trainer.optimizer.param_groups:
                group["lr"] = torch.zeros((), device=self.device)
        return trainer

    def fit(self, folder: Path, *settings: str, recorder: Any = None, **others: Any) -> Trainer:
        trainer = self.trainer(folder, *settings, recorder=recorder, **others)
        trainer.fit(lambda: False, lambda report: None)
        trainer.watcher.close()
        return trainer


ON_CPU = Machine(torch.device("cpu"), Tape, exact=True, steps=26)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    if request.param == "cpu":
        yield ON_CPU
        return
    device = torch.device("cuda")
    yield Machine(device, lambda: CudaGraphs(device), exact=False, steps=50)


@pytest.fixture(scope="module")
def directly(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trainer]:
    """Run without a recorder; each run is made once for all tests that compare with it."""
    made: dict[Any, Trainer] = {}

    def run(machine: Machine, *settings: str) -> Trainer:
        key = machine.device.type, settings
        if key not in made:
            made[key] = machine.fit(tmp_path_factory.mktemp("direct") / "run", *settings)
        return made[key]

    return run


def same(machine: Machine, first: Trainer, second: Trainer) -> None:
    one, two = Run.open(first.run.path), Run.open(second.run.path)
    assert one.tables == two.tables
    exactly: dict[str, Any] = {"check_exact": True} if machine.exact else {"rtol": 1e-4, "atol": 1e-6}
    for name in one.tables:
        assert len(one.frame(name))
        frames = [run.frame(name) for run in (one, two)]
        if not machine.exact:  # a token on the border of a bin moves a quantile by 4 %
            frames = [frame.drop(columns=[column for column in frame if "p99" in column]) for frame in frames]
        pd.testing.assert_frame_equal(*frames, **exactly)
    metrics = [run.metrics.drop(columns=CLOCKS) for run in (one, two)]
    pd.testing.assert_frame_equal(*metrics, check_like=True, **exactly)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, **({"rtol": 0, "atol": 0} if machine.exact else {"rtol": 1e-3, "atol": 1e-5}))


@pytest.mark.slow
@pytest.mark.parametrize("arch", rest_slow(sorted(ARCHS), {"branchnorm"}, SOME_ARCHS))
def test_a_replayed_run_is_the_run(machine: Machine, arch: str, tmp_path: Path) -> None:
    recorder = machine.recorder()
    direct = machine.fit(tmp_path / "direct", f"model.arch={arch}")
    replayed = machine.fit(tmp_path / "replayed", f"model.arch={arch}", recorder=recorder)
    same(machine, direct, replayed)
    assert isinstance(replayed.apply, Replays)
    shapes = {key[1:] for key in replayed.apply.recorded}
    assert len(replayed.apply.recorded) == 2 * len(shapes)  # probed and plain
    if isinstance(recorder, Tape):
        # and the held-out pass with and without tables, and the source's; what came before the largest is made anew
        assert len(shapes) == 2
        assert recorder.recorded - 3 - len(replayed.apply.recorded) <= 2
        assert recorder.warmed == 4  # the first update, and these three
        assert recorder.replayed > 0.8 * machine.steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("train.clip_norm=0.5", "model.growth=sigmoid", "train.activation_checkpointing=true"),
        long("model.stack=decoder", "model.dropout=0.1"),
        rare("probes.names=['none']"),
        rare("model.dropout=0.1", "model.attention_dropout=0.1", "model.activation_dropout=0.1"),
        rare("train.precision=bf16"),
        rare("train.accumulate=2"),
        long("train.precision=bf16", "train.accumulate=2", "model.dropout=0.1", "model.tie=none"),
        long("model.stack=encoder"),
        long("probes.names=['all']", "probes.every=1", "probes.update_every=1"),
        rare("probes.names=['standard']", "probes.every=1"),
    ],
    ids=lambda settings: " ".join(settings),
)
def test_whatever_the_settings(machine: Machine, settings: tuple[str, ...], tmp_path: Path) -> None:
    direct = machine.fit(tmp_path / "direct", *settings)
    replayed = machine.fit(tmp_path / "replayed", *settings, recorder=machine.recorder())
    same(machine, direct, replayed)
    assert isinstance(replayed.apply, Replays)
    assert replayed.apply.recorded


@pytest.mark.slow
def test_alpha_and_the_rate_change_inside(machine: Machine, directly: Any, tmp_path: Path) -> None:
    """Against a replay in which they are frozen: then the run is another one."""
    direct = directly(machine)
    frozen = machine.trainer(tmp_path / "frozen", recorder=machine.recorder())
    assert frozen.model.schedule is not None
    start = frozen.model.schedule.at(0)
    frozen.model.schedule.at = lambda row: start  # type: ignore[method-assign]
    frozen.fit(lambda: False, lambda report: None)
    losses = [Run.open(trainer.run.path).metrics["loss"].to_numpy() for trainer in (direct, frozen)]
    assert abs(losses[0][1 : machine.steps] - losses[1][1 : machine.steps]).min() > 0
    metrics = Run.open(direct.run.path).metrics
    assert metrics["alpha"].iloc[: machine.steps].nunique() == 20
    assert metrics["lr"].iloc[: machine.steps].nunique() > 0.8 * machine.steps
    replayed = machine.fit(tmp_path / "replayed", recorder=machine.recorder())
    moved = Run.open(replayed.run.path).frame("update_ratio").groupby("step")["rms"].mean()
    assert moved.loc[9] > 5 * moved.loc[0]  # the warm-up's rates, in what the optimizer did


@pytest.mark.slow
def test_a_run_that_is_resumed_from_a_replayed_one(machine: Machine, tmp_path: Path) -> None:
    settings = ("model.dropout=0.1", "train.checkpoint_every=10")
    whole = machine.fit(tmp_path / "whole", *settings, recorder=machine.recorder())
    seen: list[int] = []
    broken = machine.trainer(tmp_path / "broken", *settings, recorder=machine.recorder())
    assert broken.fit(lambda: len(seen) >= 13, lambda report: seen.append(report.row)) is None
    broken.watcher.close()
    state = checkpoint.load(broken.run.path / "checkpoints", machine.device)
    writer = RunWriter.resume(broken.run.path, part=state["part"], manifest={})
    recorder = machine.recorder()
    rest = Trainer(broken.config, broken.dataset, writer, machine.device, state, recorder=recorder)
    rest.fit(lambda: False, lambda report: None)
    rest.watcher.close()
    same(machine, whole, rest)
    if isinstance(recorder, Tape):
        # row 13, which is plain, the first probed one, two kinds of held-out pass, and the source's
        assert recorder.warmed == 5


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_synchronisation_between_probed_updates(tmp_path: Path) -> None:
    device = torch.device("cuda")
    machine = Machine(device, lambda: CudaGraphs(device), exact=False, steps=50)
    trainer = machine.trainer(tmp_path / "run", "probes.every=1", "probes.update_every=10", recorder=CudaGraphs(device))
    for row in range(40):
        strict = row >= 24  # by then every shape is recorded, and both kinds of held-out pass
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            trainer.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        trainer.row += 1
    trainer.watcher.finish()
    trainer.watcher.close()
    assert len(Run.open(trainer.run.path).metrics) == 41


@pytest.mark.slow
def test_a_read_by_the_host_is_refused_and_the_run_goes_on(
    directly: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A probe that looks at a number of the device: the recording notices, and updates run directly."""
    direct = directly(ON_CPU)
    collect = GradNorm.collect

    def looking(self: GradNorm, parameters: Any) -> Any:
        found = collect(self, parameters)
        assert float(found.columns["value"].sum()) >= 0
        return found

    monkeypatch.setattr(GradNorm, "collect", looking)
    replayed = ON_CPU.fit(tmp_path / "replayed", recorder=Tape())
    same(ON_CPU, direct, replayed)
    assert isinstance(replayed.apply, Replays)
    assert not replayed.apply.recorded  # what was recorded before gives its memory back
    assert "CUDA graphs are off: this update cannot be recorded (aten::_local_scalar_dense" in caplog.text
    strict = ON_CPU.trainer(tmp_path / "on")
    strict.apply = Replays(strict, strict.device, Tape(), strict.watcher, required=True)
    with pytest.raises(ResourceError, match="cannot be recorded as a CUDA graph"):
        strict.fit(lambda: False, lambda report: None)


class Allocator(Tape):
    """Counts bytes as CUDA's allocator does: what ran directly stays held for what runs directly, until a capture
    begins; what was recorded stays held for recordings, each of which takes for each tensor the smallest piece of it
    that is free and large enough, or more."""

    def __init__(self) -> None:
        super().__init__()
        self.eager = self.peak = self.largest = 0
        self.held: list[int] = []
        self.order: list[int] = []

    def another(self) -> Tape:
        self.held = []  # what is forgotten is given back
        return self

    def warm_up(self, work: Callable[[], Any]) -> Any:
        with Allocated() as allocated:
            result = super().warm_up(work)
        self.eager = max(self.eager, allocated.bytes)
        self._note(allocated.bytes)
        return result

    def record(self, work: Callable[[], Any]) -> Any:
        self.eager = 0
        result = super().record(work)
        made, free = [whole.nbytes for whole in self._pool[-1].values()], sorted(self.held)
        for size in made:
            if (place := bisect_left(free, size)) < len(free):
                insort(free, free.pop(place) - size)
            else:
                self.held.append(size)
        self.order += [sum(made)] * torch.is_grad_enabled()
        self._note(sum(made))
        return result

    def _note(self, made: int) -> None:
        self.largest = max(self.largest, made)
        self.peak = max(self.peak, self.eager + sum(self.held))


class Allocated(TorchDispatchMode):
    """Bytes of all that operators gave."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.storages |= {storage._cdata: storage for storage in found}
        return result

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


@pytest.mark.slow
def test_an_update_is_never_held_twice(tmp_path: Path) -> None:
    """In whichever order shapes come; beside what is recorded runs the held-out pass alone, with and without tables."""
    firsts = set()
    for seed in range(4):
        allocator = Allocator()
        sets = ("probes.names=['none']", f"train.accumulate={1 + seed % 2}", f"data.seed={seed}")
        trainer = ON_CPU.fit(tmp_path / str(seed), *sets, recorder=allocator)
        assert isinstance(trainer.apply, Replays)
        assert len(trainer.apply.recorded) >= 2
        assert allocator.peak < 1.3 * allocator.largest
        firsts.add(allocator.order[0] == max(allocator.order))
    assert firsts == {True, False}  # the largest came first, or later


@pytest.mark.slow
@pytest.mark.parametrize("seed", rest_slow(range(3), [0]))
def test_what_micro_batches_work_in_is_held_once_where_they_are_recorded_apart(seed: int, tmp_path: Path) -> None:
    allocator = Allocator()
    sets = ("probes.names=['none']", "train.accumulate=4", f"data.seed={seed}")
    trainer = ON_CPU.fit(tmp_path / "run", *sets, recorder=allocator)
    assert isinstance(trainer.apply, ReplaysApart)
    assert len(trainer.apply.pieces) == 4
    assert max(allocator.order) < 0.5 * allocator.largest  # one of four, where the first update ran all of them
    assert allocator.peak == allocator.largest


@pytest.mark.slow
def test_what_cannot_be_recorded_at_once_is_recorded_the_next_time(
    directly: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Shy(Tape):
        """Its first call sets something up, as a library does that loads a kernel."""

        refused = 0

        def record(self, work: Callable[[], Any]) -> Any:
            if torch.is_grad_enabled() and not self.refused:  # an update, not a held-out pass
                self.refused += 1
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().record(work)

    shy = Shy()
    direct = directly(ON_CPU)
    replayed = ON_CPU.fit(tmp_path / "replayed", recorder=shy)
    same(ON_CPU, direct, replayed)
    assert isinstance(replayed.apply, Replays)
    assert (shy.refused, shy.warmed) == (1, 5)  # two updates, two kinds of held-out pass, and the source's
    assert replayed.apply.recorded
    assert "CUDA graphs are off" not in caplog.text


def test_the_tape_replays_operators_alone() -> None:
    x, factor, calls = torch.ones(3), torch.tensor(2.0), []

    def work() -> torch.Tensor:
        calls.append(1)
        x.mul_(factor)
        return x.view(3, 1).sum() + 1

    tape = Tape()
    result, replay = tape.record(work)
    assert x.tolist() == [1, 1, 1]  # undone
    replay()
    assert (x.tolist(), result.item()) == ([2, 2, 2], 7)
    factor.fill_(3)
    replay()
    assert (x.tolist(), result.item(), len(calls)) == ([6, 6, 6], 19, 1)
    with pytest.raises(Refused, match="_local_scalar_dense"):
        tape.record(lambda: bool(x.sum() > 0))
    with pytest.raises(Refused, match="lift_fresh"):
        tape.record(lambda: x + torch.tensor([1.0, 2.0, 3.0]))


def test_the_tape_spoils_what_lies_in_the_pool() -> None:
    """What a replay left is gone when one that was recorded before is replayed, as in memory that graphs share."""
    tape, x = Tape(), torch.ones(3)
    _, first = tape.record(lambda: x * 2)
    result, second = tape.record(lambda: x * 3)
    second()
    assert result.tolist() == [3, 3, 3]
    first()
    assert result.isnan().all()
    assert x.tolist() == [1, 1, 1]


@pytest.mark.slow
def test_more_shapes_than_are_recorded_run_directly(
    directly: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stabilitylab.train.fast.graph_replays.MOST", 1)
    direct = directly(ON_CPU)
    replayed = ON_CPU.fit(tmp_path / "replayed", recorder=Tape())
    same(ON_CPU, direct, replayed)
    assert isinstance(replayed.apply, Replays)
    assert len(replayed.apply.recorded) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("model.arch=branchnorm", "model.dropout=0.1", "train.clip_norm=0.5"),
        long("train.precision=bf16", "train.working_weights=true", "model.tie=none"),
        rare("probes.names=['all']", "probes.every=1", "probes.update_every=1"),
        long("probes.names=['none']", "train.activation_checkpointing=true"),
    ],
    ids=lambda settings: " ".join(settings),
)
def test_micro_batches_are_recorded_apart_where_combinations_of_shapes_are_too_many(
    machine: Machine, settings: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Four micro-batches in two shapes are 32 kinds of updates, probed and plain, and 8 of micro-batches."""
    many = ("train.accumulate=4", "train.evaluations=3", *settings)
    direct = machine.fit(tmp_path / "direct", *many)
    recorder = machine.recorder()
    apart = machine.fit(tmp_path / "apart", *many, recorder=recorder)
    assert isinstance(apart.apply, ReplaysApart)
    same(machine, direct, apart)
    shapes = {key[1] for key in apart.apply.pieces}
    assert len(shapes) == shapes_of(direct.dataset) == 2
    assert kinds(2, 4) == 32 > MOST
    assert len(apart.apply.pieces) <= 4 * len(shapes)  # probed or not, the last of an update or not
    assert {*apart.apply.changes} == {key[0] for key in apart.apply.pieces}
    assert not apart.apply.recorded
    assert "CUDA graphs are off" not in caplog.text
    assert all(p.grad is None for p in apart.model.parameters())


@pytest.mark.slow
def test_where_a_half_cannot_be_recorded_updates_run_directly(
    directly: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    many = ("train.accumulate=4", "train.steps=14")
    direct = directly(ON_CPU, *many)

    class Shy(Tape):
        """Records the first halves alone, and of them not the first."""

        asked = 0

        def record(self, work: Callable[[], Any]) -> Any:
            self.asked += torch.is_grad_enabled()
            if torch.is_grad_enabled() and (self.asked == 1 or self.asked == 5):
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().record(work)

    shy = ON_CPU.fit(tmp_path / "shy", *many, recorder=Shy())
    same(ON_CPU, direct, shy)
    assert isinstance(shy.apply, ReplaysApart)
    monkeypatch.setattr(Trainer, "change", reading(Trainer.change))
    refused = ON_CPU.fit(tmp_path / "refused", *many, recorder=Tape())
    same(ON_CPU, direct, refused)
    assert isinstance(refused.apply, ReplaysApart)
    assert not refused.apply.pieces
    assert "CUDA graphs are off: this update cannot be recorded (aten::_local_scalar_dense" in caplog.text


def reading(change: Callable[..., Any]) -> Callable[..., Any]:
    def looking(self: Trainer, loss: torch.Tensor, nll: torch.Tensor) -> Any:
        assert float(loss) > 0
        return change(self, loss, nll)

    return looking


@pytest.mark.slow
def test_from_the_17th_shape_on_updates_of_several_micro_batches_run_directly(
    directly: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = ("train.accumulate=4", "train.steps=14")
    direct = directly(ON_CPU, *many)
    monkeypatch.setattr("stabilitylab.train.fast.micro_replays.MOST", 1)
    replayed = ON_CPU.fit(tmp_path / "replayed", *many, recorder=Tape())
    same(ON_CPU, direct, replayed)
    assert isinstance(replayed.apply, ReplaysApart)
    assert len({key[1] for key in replayed.apply.pieces}) == 1
    assert some_run_directly(direct.dataset, 1) is (2 * shapes_of(direct.dataset) > MOST)
    assert not some_run_directly(direct.dataset, 4)


@pytest.mark.slow
def test_without_probes_of_the_training_pass_no_row_is_probed(tmp_path: Path) -> None:
    """Each kind of update is recorded once, not once as a probed one too."""
    trainer = ON_CPU.fit(tmp_path / "none", "probes.names=['none']", recorder=Tape())
    assert isinstance(trainer.apply, Replays)
    assert {key[0] for key in trainer.apply.recorded} == {False}
    held_out = ON_CPU.fit(tmp_path / "held-out", "probes.names=['cosine_similarity']", recorder=Tape())
    assert isinstance(held_out.apply, Replays)
    assert {key[0] for key in held_out.apply.recorded} == {False}
    assert not any(held_out.watcher.due(row) for row in range(30))
    assert Run.open(held_out.run.path).frame("cosine_similarity")["step"].unique().tolist() == [0, 7, 14, 21, 26]


@pytest.mark.slow
def test_a_pass_is_recorded_at_its_second_call(caplog: pytest.LogCaptureFixture) -> None:
    """Its numbers are its own: the next replay does not change them. What gives nothing, or waits, is not recorded."""
    weight, tape = torch.ones(3), Tape()
    counted = ReplayedPass("this pass", lambda: {"sum": weight.sum()}, tape)
    found = [counted()]
    for factor in (2.0, 3.0):
        weight.fill_(factor)
        found.append(counted())
    assert [float(each["sum"]) for each in found] == [3.0, 6.0, 9.0]
    assert (tape.warmed, tape.recorded, tape.replayed) == (1, 1, 2)
    nothing = ReplayedPass("this pass", dict, tape)
    assert [nothing() for _ in range(3)] == [{}, {}, {}]
    assert tape.recorded == 1
    assert not caplog.messages
    waiting = ReplayedPass("this pass", lambda: {"sum": torch.full((), float(weight.sum()))}, tape)
    assert [float(waiting()["sum"]) for _ in range(4)] == [9.0] * 4
    assert tape.recorded == 2
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("this pass is not replayed: it cannot be recorded (")


def test_who_gets_a_recorder(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(asked: str, device: str, kind: Any = "none", *sets: str) -> Any:
        config = resolve(parse_set([f"train.cuda_graphs={asked}", f"train.parallel={kind}", *sets]), depth=4)
        return recorder_for(config, torch.device(device), Team(kind, 0, 1 if kind == "none" else 2))

    monkeypatch.setattr("stabilitylab.train.fast.graph_replays.CudaGraphs", lambda device: ("graphs", device))
    assert chosen("auto", "cpu") is chosen("off", "cpu") is chosen("off", "cuda") is None
    assert chosen("on", "cuda") == ("graphs", torch.device("cuda"))
    assert chosen("auto", "cuda") == ("graphs", torch.device("cuda"))
    assert not caplog.messages
    with pytest.raises(ResourceError, match="on needs a CUDA device, and this run is on cpu: leave it at auto"):
        chosen("on", "cpu")
    assert chosen("auto", "cuda", "fsdp") is None
    assert caplog.messages == [
        "CUDA graphs are off: --parallel fsdp exchanges gradients while it computes them, which is not recorded."
    ]
    with pytest.raises(UsageError, match="puts the random state back by the host, which is not recorded"):
        chosen("on", "cuda", "none", "train.activation_checkpointing=true", "model.attention_dropout=0.1")
    caplog.clear()
    assert chosen("auto", "cuda", "none", "probes.record=true") is None
    assert caplog.messages == ["CUDA graphs are off: --record reads each update on the host, which is not recorded."]
    with pytest.raises(UsageError, match=r"--parallel ddp exchanges gradients .* leave it at auto, or off"):
        chosen("on", "cuda", "ddp")


@pytest.mark.parametrize("behind", rest_slow([0, 1], [1]))
def test_rows_are_told_once_each_in_order_and_before_a_checkpoint(behind: int, tmp_path: Path) -> None:
    trainer = ON_CPU.trainer(tmp_path / "run", "train.checkpoint_every=4", "train.evaluations=0")
    assert trainer.behind == 0  # 1 on a GPU
    trainer.behind, told = behind, []
    trainer.fit(lambda: len(told) >= 10, lambda report: told.append((report.row, trainer.row)))
    assert [row for row, _ in told] == list(range(trainer.row))
    assert trainer.row == 10 + behind
    assert all(now - row == behind for row, now in told)
    state = checkpoint.load(trainer.run.path / "checkpoints", trainer.device)
    assert state["row"] == trainer.row
    assert [e[0] for e in state["evaluations"]] == [row for row in range(trainer.row) if row % 7 == 0]


@pytest.mark.slow
def test_watching_by_replays_needs_an_open_watcher(tmp_path: Path) -> None:
    trainer = ON_CPU.fit(tmp_path / "run")
    assert isinstance(trainer.watcher, Watcher)
    with pytest.raises(UsageError, match="closed: make a new one"), trainer.watcher.recording():
        pass
