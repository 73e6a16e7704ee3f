"""What surrounds CUDA graphs, with stand-ins for the parts of torch.cuda that need a GPU."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from probe_toys import ListSink, Toy, batch
from rest_slow import rest_slow, slow

from stabilitylab.probes import CudaGraphs, Watcher
from stabilitylab.probes._engine.device_recorder import attempt, why
from stabilitylab.probes._engine.reference_pass import Replay
from stabilitylab.probes._engine.row import copied_over
from stabilitylab.probes.library.representations import Output

ENDS = "_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"  # of new and of old versions of torch


class Cuda:
    """The state that a capture changes, and what torch does to it; ``held``: bytes of each pool, "eager" the ordinary
    one, and by how many graphs each is used, as the caching allocator counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, end: str = ENDS[0]) -> None:
        self.stream, self.generator, self.pools, self.open = "main", "own", 0, set[int]()
        self.held: dict[Any, int] = {"eager": 0}
        self.users: dict[int, int] = {}
        one = SimpleNamespace(clone_state=lambda: "fresh", graphsafe_set_state=lambda g: setattr(self, "generator", g))
        stand_ins: dict[str, Any] = {
            "Stream": lambda device: SimpleNamespace(device=torch.device("cuda", 0)),
            "CUDAGraph": lambda: Graph(self),
            "empty_cache": self.empty_cache,
            "graph_pool_handle": self.handle,
            "current_stream": lambda device=None: self.stream,
            "set_stream": lambda stream: setattr(self, "stream", stream),
            "default_generators": [one],
            "graph": self.graph,
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)
        for name in ENDS:
            monkeypatch.delattr(torch._C, name, raising=False)
        monkeypatch.setattr(torch._C, end, self.end, raising=False)

    def handle(self) -> int:
        self.pools += 1
        return self.pools

    def allocate(self, size: int) -> None:
        """Something that is freed at once: its pool keeps it."""
        pool = next(iter(self.open), "eager")
        self.held[pool] = max(self.held.get(pool, 0), size)

    def end(self, place: int, pool: int) -> None:
        if pool not in self.open:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.open.remove(pool)

    def release(self, place: int, pool: int) -> None:
        self.users[pool] -= 1
        assert self.users[pool] >= 0

    def empty_cache(self) -> None:
        self.held = {pool: held for pool, held in self.held.items() if pool != "eager" and self.users[pool]}

    @contextmanager
    def graph(self, graph: Any, pool: int, stream: Any) -> Iterator[None]:
        """As torch does it: of what a failed capture has changed its end puts nothing back, and raises."""
        self.empty_cache()
        if pool in self.open:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.open.add(pool)
        self.users[pool] = self.users.get(pool, 0) + 1
        before, self.stream, self.generator = self.stream, stream, "counts for a graph"
        try:
            yield
        except RuntimeError:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture") from None
        self.open.remove(pool)
        self.stream, self.generator = before, "own"
        graph.used = pool


class Graph:
    """A CUDAGraph: one whose capture ended gives its pool back when it is destroyed."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda, self.used = cuda, None

    def replay(self) -> None: ...

    def pool(self) -> int:
        if self.used is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.used

    def __del__(self) -> None:
        if self.used is not None:
            self._cuda.release(0, self.used)


def fail() -> None:
    raise RuntimeError("operation not permitted when stream is capturing\nCompile with ...")


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", rest_slow(["_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"], ["_cuda_endAllocateToPool"])
)  # new and old torch
def test_a_failed_capture_leaves_nothing_behind(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, end)
    graphs = CudaGraphs(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="previous error during capture"):
        graphs.record(fail)
    assert (cuda.stream, cuda.generator, cuda.open) == ("main", "fresh", set())
    assert graphs.record(lambda: 7)[0] == 7
    assert (cuda.stream, cuda.generator, cuda.pools) == ("main", "own", 2)


@pytest.mark.slow
def test_a_failed_capture_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was recorded before keeps its own."""
    cuda = Cuda(monkeypatch)
    graphs = CudaGraphs(torch.device("cuda"))
    _, replay = graphs.record(lambda: cuda.allocate(30))

    def too_far() -> None:
        cuda.allocate(48)
        fail()

    assert attempt(graphs, too_far) == "operation not permitted when stream is capturing"
    assert cuda.held == {1: 48}  # of the first graph, which shares that pool
    assert cuda.users == {1: 1}
    other = graphs.another()  # on the same stream, in memory of its own
    _, kept = other.record(lambda: cuda.allocate(20))
    assert (cuda.held, other._stream) == ({1: 48, 3: 20}, graphs._stream)
    del kept, other
    torch.cuda.empty_cache()
    assert cuda.held == {1: 48}
    del replay
    assert attempt(graphs, too_far) == "operation not permitted when stream is capturing"
    assert cuda.held == {}
    assert set(cuda.users.values()) == {0}


