"""Unknown symbols: their shares are recorded, warned of and refused; the baseline is no worse than a uniform guess."""

from __future__ import annotations

import logging
import math
import random
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from invented_text import Writer, invented
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from stabilitylab.config import DataConfig
from stabilitylab.data import Dataset, Unigram, bpe, load_data
from stabilitylab.data.corpus import EOS, PAD, SPECIALS, UNK
from stabilitylab.errors import InputError

LATIN = [f"line {n} has {n * n} words and a {('red', 'green', 'blue')[n % 3]} end" for n in range(300)]


def chinese(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(chr(0x4E00 + draw.randrange(80)) for _ in range(draw.randint(8, 20))) for _ in range(count)]


def running(folder: Path, train: list[str], valid: list[str] | None, **settings: object) -> Dataset:
    (folder / "train.txt").write_text("\n".join(train) + "\n", encoding="utf-8")
    own: dict[str, object] = {"source": f"text:{folder}/train.txt", "max_length": 16, "held_out": 6, "vocab_size": 200}
    if valid is not None:
        (folder / "valid.txt").write_text("\n".join(valid) + "\n", encoding="utf-8")
        own["valid"] = f"{folder}/valid.txt"
    return load_data(DataConfig.model_validate(own | settings), stack="decoder")


def warned(caught: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caught.records if r.levelno == logging.WARNING]


def test_a_validation_text_of_another_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        running(tmp_path, LATIN, chinese(300))
    message = str(caught.value)
    assert "% of the labels of the validation text" in message
    assert "are unknown symbols (<unk>)" in message
    assert "check that" in message
    assert "has the language and the script of" in message
    assert message.endswith(".")
    assert "\n" not in message


def test_a_vocabulary_that_is_too_small_is_refused_with_the_setting(tmp_path: Path) -> None:
    draw = random.Random(2)
    text = ["".join(chr(0x4E00 + draw.randrange(3000)) for _ in range(20)) for _ in range(300)]
    with pytest.raises(InputError, match=r"the held-out part of .*raise data\.vocab_size \(now 64\)"):
        running(tmp_path, text, None, vocab_size=64)


def test_some_unknown_symbols_bring_one_warning_and_are_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    valid = [line.replace("words", "Words") + (" 人民" if n % 2 else "") for n, line in enumerate(LATIN)]
    data = running(tmp_path, LATIN, valid)
    found = data.describe()["unknown"]
    rows = data._split.validation.target
    assert found["train"] == 0
    assert found["validation"] == (rows == UNK).sum() / (rows != PAD).sum()
    assert found["held_out"] == int((data.held_out.labels == UNK).sum()) / data.held_out.tokens
    assert 0.01 < found["validation"] < 0.2
    (said,) = warned(caplog)
    assert f"{max(found['held_out'], found['validation']):.1%} of the labels of the validation text" in said
    assert data.describe()["unknown_source"] is None, "a decoder reads no source"


def test_a_text_without_unknown_symbols_brings_no_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = running(tmp_path, LATIN, None)
    assert data.describe()["unknown"] == {"train": 0.0, "held_out": 0.0, "validation": 0.0}
    assert running(tmp_path, LATIN, None, validation=0).describe()["unknown"]["validation"] is None
    assert not warned(caplog)


def test_the_ends_of_sentences_are_no_labels_of_an_encoder(write_pair: Writer) -> None:
    source, target = invented(200)
    paths = write_pair(source, [line + chr(0x4E00 + i) for i, line in enumerate(target)])
    config = DataConfig(source=f"text:{paths[0]},{paths[1]}", vocab_size=100, held_out=8)
    shares = {}
    for stack in ("encoder", "decoder"):
        data = load_data(config, stack=stack)
        rows = data._rows.target
        labels = (rows != PAD) & (rows != EOS) if stack == "encoder" else rows != PAD
        shares[stack] = data.unknown["train"]
        assert shares[stack] == (rows == UNK).sum() / labels.sum()
    assert shares["encoder"] > shares["decoder"] > 0


