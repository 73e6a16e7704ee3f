"""Two gloo processes, or four, run every case once; the tests look at what they returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as processes


class Ranks:
    """Case -> what each rank returned."""

    def __init__(self, folder: Path, size: int = 2) -> None:
        self._folder, self._size = folder, size
        self._results: list[dict[str, Any]] = []

    def __call__(self, name: str) -> tuple[Any, ...]:
        if not self._results:
            self._launch()
        found = tuple(results.get(name, "did not come to this case") for results in self._results)
        for rank, result in enumerate(found):
            assert not isinstance(result, str), f"rank {rank}: {result}"
        return found

    def _launch(self) -> None:
        import rank_cases

        names = list(rank_cases.every_case(self._size))
        processes.start_processes(
            rank_cases.run, (self._folder, names, self._size), nprocs=self._size, start_method="spawn", join=True
        )
        paths = [self._folder / f"rank-{rank}.pt" for rank in range(self._size)]
        self._results = [torch.load(path, weights_only=False) for path in paths]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(tmp_path_factory.mktemp("four_ranks"), 4)