@pytest.mark.slow
def test_a_capture_whose_graph_could_not_be_made_executable_is_given_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    graphs, whole = CudaGraphs(torch.device("cuda")), cuda.graph

    @contextmanager
    def graph(graph: Any, pool: int, stream: Any) -> Iterator[None]:
        with whole(graph, pool, stream):
            yield
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    assert attempt(graphs, lambda: None) == "CUDA error: operation not supported"
    assert cuda.users == {1: 0}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        slow(RuntimeError("CUDA error: out of memory")),
        slow(
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        ),
    ],
)
def test_a_lack_of_memory_inside_a_capture_is_one(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches the caller is the error of the capture's end, which says only that it failed."""
    cuda = Cuda(monkeypatch)

    def lack() -> None:
        raise error

    with pytest.raises(torch.OutOfMemoryError, match=r"while an update was recorded \(CUDA") as found:
        attempt(CudaGraphs(torch.device("cuda")), lack)
    assert "previous error" not in str(found.value)
    assert cuda.users == {1: 0}


@pytest.mark.slow
def test_the_dead_are_buried_before_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch)
    buried: list[str] = []

    class Dead:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            buried.append("a graph")

    gc.disable()
    try:
        Dead()
        assert CudaGraphs(torch.device("cuda")).record(lambda: list(buried))[0] == ["a graph"]
    finally:
        gc.enable()


@pytest.mark.slow
def test_why_is_what_went_wrong_first(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch)
    with pytest.raises(RuntimeError) as ending:
        CudaGraphs(torch.device("cuda")).record(fail)
    assert why(ending.value) == "operation not permitted when stream is capturing"
    assert why(RuntimeError()) == "RuntimeError"


def test_a_copy_is_awaited_on_the_stream_that_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device of the numbers, which need not be the current one."""
    recorded: list[Any] = []
    event = SimpleNamespace(record=lambda *stream: recorded.append(stream), synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    numbers: Any = SimpleNamespace(is_cuda=True, device="cuda:1", to=lambda *_, **__: torch.zeros(0))
    copied_over(numbers)
    assert recorded == [("stream of cuda:1",)]


def test_what_a_replay_hands_on_is_its_own() -> None:
    """The memory of a replayed pass is another's as soon as that is replayed."""
    value, weight = torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
    outputs, _ = Replay([], [Output(0, value, weight)], {}, lambda: None)()
    value.fill_(torch.nan), weight.fill_(False)
    assert outputs[0].value.eq(1).all()
    assert outputs[0].weight.all()


class Refusing:
    def warm_up(self, work: Callable[[], Any]) -> Any:
        return work()

    def record(self, work: Callable[[], Any]) -> Any:
        work()
        raise RuntimeError("it waits for the host")


@pytest.mark.slow
def test_a_held_out_pass_that_cannot_be_recorded_runs_directly(caplog: pytest.LogCaptureFixture) -> None:
    sinks = []
    for recorder in (None, Refusing()):
        model, sink = Toy(dropout=0.0), ListSink()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fixed = batch(99)
        options: dict[str, Any] = {
            "optimizer": optimizer,
            "reference": lambda m=model, b=fixed: {"mean": m(**b).mean()},
        }
        with (
            caplog.at_level(logging.WARNING),
            Watcher(model, sink, every=1, update_every=1, recorder=recorder, **options) as watcher,
        ):
            for t in range(4):
                loss = model(**batch(t)).square().mean()
                loss.backward()
                watcher.step(loss=loss)
                optimizer.step()
                optimizer.zero_grad()
        sinks.append(sink)
    assert caplog.text.count("the held-out pass is not replayed: it cannot be recorded (it waits for the host).") == 1
    for name in ("cosine_similarity", "activation_sparsity", "model_update"):
        for row in range(5):
            column = sinks[0].tables[name].columns[0]
            expected = sinks[0].column(row, name, column)
            assert sinks[1].column(row, name, column) == pytest.approx(expected, rel=1e-6, nan_ok=True)
