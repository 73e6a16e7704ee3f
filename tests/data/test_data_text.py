"""Local parallel text: what is read, how it is tokenised, and every way in which it can be wrong."""

from __future__ import annotations

import gzip
import importlib
import os
from pathlib import Path

import pytest
from invented_text import Writer, invented

from stabilitylab.config import DataConfig
from stabilitylab.data import Dataset, bpe, load_data
from stabilitylab.data.corpus import EOS, SPECIALS
from stabilitylab.errors import InputError, StabilityLabError, UsageError


def load(paths: tuple[Path, Path], **settings) -> Dataset:
    config = DataConfig(source=f"text:{paths[0]},{paths[1]}", **{"vocab_size": 300, "held_out": 48, **settings})
    return load_data(config, stack="encoder-decoder")


def held_out_text(data: Dataset) -> list[str]:
    return [data.decode(row.tolist()) for row in data.held_out.labels]


def test_plain_and_gzip_files_hold_the_same_text(write_pair: Writer) -> None:
    text = invented(200)
    plain, zipped = (load(write_pair(*text, zipped=zipped)).describe() for zipped in (False, True))
    for key in ("train_sha256", "held_out_sha256", "tokenizer_sha256", "buckets", "unigram"):
        assert plain[key] == zipped[key]
    assert plain["files_sha256"] != zipped["files_sha256"]


def test_one_vocabulary_serves_both_sides(parallel: tuple[Path, Path]) -> None:
    data = load(parallel)
    assert data.joint
    assert data.source_vocab == data.target_vocab <= 300
    assert data.describe()["pairs"] >= 600
    for rows in data._rows:
        assert rows.max() < data.target_vocab


def test_decoding_gives_the_text_back(parallel: tuple[Path, Path]) -> None:
    data = load(parallel)
    content = gzip.decompress(parallel[1].read_bytes()).decode()
    lines = {" ".join(line.split()) for line in content.split("\n")}
    assert set(held_out_text(data)) <= lines
    ids = data.held_out.labels[0].tolist()
    assert data.decode([1, *ids, *ids]) == held_out_text(data)[0]  # from BOS to the first EOS


def test_training_a_vocabulary_is_deterministic() -> None:
    """Many equally rare characters and pairs, of which the vocabulary holds only a part."""
    lines = [f"{chr(0x4E00 + i)}{chr(0x5E00 + i)} x{chr(0x3041 + i % 80)}" for i in range(400)]
    made = {bpe.train(lines, 120).to_str() for _ in range(5)}
    assert len(made) == 1
    assert 100 < bpe.train(lines, 120).get_vocab_size() <= 120


def test_text_that_looks_like_special_tokens_is_text(write_pair: Writer) -> None:
    source, target = invented(200)
    tricky = [f"{line} <pad> <mask> </s> <s> <unk>" for line in target]
    data = load(write_pair(source, tricky), max_length=60, vocab_size=800)
    for row in data._rows.target:
        words = row[: list(row).index(EOS)]
        assert (words >= len(SPECIALS)).all()
    assert set(held_out_text(data)) <= set(tricky)
    again = load(write_pair(source, tricky), max_length=60, vocab_size=800)  # through the cache
    assert again.describe()["train_sha256"] == data.describe()["train_sha256"]


def test_rare_characters_of_a_small_vocabulary_become_unk(write_pair: Writer) -> None:
    source, target = invented(200)
    data = load(write_pair(source, [line + chr(0x4E00 + i) for i, line in enumerate(target)]), vocab_size=100)
    assert data.target_vocab == 100
    assert (data._rows.target == SPECIALS.index("<unk>")).any()


@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_only_a_newline_ends_a_line(write_pair: Writer, end: str) -> None:
    source, target = invented(120)
    source = [f"{line}\u2028\x0b\x85{line}" for line in source]
    data = load(write_pair(source, target, end=end), max_length=80)
    assert data.describe()["pairs"] == 120
    assert set(held_out_text(data)) <= set(target)


def test_a_byte_order_mark_and_a_missing_last_newline_change_nothing(write_pair: Writer) -> None:
    text = invented(120)
    paths = write_pair(*text)
    expected = load(paths).describe()
    for path in paths:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().rstrip(b"\n"))
    assert load(paths).describe()["train_sha256"] == expected["train_sha256"]


def test_empty_and_long_pairs_are_left_out_and_counted(write_pair: Writer) -> None:
    source, target = invented(200)
    source[3] = ""
    target[5] = "   "
    source[7] = "ba " * 30
    described = load(write_pair(source, target), max_length=24).describe()
    assert described["left_out"]["empty"] == 2
    assert described["left_out"]["too_long"] >= 1
    assert described["pairs"] == 200 == described["train"] + sum(described["left_out"].values())


def test_max_length_counts_the_end_of_sentence(write_pair: Writer) -> None:
    source, target = invented(300)
    data = load(write_pair(source, target), max_length=12)
    lengths = data._rows.lengths()
    assert lengths.max() == 12
    longer = load(write_pair(source, target), max_length=13)
    assert (longer._rows.lengths().max(axis=1) == 13).any()


