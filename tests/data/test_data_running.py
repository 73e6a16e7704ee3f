"""Running text: one file, cut into blocks of tokens, each token once."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from stabilitylab.config import DataConfig
from stabilitylab.data import Sentences, load_data
from stabilitylab.data.corpus import BOS, EOS, PAD
from stabilitylab.data.running import RunningText
from stabilitylab.errors import InputError, UsageError
from stabilitylab.sweep.grids import axis

LINES = [f"line {n} has {n * n} words and a {('red', 'green', 'blue')[n % 3]} end" for n in range(400)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join([*LINES[:200], "", *LINES[200:]]) + "\n", encoding="utf-8")
    return path


def config(path: Path, **settings: object) -> DataConfig:
    own = {
        "source": f"text:{path}",
        "max_length": 16,
        "held_out": 6,
        "sentences": 8,
        "validation": 5,
        "vocab_size": 200,
    }
    return DataConfig.model_validate(own | settings)


def test_blocks_hold_every_token_once_with_an_end_for_each_line() -> None:
    lines = Sentences(np.array([7, 8, 9, 10, 11, 12], np.uint8), np.array([2, 0, 3, 1]))
    text = RunningText.of(lines, 4)
    rows = text.rows(np.ones(3, bool)).target
    assert rows.tolist() == [[7, 8, EOS, EOS], [9, 10, 11, EOS], [12, EOS, PAD, PAD]]
    assert text.rows(np.array([False, True, False])).target.tolist() == [[9, 10, 11, EOS]]
    assert text.rows(np.zeros(3, bool)).target.shape[0] == 0
    assert RunningText.of(lines, 3).target.lengths.tolist() == [3, 3, 3]  # a last block of one token predicts nothing
    assert (len(text), text.empty().any(), text.longer_than(4).any()) == (3, False, False)


@pytest.mark.parametrize("stack", ["decoder", "encoder"])
def test_a_single_stack_trains_on_it(stack, file: Path) -> None:
    data = load_data(config(file), stack=stack)
    batch = data.micro_batch(0)
    assert batch.labels.shape == (8, 16)
    if stack == "decoder":
        assert bool((batch.weight == 1).all())
        assert bool((batch.inputs["tokens"][:, 0] == BOS).all())
        assert bool((batch.inputs["tokens"][:, 1:] == batch.labels[:, :-1]).all())
    said = data.describe()
    assert (said["left_out"]["too_long"], said["left_out"]["empty"]) == (0, 0)
    assert said["train"] + said["held_out"] + said["validation"] + said["left_out"]["held_out"] >= said["pairs"]
    assert said["padding"] < 0.05
    words = data.decode(batch.labels[0].tolist())
    assert any(word in words for word in ("line", "words", "end", "has"))


def test_the_same_batches_from_plain_and_packed_text_and_from_the_cache(file: Path, tmp_path: Path) -> None:
    packed = tmp_path / "text.txt.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    plain, again, other = (load_data(config(path), stack="decoder") for path in (file, file, packed))
    assert plain.describe()["train_sha256"] == again.describe()["train_sha256"] == other.describe()["train_sha256"]


def test_a_validation_text_of_its_own(file: Path, tmp_path: Path) -> None:
    valid = tmp_path / "valid.txt"
    valid.write_text("\n".join(line.replace("words", "letters") for line in LINES), encoding="utf-8")
    data = load_data(config(file, valid=str(valid)), stack="decoder")
    assert data.describe()["left_out"]["held_out"] == 0
    assert data.validation_sentences > 100
    with pytest.raises(UsageError, match=r"data\.valid = FILE"):
        load_data(config(file, valid=f"{valid},{valid}"), stack="decoder")


def test_two_files_that_were_parallel_text_before_are_read_anew(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STABILITYLAB_CACHE", str(tmp_path / "cache"))
    valid = tmp_path / "valid.txt"
    valid.write_text(file.read_text(encoding="utf-8").replace("words", "end"), encoding="utf-8")
    parallel = config(file, source=f"text:{file},{valid}", max_length=64)
    pairs = load_data(parallel, stack="encoder-decoder").describe()
    running = load_data(config(file, valid=str(valid)), stack="decoder")
    training = " ".join(running.decode(labels.tolist()) for labels in running.micro_batch(0).labels)
    held_out = " ".join(running.decode(labels.tolist()) for labels in running.held_out.labels)
    assert "words" in training, "the text of data.source is trained on"
    assert "words" not in held_out, "the text of data.valid is held out"
    assert load_data(parallel, stack="encoder-decoder").describe() == pairs


def test_what_it_is_not_for_and_what_it_lacks_is_said(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"one text without translations.*--stack decoder"):
        load_data(config(file), stack="encoder-decoder")
    short = tmp_path / "short.txt"
    short.write_text("\n".join(LINES[:9]), encoding="utf-8")
    with pytest.raises(InputError, match=r"blocks of 16 tokens"):
        load_data(config(short), stack="decoder")
    with pytest.raises(UsageError, match="does not name one file"):
        load_data(config(Path("")).model_copy(update={"source": "text:"}), stack="decoder")
    with pytest.raises(InputError, match="cannot read"):
        load_data(config(tmp_path / "absent"), stack="decoder")


def test_an_axis_of_files_is_one_value_each() -> None:
    assert axis("data=text:a.txt,text:b.txt") == ("data", ["text:a.txt", "text:b.txt"])
    assert axis("data=text:a.de,a.en,text:b.de,b.en") == ("data", ["text:a.de,a.en", "text:b.de,b.en"])
    assert axis("data=text:a.txt,synthetic") == ("data", ["text:a.txt", "synthetic"])
