"""Two gloo processes, or four, run every case once, whichever worker of pytest-xdist asks first; the tests look at what
they returned. The cases of the slow set are launched apart, when one of its tests asks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as processes
from filelock import FileLock

LAUNCH_SECONDS = 1500  # of the test that asks first, which waits for all cases of all ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LAUNCH_SECONDS))


class Ranks:
    """Maps a case to what each rank returned."""

    def __init__(self, folder: Path, size: int = 2) -> None:
        self._launches = {slow: Launch(folder / ("slow" if slow else "fast"), size, slow) for slow in (False, True)}

    def __call__(self, name: str) -> tuple[Any, ...]:
        import rank_cases

        return self._launches[name in rank_cases.SLOW](name)


class Launch:
    """One start of all ranks, for the cases of one set."""

    def __init__(self, folder: Path, size: int, slow: bool) -> None:
        self._folder, self._size, self._slow = folder, size, slow
        self._results: list[dict[str, Any]] = []

    def __call__(self, name: str) -> tuple[Any, ...]:
        if not self._results:
            self._read()
        found = tuple(results.get(name, "did not come to this case") for results in self._results)
        for rank, result in enumerate(found):
            assert not isinstance(result, str), f"rank {rank}: {result}"
        return found

    def _read(self) -> None:
        self._folder.mkdir(exist_ok=True)
        paths, ended = [self._folder / f"rank-{rank}.pt" for rank in range(self._size)], self._folder / "ended"
        with FileLock(self._folder / "lock"):
            if not ended.exists():
                try:
                    self._launch()
                except (processes.ProcessExitedException, processes.ProcessRaisedException) as error:
                    ended.write_text(str(error))
                    pytest.fail(f"{error}\n{self._crashes()}", pytrace=False)
                ended.touch()
        # Once for all tests: another launch would find what this one left, and wait as long.
        if broke := ended.read_text():
            pytest.fail(broke, pytrace=False)
        self._results = [torch.load(path, weights_only=False) for path in paths]

    def _crashes(self) -> str:
        """What each rank was at, and its stacks if a signal ended it: the end of what it wrote."""
        written = {path.name: path.read_text().rpartition("case ")[2] for path in self._folder.glob("crash-*.txt")}
        return "\n".join(f"{name}: {text[:4000]}" for name, text in sorted(written.items()))

    def _launch(self) -> None:
        import rank_cases

        names = [name for name in rank_cases.every_case(self._size) if (name in rank_cases.SLOW) is self._slow]
        processes.start_processes(
            rank_cases.run, (self._folder, names, self._size), nprocs=self._size, start_method="spawn", join=True
        )


def shared(factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder of this session, the same in all workers, whose own folders are side by side."""
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    folder.mkdir(exist_ok=True)
    return folder


def of_its_set(ranks: Ranks, request: pytest.FixtureRequest) -> Callable[[str], tuple[Any, ...]]:
    """``ranks``, for the test that asks: one of the fast set may not launch the cases of the slow set."""
    import rank_cases

    is_slow = request.node.get_closest_marker("slow") is not None

    def results(name: str) -> tuple[Any, ...]:
        assert is_slow or name not in rank_cases.SLOW, f"{name} is in rank_cases.SLOW: mark the test slow"
        return ranks(name)

    return results


@pytest.fixture(scope="session")
def both(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(shared(tmp_path_factory, "ranks"))


@pytest.fixture(scope="session")
def all_four(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(shared(tmp_path_factory, "four_ranks"), 4)


@pytest.fixture
def ranks(both: Ranks, request: pytest.FixtureRequest) -> Callable[[str], tuple[Any, ...]]:
    return of_its_set(both, request)


@pytest.fixture
def four_ranks(all_four: Ranks, request: pytest.FixtureRequest) -> Callable[[str], tuple[Any, ...]]:
    return of_its_set(all_four, request)
