"""An evaluation done again by hand: whole passes of the checkpoint's model, and the bootstrap from its definition."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch

from stabilitylab import decode
from stabilitylab.config import parse_set, resolve
from stabilitylab.data import load_data
from stabilitylab.data.corpus import BOS, EOS, MASK, PAD
from stabilitylab.decode import significance, translations
from stabilitylab.models import build_model
from stabilitylab.train import plan, start

STEPS, T = 4, 20
SETTINGS = (
    f"model.T={T} model.d_model=16 model.d_ffn=16 model.dropout=0.1 train.steps={STEPS} train.warmup=2 train.lr=3e-3 "
    "train.device=cpu data.sentences=8 data.held_out=9 data.vocab_size=80 probes.names=['none']"
)


class Silent:
    def opened(self, *_: object) -> None: ...

    def show(self, *_: object) -> None: ...


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["branchnorm", "admin", "preln"])
def test_greedy_translations_of_a_trained_run(arch: str, tmp_path: Path) -> None:
    config = resolve(parse_set([*SETTINGS.split(), f"model.arch={arch}"]), depth=2)
    with torch.enable_grad():
        path = start(plan(config), tmp_path, arch, Silent()).path
    result = decode.evaluate(path, beam=1, device="cpu")

    data = load_data(config.data, stack="encoder-decoder")
    model = build_model(config.model, source_vocab=data.source_vocab, target_vocab=data.target_vocab).eval()
    (file,) = (path / "checkpoints").iterdir()
    model.load_state_dict(torch.load(file, weights_only=True)["model"])
    model.set_row(STEPS)
    expected = []
    for row in data.held_out.inputs["source"]:
        source, ids = row[row != PAD][None], [BOS]
        while ids[-1] != EOS:
            logits = model(source=source, target=torch.tensor([ids]))[0, -1]
            logits[[PAD, BOS, MASK]] = -torch.inf
            ids.append(int(logits.argmax()) if len(ids) < source.shape[1] + 50 else EOS)
        expected.append(data.decode(ids))
    references = [data.decode(row.tolist()) for row in data.held_out.labels]
    assert translations.read(path) == (references, expected)
    assert result["bleu"] == sacrebleu.corpus_bleu(expected, [references]).score
    assert result["chrf"] == sacrebleu.corpus_chrf(expected, [references]).score
    assert result["alpha"] == {"branchnorm": (STEPS + 1) / T}.get(arch)


def test_p_is_that_of_the_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """p = (1 + resamples whose |difference| exceeds its mean by more than the whole text's) / (1 + resamples)."""
    sentences, resamples, draw = 20, 60, random.Random(0)
    monkeypatch.setattr(significance, "RESAMPLES", resamples)
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    references = [" ".join(draw.choices("abcdefghij", k=draw.randint(6, 12))) for _ in range(sentences)]
    systems = {}
    for name, right in (("a", 0.8), ("b", 0.75)):
        (tmp_path / name).mkdir()
        systems[name] = [" ".join(w if draw.random() < right else "z" for w in line.split()) for line in references]
        translations.write(tmp_path / name, references, systems[name])

    def bleu(name: str, index: np.ndarray) -> float:
        return sacrebleu.corpus_bleu([systems[name][i] for i in index], [[references[i] for i in index]]).score

    drawn = np.random.default_rng(7).choice(sentences, (resamples, sentences))
    samples = np.array([[bleu(name, index) for name in systems] for index in drawn])
    difference = np.abs(samples[:, 0] - samples[:, 1])
    whole = [bleu(name, np.arange(sentences)) for name in systems]
    p = (1 + np.sum(difference - difference.mean() > abs(whole[0] - whole[1]))) / (1 + resamples)
    assert 1 / (1 + resamples) < p < 1

    result = decode.paired(tmp_path / "a", tmp_path / "b")
    assert result["seed"] == 7
    assert result["systems"][1]["bleu"]["p"] == pytest.approx(p)
    for place, system in enumerate(result["systems"]):
        assert system["bleu"]["score"] == pytest.approx(whole[place])
        assert system["bleu"]["mean"] == pytest.approx(samples[:, place].mean(), rel=1e-5)
