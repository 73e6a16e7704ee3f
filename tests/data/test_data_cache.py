"""The cache of vocabularies and tokens: it saves time, and nothing that happens to it changes the data."""

from __future__ import annotations

import logging
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from invented_text import Writer, invented

from stabilitylab.config import DataConfig
from stabilitylab.data import bpe, cache, load_data
from stabilitylab.data.sources import text


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STABILITYLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def described(paths: tuple[Path, Path], **settings) -> dict:
    config = DataConfig(source=f"text:{paths[0]},{paths[1]}", **{"vocab_size": 300, **settings})
    return load_data(config, stack="encoder-decoder").describe()


def entry(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def refuse_training(*_: object) -> None:
    raise AssertionError("the vocabulary was trained again")


@pytest.mark.slow
def test_a_second_load_neither_decodes_nor_trains(
    parallel: tuple[Path, Path], fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = described(parallel)
    assert entry(fresh).name.startswith("bpe-")
    monkeypatch.setattr(bpe, "train", refuse_training)
    monkeypatch.setattr(text, "decoded", refuse_training)
    assert described(parallel) == first
    assert described(parallel, max_length=20, seed=3)["tokenizer_sha256"] == first["tokenizer_sha256"]


def test_other_content_size_or_version_is_another_entry(
    write_pair: Writer, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = invented(200)
    paths = write_pair(source, target)
    described(paths)
    described(paths, vocab_size=301)
    described(paths, valid=f"{paths[0]},{paths[1]}", fraction=0.9, held_out=4)
    monkeypatch.setattr(bpe, "VERSION", bpe.VERSION + 1)
    described(paths)
    monkeypatch.setattr(bpe.tokenizers, "__version__", "0.0")
    described(paths)
    write_pair(source, [*target[:-1], "other"])
    described(paths)
    assert len(list(fresh.iterdir())) == 6


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STABILITYLAB_CACHE", "~/mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "mine"
    monkeypatch.delenv("STABILITYLAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder() == tmp_path / "xdg" / "stabilitylab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == tmp_path / ".cache" / "stabilitylab"


@pytest.mark.parametrize("damage", ["empty", "cut", "foreign", "array", "other arrays", "no tokenizer", "wrong tokens"])
def test_a_corrupt_entry_is_made_again(
    write_pair: Writer, fresh: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    paths = write_pair(*invented(200))
    first = described(paths)
    path = entry(fresh)
    whole = path.read_bytes()
    with np.load(path) as stored:
        arrays = dict(stored)
    if damage in ("empty", "cut", "foreign"):
        path.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "foreign": b"not an archive"}[damage])
    elif damage == "array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    elif damage == "other arrays":
        np.savez(path, something=np.zeros(3))
    elif damage == "no tokenizer":
        np.savez(path, **{**arrays, "tokenizer": np.zeros(5, np.uint8)})
    else:
        np.savez(path, **{**arrays, "train.source.ids": arrays["train.source.ids"][:-1]})
    with caplog.at_level(logging.WARNING, "stabilitylab"):
        assert described(paths) == first
    assert len(caplog.records) == 1
    assert "making it again" in caplog.text
    with np.load(path) as stored:
        assert stored.files == list(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(stored[name], array)


def test_a_flipped_byte_anywhere_never_changes_the_data(write_pair: Writer, fresh: Path) -> None:
    paths = write_pair(*invented(100))
    first = described(paths)
    path = entry(fresh)
    whole = path.read_bytes()
    draw = random.Random(0)
    for place in sorted(draw.sample(range(len(whole)), 25)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << draw.randrange(8))]) + whole[place + 1 :])
        assert described(paths) == first


def test_an_unwritable_cache_only_means_no_cache(
    write_pair: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths = write_pair(*invented(200))
    first = described(paths)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("STABILITYLAB_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING, "stabilitylab"):
        assert described(paths) == first
    assert [record.message for record in caplog.records if "cannot write to the cache" in record.message]


def test_a_full_disk_only_means_no_cache(write_pair: Writer, fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A limit on the size of files makes the write fail half-way, as a full disk does."""
    paths = write_pair(*invented(200))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        first = described(paths)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot write to the cache" in caplog.text
    assert list(fresh.iterdir()) == []
    assert described(paths) == first


@pytest.mark.slow
def test_several_processes_may_fill_the_cache_at_once(write_pair: Writer, fresh: Path) -> None:
    paths = write_pair(*invented(100))
    program = (
        "from stabilitylab.config import DataConfig\n"
        "from stabilitylab.data import load_data\n"
        f"config = DataConfig(source='text:{paths[0]},{paths[1]}', vocab_size=300)\n"
        "print(load_data(config, stack='encoder-decoder').describe()['train_sha256'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    printed = {process.communicate(timeout=120)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert printed == {described(paths)["train_sha256"]}
    assert entry(fresh).suffix == ".npz"
