"""Two gloo processes run every case once; the tests look at what they returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as processes


class Ranks:
    """Case -> what each of the two ranks returned."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._results: list[dict[str, Any]] = []

    def __call__(self, name: str) -> tuple[Any, Any]:
        if not self._results:
            self._launch()
        one, other = (results.get(name, "did not come to this case") for results in self._results)
        for rank, result in enumerate((one, other)):
            assert not isinstance(result, str), f"rank {rank}: {result}"
        return one, other

    def _launch(self) -> None:
        import rank_cases

        processes.start_processes(
            rank_cases.run, (self._folder, list(rank_cases.CASES)), nprocs=2, start_method="spawn", join=True
        )
        paths = [self._folder / f"rank-{rank}.pt" for rank in range(2)]
        self._results = [torch.load(path, weights_only=False) for path in paths]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(tmp_path_factory.mktemp("ranks"))