@pytest.mark.parametrize("side", ["source", "target"])
def test_either_side_of_parallel_text(side: str, write_pair: Writer, caplog: pytest.LogCaptureFixture) -> None:
    text = invented(200)
    valid = [*invented(80, seed=1)]
    valid[side == "target"] = chinese(80)
    paths, other = write_pair(*text), write_pair(*valid, name="valid")
    settings = {"source": f"text:{paths[0]},{paths[1]}", "valid": f"{other[0]},{other[1]}", "vocab_size": 300}
    config = DataConfig.model_validate({**settings, "held_out": 16})
    if side == "target":
        with pytest.raises(InputError, match="of the labels of the validation text"):
            load_data(config, stack="encoder-decoder")
        return
    described = load_data(config, stack="encoder-decoder").describe()
    assert described["unknown_source"]["train"] == 0
    assert described["unknown_source"]["validation"] > 0.5
    assert max(described["unknown"].values()) < 0.01
    (said,) = warned(caplog)
    assert "% of the source tokens of the validation text" in said
    assert "labels" not in said


def test_the_baseline_is_at_most_that_of_a_uniform_guess() -> None:
    training = np.repeat(np.arange(5, 9), 1000)
    unseen, mixed, usual = np.full(50, UNK), np.array([5, 6, 7, UNK]), np.array([5, 6, 7, 8])
    assert Unigram.of(training, unseen, 40).cross_entropy == math.log(40) < math.log(4040)
    assert Unigram.of(training, mixed, 40).cross_entropy < math.log(40)
    assert Unigram.of(training, usual, 40).cross_entropy == pytest.approx(-math.log(1001 / 4040), rel=1e-12)


@pytest.mark.parametrize("text", [chinese(300), [f"word{n % 90}" for n in range(300)]], ids=["chinese", "words"])
def test_no_line_of_a_text_without_spaces_begins_with_an_unknown_symbol(text: list[str]) -> None:
    tokenizer = bpe.train(text, 300)
    assert bpe.SPACE in tokenizer.get_vocab()
    for line in text:
        ids = tokenizer.encode(line).ids
        assert UNK not in ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == line


def test_a_rare_space_is_in_an_alphabet_that_has_no_room_for_all_characters() -> None:
    draw = random.Random(4)
    text = ["".join(chr(0x4E00 + draw.randrange(90)) for _ in range(30)) for _ in range(200)]
    text[0] = f"{text[0]} {text[1]}"  # the rarest character
    tokenizer = bpe.train(text, 100)
    assert bpe.SPACE in tokenizer.get_vocab()
    assert tokenizer.encode(text[5]).ids[0] != UNK
    single = [token for token in tokenizer.get_vocab() if len(token) == 1]
    assert len(single) == (100 - 5) // 2, "the alphabet is no larger for it"


def without_care_for_the_space(lines: list[str], size: int) -> str:
    """The tokenizer with the most frequent characters alone as its alphabet."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    tokenizer.decoder = decoders.Metaspace()
    counts = Counter("".join(unicodedata.normalize("NFKC", line).strip().replace(" ", "▁") for line in lines))
    alphabet = sorted(counts, key=lambda c: (-counts[c], c))[: (size - len(SPECIALS)) // 2]
    settings = {"vocab_size": size, "special_tokens": [*SPECIALS], "initial_alphabet": alphabet}
    trainer = trainers.BpeTrainer(**settings, limit_alphabet=len(alphabet), show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer.to_str()


@pytest.mark.parametrize(("lines", "size"), [(LATIN, 200), (invented(300)[0], 300), (invented(300)[1], 64)])
def test_the_tokenizer_of_a_text_with_spaces_is_what_it_was(lines: list[str], size: int) -> None:
    assert bpe.train(lines, size).to_str() == without_care_for_the_space(lines, size)


def test_without_care_for_the_space_a_line_begins_with_an_unknown_symbol() -> None:
    tokenizer = Tokenizer.from_str(without_care_for_the_space(chinese(300), 300))
    assert tokenizer.encode(chinese(1)[0]).ids[0] == UNK
