"""A validation text inside the training text is noticed at any offset, and clean texts stay as they are."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import numpy as np
import pytest

from stabilitylab.config import DataConfig
from stabilitylab.data import load_data, overlap
from stabilitylab.data.corpus import EOS, PAD
from stabilitylab.data.overlap import LINE, WINDOW, shared


def sentences(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    words = ["".join(draw.choices("abdegiklmnoprstu", k=draw.randint(2, 7))) for _ in range(300)]
    return [" ".join(draw.choices(words, k=draw.randint(6, 14))) + "." for _ in range(count)]


TRAINING, OTHER = sentences(600, 0), sentences(200, 1)


def described(folder: Path, text: list[str], **settings: object) -> dict:
    (folder / "train.txt").write_text("\n".join(TRAINING) + "\n", encoding="utf-8")
    (folder / "valid.txt").write_text("\n".join(text) + "\n", encoding="utf-8")
    own = {"source": f"text:{folder}/train.txt", "valid": f"{folder}/valid.txt", "max_length": 16, "held_out": 6}
    own |= {"vocab_size": 400, "sentences": 8}
    return load_data(DataConfig.model_validate(own | settings), stack="decoder").describe()


def warned(caught: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caught.records if r.levelno == logging.WARNING]


def by_hand(text: list[int], other: list[int]) -> list[bool]:
    """Compare every stretch of ``WINDOW`` tokens and every line with all of the other text."""

    def windows(ids: list[int]) -> list[tuple[int, ...]]:
        return [tuple(ids[i : i + WINDOW]) for i in range(len(ids) - WINDOW + 1)]

    def lines(ids: list[int]) -> list[tuple[int, int, tuple[int, ...]]]:
        ends = [i + 1 for i, token in enumerate(ids) if token == EOS]
        ends += [len(ids)] if not ends or ends[-1] < len(ids) else []
        starts = [0, *ends[:-1]]
        return [(a, b, tuple(ids[a:b])) for a, b in zip(starts, ends, strict=True) if b - a > LINE]

    found = [False] * len(text)
    for start, window in enumerate(windows(text)):
        if window in {*windows(other)}:
            found[start : start + WINDOW] = [True] * WINDOW
    for start, stop, line in lines(text):
        if line in {one for _, _, one in lines(other)}:
            found[start:stop] = [True] * (stop - start)
    return found


@pytest.mark.parametrize("piece", [40, overlap.PIECE])
def test_the_tokens_are_those_that_a_plain_comparison_finds(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "PIECE", piece)
    draw = random.Random(3)
    other = [EOS if draw.random() < 0.06 else draw.randrange(5, 200) for _ in range(700)]
    fresh = [EOS if draw.random() < 0.06 else draw.randrange(200, 400) for _ in range(300)]
    text = [*fresh[:50], *other[101:180], *fresh[50:120], EOS, *other[300 : 300 + WINDOW - 1], *fresh[120:]]
    line = [EOS, *range(5, 5 + LINE), EOS]
    text, other = [*text, *line, *fresh[:9]], [*other[:400], *line, *other[400:]]
    found = shared(np.array(text, np.uint16), np.array(other, np.uint16)).tolist()
    assert found == by_hand(text, other)
    assert 79 + LINE < sum(found) < len(text) / 2
    assert not shared(np.array(text[:0], np.uint16), np.array(other, np.uint16)).any()
    assert not shared(np.array(fresh, np.uint16), np.array(other, np.uint16)).any()


@pytest.mark.parametrize(("tokens", "is_found"), [(LINE, True), (LINE - 1, False)])
def test_a_short_line_is_no_repetition(tokens: int, is_found: bool) -> None:
    line = np.array([*range(7, 7 + tokens), EOS], np.uint16)
    other = np.concatenate([[50, EOS], line, [51, EOS]]).astype(np.uint16)
    assert shared(line, other).tolist() == [is_found] * len(line)


@pytest.mark.parametrize("offset", [0, 1, 7])
def test_the_end_of_the_training_text_is_noticed_where_blocks_do_not_align(
    offset: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = described(tmp_path, TRAINING[-100 - offset :])
    assert found["validation_left_out"]["equal_block"] < 5, "hardly any blocks align"
    assert found["validation"] > 50, "no block is dropped in silence"
    assert found["in_training"] == {"held_out": 1.0, "validation": 1.0}
    (said,) = warned(caplog)
    assert "100.0% of the tokens of the validation text" in said
    assert "remove the lines that both have from one of the two files" in said


def test_lines_in_another_order_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = described(tmp_path, random.Random(5).sample(TRAINING, 100))
    assert min(found["in_training"].values()) > 0.9
    assert "also stand in the training text" in warned(caplog)[0]


def test_the_share_of_a_mixed_text_is_its_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mixed = described(tmp_path, [*OTHER[:100], *TRAINING[201:301]])
    assert mixed["in_training"]["held_out"] == 0
    assert 0.25 < mixed["in_training"]["validation"] < 0.5
    assert len(warned(caplog)) == 1
    first = described(tmp_path, [*TRAINING[200:210], *OTHER, *sentences(900, 2)])
    assert first["in_training"]["held_out"] > 0.9
    assert first["in_training"]["validation"] < 0.03
    assert "the first 6 blocks of the validation text" in warned(caplog)[1]


def test_a_clean_text_is_as_it_was_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = described(tmp_path, OTHER)
    assert found["in_training"] == {"held_out": 0.0, "validation": 0.0}
    assert found["validation_left_out"] == {"empty": 0, "too_long": 0, "equal_block": 0}
    assert described(tmp_path, OTHER, validation=0)["in_training"] == {"held_out": 0.0, "validation": None}
    assert described(tmp_path, OTHER, fraction=0.5)["validation_sha256"] == found["validation_sha256"]
    assert not warned(caplog)


def test_blocks_that_align_are_left_out_as_before_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = described(tmp_path, TRAINING[:100])
    assert found["left_out"]["held_out"] == 6, "what is held out is not trained on"
    assert found["in_training"]["held_out"] < 0.1, "hence it is new text"
    assert found["validation_left_out"]["equal_block"] > 50
    (said,) = warned(caplog)
    assert "blocks of the validation text" in said or "tokens of the validation text" in said


def test_pad_is_what_left_out_blocks_become(tmp_path: Path) -> None:
    """Their tokens cannot be found, since no text has PAD."""
    text = np.arange(10, 10 + WINDOW).astype(np.uint16)
    assert shared(text, text).all()
    assert not shared(text, np.where(text == 20, PAD, text)).any()


def test_sentence_pairs_and_a_text_without_validation_text_have_no_such_share(tmp_path: Path) -> None:
    assert described(tmp_path, OTHER, valid=None)["in_training"] is None
    found = described(tmp_path, OTHER, source="synthetic", valid=None, max_length=24)
    assert found["in_training"] is None
    assert "in_training" in found["validation_left_out"], "equal pairs are counted"
