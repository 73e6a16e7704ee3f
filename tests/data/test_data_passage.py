"""Whole text to translate: nothing left out, in order, in the run's own vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from invented_text import Writer, invented

from stabilitylab.config import DataConfig
from stabilitylab.data import Dataset, load_data
from stabilitylab.data.corpus import EOS, PAD
from stabilitylab.errors import InputError, UsageError


def load(paths: tuple[Path, Path], **settings) -> Dataset:
    config = DataConfig(source=f"text:{paths[0]},{paths[1]}", **{"vocab_size": 300, "held_out": 8, **settings})
    return load_data(config, stack="encoder-decoder")


def joined(paths: tuple[Path, Path]) -> str:
    return ",".join(map(str, paths))


@pytest.fixture
def train(write_pair: Writer) -> tuple[Path, Path]:
    return write_pair(*invented(200))


def test_the_whole_validation_text_long_and_empty_lines_too(train: tuple[Path, Path], write_pair: Writer) -> None:
    source, target = invented(40, seed=1)
    source[3], source[5] = "ba " * 50, ""
    valid = write_pair(source, target, name="valid")
    data = load(train, valid=joined(valid), max_length=20)
    passage = data.passage()
    assert (passage.source, passage.reference) == (source, target)
    assert len(passage) == 40 > len(data.held_out.labels)
    assert passage.truncated[3]
    assert len(passage.tokens[3]) == 20 == max(map(len, passage.tokens))
    assert passage.tokens[5].tolist() == [EOS]
    for ids, line, cut in zip(passage.tokens, source, passage.truncated, strict=True):
        assert ids[-1] == EOS
        assert (data.decode(ids) == line) == (not cut)
    assert data.passage().head(7).source == source[:7]
    assert len(data.passage().head(None)) == 40


def test_without_a_validation_text_what_was_cut_out_of_the_training_text(train: tuple[Path, Path]) -> None:
    data = load(train, max_length=12)  # some pairs are longer, so that a row's place is not its line
    assert data.describe()["left_out"]["too_long"] > 0
    passage, lines = data.passage(), list(zip(*invented(200), strict=True))
    held_out = [data.decode(row.tolist()) for row in data.held_out.labels]
    assert passage.reference[: len(held_out)] == held_out
    validation = {data.decode(row.tolist()) for batch in data.validation() for row in batch.labels}
    assert {*passage.reference[len(held_out) :]} == validation
    assert validation
    assert set(zip(passage.source, passage.reference, strict=True)) <= set(lines)
    for ids, row in zip(passage.tokens[: len(held_out)], data.held_out.inputs["source"].tolist(), strict=True):
        assert ids.tolist() == [token for token in row if token != PAD]


def test_another_text_enters_no_vocabulary(train: tuple[Path, Path], write_pair: Writer) -> None:
    source, target = invented(30, seed=2)
    other = write_pair(["Ω " + line for line in source], target, name="test", zipped=True)
    data = load(train, max_length=40)
    before = data.describe()
    passage = data.passage(f"text:{joined(other)}")
    assert passage.reference == target
    assert passage.source[0].startswith("Ω")
    assert data.describe() == before == load(train, max_length=40).describe()
    assert [data.decode(ids).removeprefix("<unk> ") for ids in passage.tokens] == source
    again = load(train, max_length=40).passage(f"text:{joined(other)}")  # through the cache
    assert all(np.array_equal(a, b) for a, b in zip(passage.tokens, again.tokens, strict=True))


def test_batches_hold_every_sentence_once(train: tuple[Path, Path]) -> None:
    passage = load(train, max_length=40, held_out=50, validation=0).passage()
    seen = {}
    for places, ids, mask in passage.batches(16):
        assert len(places) <= 16
        assert bool(mask[0].all())  # no wider than its longest
        for place, row, real in zip(places, ids, mask, strict=True):
            seen[place] = row[real].tolist()
            assert (row[~real] == PAD).all()
    assert [seen[place] for place in range(50)] == [ids.tolist() for ids in passage.tokens]
    assert len(seen) == 50


def test_the_synthetic_task_in_words() -> None:
    data = load_data(DataConfig(held_out=12), stack="encoder-decoder")
    passage = data.passage()
    assert passage.reference == [data.decode(row.tolist()) for row in data.held_out.labels]
    assert [len(line.split()) + 1 for line in passage.source] == [len(ids) for ids in passage.tokens]
    assert not passage.truncated.any()
    with pytest.raises(UsageError, match="no vocabulary for other text"):
        data.passage("text:a,b")


def test_a_text_that_cannot_be_read(train: tuple[Path, Path], write_pair: Writer) -> None:
    data = load(train)
    source, target = invented(9)
    for wrong in ("a,b", "hf:name,de,en", "synthetic"):
        with pytest.raises(UsageError, match="the form is text:SRC,TGT"):
            data.passage(wrong)
    with pytest.raises(UsageError, match="does not name two files"):
        data.passage("text:one")
    with pytest.raises(InputError, match="cannot read"):
        data.passage("text:absent.xx,absent.yy")
    with pytest.raises(InputError, match=r"other.xx has 9 lines and .*other.yy has 8"):
        data.passage(f"text:{joined(write_pair(source, target[:-1], name='other'))}")