@pytest.mark.parametrize("chosen", [None, "true"])
def test_the_tokenizer_starts_no_threads_unless_asked(monkeypatch: pytest.MonkeyPatch, chosen: str | None) -> None:
    """After its threads have run, some versions of the package complain at every fork."""
    if chosen is None:
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    else:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", chosen)
    importlib.reload(bpe)
    assert os.environ["TOKENIZERS_PARALLELISM"] == (chosen or "false")


def refused(kind: type[StabilityLabError], paths: tuple[Path, Path], *parts: str, **settings) -> None:
    """One sentence of ``kind`` that holds every one of ``parts``."""
    with pytest.raises(kind) as caught:
        load(paths, **settings)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert message.endswith(".")
    assert "\n" not in message


def test_a_missing_file_or_a_folder(write_pair: Writer, tmp_path: Path) -> None:
    source, _ = write_pair(*invented(100))
    refused(InputError, (source, tmp_path / "absent.yy"), "absent.yy", "No such file")
    refused(InputError, (source, tmp_path), f"cannot read {tmp_path}", "Is a directory")


def test_different_numbers_of_lines(write_pair: Writer) -> None:
    source, target = invented(100)
    refused(InputError, write_pair(source, target[:-3]), "train.xx has 100 lines", "train.yy has 97")


def test_a_misaligned_validation_text(write_pair: Writer) -> None:
    source, target = invented(100)
    valid = write_pair(source[:9], target[:8], name="valid")
    paths = write_pair(source, target)
    refused(InputError, paths, "valid.xx has 9 lines", "valid.yy has 8", valid=f"{valid[0]},{valid[1]}")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"  \n \n"])
def test_an_empty_file(write_pair: Writer, content: bytes) -> None:
    paths = write_pair(*invented(100))
    paths[1].write_bytes(content)
    refused(InputError, paths, "train.yy is empty")


def test_text_that_is_not_utf8_is_named_by_its_line(write_pair: Writer) -> None:
    paths = write_pair(*invented(100))
    lines = paths[1].read_bytes().split(b"\n")
    lines[41] = "café".encode("latin-1")
    paths[1].write_bytes(b"\n".join(lines))
    refused(InputError, paths, "train.yy is not UTF-8 in line 42")


@pytest.mark.parametrize("damage", ["plain", "cut", "flipped"])
def test_a_bad_gzip_file(write_pair: Writer, damage: str) -> None:
    paths = write_pair(*invented(100), zipped=True)
    whole = paths[0].read_bytes()
    middle = len(whole) // 2
    broken = {
        "plain": b"not compressed at all\n",
        "cut": whole[:middle],
        "flipped": whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :],
    }
    paths[0].write_bytes(broken[damage])
    refused(InputError, paths, "train.xx.gz is not a whole gzip file")


def test_all_pairs_too_long(write_pair: Writer) -> None:
    source, target = invented(100)
    long = [" ".join([line] * 4) for line in source]
    refused(InputError, write_pair(long, target), "all 100 sentence pairs", "data.max_length = 8", max_length=8)


def test_all_pairs_with_an_empty_side(write_pair: Writer) -> None:
    source, target = invented(100)
    half = [line if i % 2 else "" for i, line in enumerate(source)]
    other = ["" if i % 2 else line for i, line in enumerate(target)]
    refused(InputError, write_pair(half, other), "all 100 sentence pairs", "empty side")


def test_too_few_pairs_for_one_batch_and_the_held_out_part(write_pair: Writer) -> None:
    source, target = invented(63)
    assert load(write_pair(*invented(64))).describe()["train"] == 16
    refused(
        InputError, write_pair(source, target), "too few sentence pairs for training", ": 15, and one batch needs 16"
    )
    few = "too few usable sentence pairs to hold out: 63, and data.held_out asks for 64"
    refused(InputError, write_pair(source, target), few, held_out=64)
    refused(InputError, write_pair(*invented(200)), "held out: 1, and one batch needs", fraction=0.01)


def test_a_validation_text_that_is_too_small(write_pair: Writer) -> None:
    source, target = invented(100)
    valid = write_pair(source[:9], target[:9], name="valid")
    paths = write_pair(source, target)
    refused(InputError, paths, "to hold out: 9, and data.held_out asks for 48", valid=f"{valid[0]},{valid[1]}")


@pytest.mark.parametrize("source", ["text:", "text:a,b,c", "text:a,", "hf:name", "hf:name,de", "hf:,a,b"])
def test_a_source_of_the_wrong_form(source: str) -> None:
    with pytest.raises(UsageError, match="form"):
        load_data(DataConfig(source=source), stack="decoder")


def test_a_validation_text_of_the_wrong_form(write_pair: Writer) -> None:
    refused(UsageError, write_pair(*invented(100)), "'one.de'", "data.valid = SRC,TGT", valid="one.de")


@pytest.mark.parametrize("source", ["", "wmt14", "synthetic:hard", "Text:a,b", "file:a,b"])
def test_an_unknown_source_lists_the_choices(source: str) -> None:
    with pytest.raises(UsageError, match=r"choose hf:DATASET,SRC_COLUMN,TGT_COLUMN, synthetic or text:SRC\[,TGT\]\."):
        load_data(DataConfig(source=source), stack="decoder")


def test_home_is_expanded(write_pair: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = write_pair(*invented(100))
    data = load((Path("~") / paths[0].name, Path("~") / paths[1].name))
    assert data.describe()["pairs"] == 100
