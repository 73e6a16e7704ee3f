"""BLEU and chrF of a run's newest checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from ..config import Config, validated
from ..errors import InputError, UsageError
from ..store import Run
from ..store.evaluation import write_evaluation
from ..train import checkpoint, load_model
from ..train.environment import prepare_process, resolve_device
from . import translations
from .beam import translate

BATCH = 64  # sentences
EXAMPLES = 5
FORMULA = {"fairseq": "log p / len^{p:g}", "gnmt": "log p / ((5 + len) / 6)^{p:g}"}


def evaluate(
    path: str | Path,
    *,
    data: str | None = None,
    beam: int = 4,
    length_penalty: float = 0.6,
    penalty_kind: str = "fairseq",
    sentences: int | None = None,
    max_length: int | None = None,
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Translate the run's whole validation text, or ``data`` = "text:SRC,TGT", with its newest checkpoint; score it.

    References are the lines of the text, unchanged (the synthetic task: its words); hypotheses are detokenised. The
    model is that of its checkpoint: row ``row``, with that row's ``alpha``, in float32. ``sentences``: the number of
    first sentences to translate (None: all). ``max_length``: the tokens to which longer sources are cut. ``progress``
    is called with (sentences done, their total). Returns the content of RUN/evaluation.json; RUN/evaluation.tsv has the
    references and hypotheses. ``data`` is encoded in the run's vocabulary.
    Raises UsageError if the run is no encoder-decoder or an argument is wrong; InputError if it has no checkpoint, if
    its data have changed, or if its model no longer computes finite numbers.
    """
    path = Path(path)
    run, config = _opened(path)
    for name, value in (("sentences", sentences), ("max_length", max_length)):
        if value is not None and value < 1:
            raise UsageError(f"{name} = {value} must be at least 1.")
    prepare_process(config.train.threads)
    where = resolve_device(config.train.model_copy(update={"device": device}))
    model, dataset, row = load_model(run, where)
    passage = dataset.passage(data, max_length).head(sentences)

    started = time.perf_counter()
    hypotheses = [""] * len(passage)
    search = {"beam": beam, "length_penalty": length_penalty, "penalty_kind": penalty_kind}
    done = 0
    for places, source, mask in passage.batches(BATCH):
        found = translate(model, source.to(where), mask.to(where), **search)
        for place, hypothesis in zip(places, found, strict=True):
            hypotheses[place] = dataset.decode(hypothesis.ids)
        done += len(places)
        if progress is not None:
            progress(done, len(passage))
    seconds = time.perf_counter() - started

    hypotheses, references = translations.plain(hypotheses), translations.plain(passage.reference)
    shown = np.unique(np.linspace(0, len(passage) - 1, EXAMPLES).astype(int)).tolist()
    result = {
        **scores(hypotheses, references),
        **search,
        "score": FORMULA[penalty_kind].format(p=length_penalty) + ", len counts EOS",
        "alpha": model.schedule.least if model.schedule is not None else None,
        "row": row,
        "data": passage.name,
        "sentences": len(passage),
        "truncated": int(passage.truncated.sum()),  # sources longer than max_length, which were cut
        "max_length": passage.longest,
        "empty": sum(not line.strip() for line in hypotheses),
        "seconds": round(seconds, 3),
        "device": str(where),
        "examples": [
            {"source": passage.source[place], "reference": references[place], "hypothesis": hypotheses[place]}
            for place in shown
        ],
    }
    translations.write(path, references, hypotheses)
    write_evaluation(path, result)
    return result


def scores(hypotheses: list[str], references: list[str]) -> dict[str, Any]:
    """Return BLEU and chrF of the whole text, in percent, with the signatures that make them comparable (Post 2018)."""
    bleu, chrf = BLEU(), CHRF()
    found = bleu.corpus_score(hypotheses, [references])
    return {
        "bleu": float(found.score),
        "chrf": float(chrf.corpus_score(hypotheses, [references]).score),
        "signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
        "brevity_penalty": float(found.bp),
        "length_ratio": float(found.sys_len / max(found.ref_len, 1)),  # words of all hypotheses over the references'
    }


def _opened(path: Path) -> tuple[Run, Config]:
    run = Run.open(path)
    if "data" not in run.manifest or run.manifest.get("kind", "train") != "train":
        raise InputError(f"{path} holds no trained model: evaluate a run that stabilitylab probe has made.")
    config = validated(run.config)
    if config.model.stack != "encoder-decoder":
        raise UsageError(
            f"{path} trained a single stack ({config.model.stack}), which translates nothing: "
            "evaluate a run with model.stack = encoder-decoder."
        )
    if not checkpoint.found(path / "checkpoints"):
        raise InputError(f"{path} has no checkpoint to translate with: let the run end, or continue it with --resume.")
    return run, config
