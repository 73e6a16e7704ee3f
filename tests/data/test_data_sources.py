"""The registry of data sources: what each is called, and a source of one's own from ``--data`` to a batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stabilitylab.config import parse_set, resolve
from stabilitylab.data import SOURCES, SPECIALS, Corpus, Files, Pairs, Sentences, load_data, source
from stabilitylab.errors import UsageError
from stabilitylab.sweep.identity import data_of, key_of


def copied(spec: str, config) -> Corpus:
    """Copies sentences of four words."""
    count, words = 200, int(spec)
    ids = np.random.default_rng(0).integers(len(SPECIALS), len(SPECIALS) + words, size=4 * count).astype(np.int32)
    side = Sentences(ids, np.full(count, 4))
    vocab = len(SPECIALS) + words
    return Corpus(Pairs(side, side), None, vocab, vocab, True, str, lambda split: ([], []))


def config_of(data: str):
    settings = ["data.sentences=4", "data.held_out=6", "data.validation=40"]
    return resolve(parse_set([f"data.source={data}", *settings]), depth=2)


def test_a_source_of_ones_own_makes_the_batches() -> None:
    with SOURCES.restored():
        source("mine", "mine:WORDS")(copied)
        dataset = load_data(config_of("mine:9").data, stack="encoder-decoder")
        batch = dataset.micro_batch(0)
        assert dataset.source_vocab == dataset.target_vocab == 14
        real = batch.inputs["source_mask"]
        assert (batch.inputs["source"][real] == batch.labels[batch.weight > 0]).all()
        for wrong in ("mine", "Mine:9", "mines:9"):
            with pytest.raises(UsageError, match=r"choose .*hf:.*, synthetic, text:SRC\[,TGT\] or mine:WORDS\."):
                load_data(config_of(wrong).data, stack="encoder-decoder")


def test_data_are_the_same_where_the_files_that_a_source_names_are(tmp_path: Path) -> None:
    with SOURCES.restored():
        source("words", "words:FILE", files=lambda spec, valid: {"data.source": Files((Path(spec),))})(copied)
        source("counted", "counted:WORDS")(copied)
        for name in ("a", "b", "c"):
            (tmp_path / name).write_text("other" if name == "c" else "same")
        a, b, c = (config_of(f"words:{tmp_path / name}") for name in ("a", "b", "c"))
        assert key_of(a) == key_of(b) != key_of(c)
        assert data_of(a).startswith("words:a@")
        assert key_of(config_of("counted:9")) != key_of(config_of("counted:8"))
        assert data_of(config_of("counted:9")) == "counted:9"


@pytest.mark.slow
def test_a_key_is_made_without_torch() -> None:
    check = (
        "import sys; from stabilitylab.sweep.identity import key_of; from stabilitylab.config import Config; "
        "key_of(Config()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_they_are_listed_with_their_forms(run) -> None:
    code, out, _ = run("list", "sources", "--json")
    listed = json.loads(out)["sources"]
    assert code == 0
    assert [*listed] == sorted(SOURCES)
    assert {"hf", "synthetic", "text"} <= listed.keys()
    assert listed["text"].startswith("text:SRC[,TGT]: Reads two local files")
    code, out, _ = run("list", "sources", "text")
    assert "Reads two local files of parallel text" in out
