"""Recorders of device work that is recorded once and replayed: their interface, and a recorder of CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch

from ...errors import first_line

T = TypeVar("T")


class DeviceRecorder(Protocol):
    """A recorder of the device work of a function. A replay does this work again without running the function.

    A replay runs no line of Python. All numbers that differ between replays must therefore lie in tensors that stay at
    their addresses.
    """

    def warm_up(self, work: Callable[[], T]) -> T:
        """Run ``work`` as it is, where it will be recorded: what is set up at a first call must exist by then."""
        ...

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Return what ``work`` returns and the replay, which fills its tensors anew; nothing is computed yet."""
        ...

    def another(self) -> DeviceRecorder:
        """Return a recorder like this one, whose recordings have memory of their own. The memory is given back once all
        of them are gone."""
        ...


class CudaGraphs:
    """A :class:`DeviceRecorder` of CUDA graphs, which share one pool of memory. No two of them run at a time, and the
    memory of results that are needed later is still referenced, so that no other graph gets it."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream or torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def another(self) -> CudaGraphs:
        return CudaGraphs(self._stream.device, self._stream)

    def warm_up(self, work: Callable[[], T]) -> T:
        around = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(around)
        with torch.cuda.stream(self._stream):
            result = work()
        around.wait_stream(self._stream)
        return result

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        gc.collect()  # an unused graph that is destroyed during a capture would end the capture
        graph, around = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._stream.device)
        begun = False
        try:
            # entering it gives back what the allocator keeps of updates that ran directly, so that both never add up
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                begun = True
                result = work()
        except BaseException:
            self._clean_up(around, graph, begun)
            raise
        return result, graph.replay

    def _clean_up(self, around: torch.cuda.Stream, graph: Any, begun: bool) -> None:
        """Clean up after a capture that failed, which torch leaves half open: its stream is the current one, its pool
        is being allocated to and never given back, and the next random number raises, since the generator counts them
        for the graph."""
        torch.cuda.set_stream(around)
        place = self._stream.device.index
        names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")  # of new and of old versions
        end = next((getattr(torch._C, name) for name in names if hasattr(torch._C, name)), None)
        with suppress(RuntimeError):  # the pool is closed already
            if end is not None:
                end(place, self._pool)
        if begun and not _is_whole(graph):
            with suppress(RuntimeError):
                torch._C._cuda_releasePool(place, self._pool)  # pyright: ignore[reportPrivateImportUsage]
        self._pool = torch.cuda.graph_pool_handle()
        generator: Any = torch.cuda.default_generators[place]
        generator.graphsafe_set_state(generator.clone_state())


def _is_whole(graph: Any) -> bool:
    """Return True if its capture ended: then it gives its pool back itself when it is destroyed."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def attempt(recorder: DeviceRecorder, work: Callable[[], T]) -> tuple[T, Callable[[], None]] | str:
    """Return the result of ``record``, or the reason in one line if the work cannot be recorded.

    A lack of memory raises OutOfMemoryError, whatever error reports it.
    """
    try:
        return recorder.record(work)
    except RuntimeError as error:
        reason = why(error)
        if any(lacks_memory(each) for each in _chain(error)):
            raise torch.OutOfMemoryError(f"out of memory while an update was recorded ({reason})") from error
    gc.collect()  # now that the error is gone, and with it the frames that held what was half recorded
    torch.cuda.empty_cache()
    return reason


def why(error: RuntimeError) -> str:
    """Return the first line of the first error. The end of a failed capture raises too, without a reason."""
    *_, first = _chain(error)
    return first_line(first)


def lacks_memory(error: BaseException) -> bool:
    """Return True for a lack of memory: torch's own error, or what CUDA or cuBLAS says of it."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "_ALLOC_FAILED" in text


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and those before it that led to it, as far as they are errors of torch."""
    found: BaseException | None = error
    while isinstance(found, RuntimeError):
        yield found
        found = found.__context__
