"""Generated parallel text, and a cache of the tests' own."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from invented_text import Writer, invented
from rest_slow import slow


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache_folder(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STABILITYLAB_CACHE", str(shared_cache))
    return shared_cache


@pytest.fixture
def write_pair(tmp_path: Path) -> Writer:
    def write(
        source: list[str], target: list[str], name: str = "train", end: str = "\n", zipped: bool = False
    ) -> tuple[Path, Path]:
        paths = []
        for language, lines in (("xx", source), ("yy", target)):
            content = "".join(line + end for line in lines).encode()
            path = tmp_path / (f"{name}.{language}" + (".gz" if zipped else ""))
            path.write_bytes(gzip.compress(content) if zipped else content)
            paths.append(path)
        return paths[0], paths[1]

    return write


@pytest.fixture(params=["generated", slow("multi30k")])
def parallel(request: pytest.FixtureRequest, write_pair: Writer) -> tuple[Path, Path]:
    """Two files of parallel text: Multi30k German-English where it is at hand, and always its generated twin."""
    if request.param == "multi30k":
        folder = request.getfixturevalue("multi30k")
        return folder / "train.de.gz", folder / "train.en.gz"
    return write_pair(*invented(600), zipped=True)
