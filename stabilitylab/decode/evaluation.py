"""BLEU and chrF of a run's checkpoint, and whether two runs differ."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config import validated
from ..data import load_data
from ..data.corpus import PAD
from ..errors import InputError, UsageError
from ..models import build_model
from ..store import Run
from ..store.files import replace_file
from ..train import checkpoint
from ..train.environment import prepare_process, resolve_device
from .beam import PenaltyKind, translate

BATCH = 32  # sentences
EXAMPLES = 5
RESULT, TRANSLATIONS = "evaluation.json", "evaluation.tsv"
RESAMPLES, SEED = 1000, 12345  # of the paired bootstrap; the seed is sacrebleu's own


def evaluate(
    path: Path,
    *,
    data: str | None = None,
    beam: int = 4,
    length_penalty: float = 0.6,
    penalty_kind: PenaltyKind = "fairseq",
    sentences: int | None = None,
    device: str = "auto",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Translate the run's validation text (or ``data`` = "text:SRC,TGT") with its newest checkpoint, and score it.

    Writes evaluation.json and evaluation.tsv (reference, hypothesis) into the run and returns what the former holds.
    References are the lines of the file; alpha is the checkpoint's. Raises UsageError for anything but an
    encoder-decoder, InputError where there is no checkpoint.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    run = Run.open(path)
    config = validated(run.config)
    if config.model.stack != "encoder-decoder":
        raise UsageError(f"{path} is a model with one stack ({config.model.stack}): only translation can be scored.")
    if data is not None:
        if not data.startswith("text:") or not config.data.source.startswith("text:"):
            raise UsageError("--data takes text:SRC,TGT, for a run that was trained on text:SRC,TGT.")
        config = config.model_copy(
            update={"data": config.data.model_copy(update={"valid": data.removeprefix("text:"), "held_out": 1})}
        )
    prepare_process(config.train.threads)
    where = resolve_device(config.train.model_copy(update={"device": device}))
    state = checkpoint.load(path / "checkpoints", where)
    dataset = load_data(config.data, stack=config.model.stack)
    model = build_model(config.model, source_vocab=dataset.source_vocab, target_vocab=dataset.target_vocab)
    model.load_state_dict(state["model"])
    model.to(where).set_row(state["row"])

    texts = dataset.test_set()
    count = min(len(texts.references), sentences or len(texts.references))
    order = np.argsort((texts.source[:count] != PAD).sum(1), kind="stable")  # like lengths stand together
    hypotheses: list[str] = [""] * count
    began = time.perf_counter()
    for first in range(0, count, BATCH):
        chosen = order[first : first + BATCH]
        rows = texts.source[chosen]
        rows = rows[:, : int((rows != PAD).sum(1).max())]
        source = torch.from_numpy(rows.astype(np.int64)).to(where)
        best = translate(
            model, source, source != PAD, beam=beam, exponent=length_penalty, penalty_kind=penalty_kind
        )  # fmt: skip
        for place, found in zip(chosen, best, strict=True):
            hypotheses[place] = dataset.decode(found[0].tokens) if found else ""
        progress(min(first + BATCH, count), count)
    seconds = time.perf_counter() - began

    references = texts.references[:count]
    bleu, chrf = BLEU(), CHRF()
    schedule = model.schedule
    result: dict[str, Any] = {
        "bleu": bleu.corpus_score(hypotheses, [references]).score,
        "chrf": chrf.corpus_score(hypotheses, [references]).score,
        "signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
        "beam": beam,
        "length_penalty": length_penalty,
        "penalty_kind": penalty_kind,
        "alpha": None if schedule is None else float(schedule.get()),
        "row": state["row"],
        "data": config.data.valid or f"{config.data.source}, held out",
        "sentences": count,
        "sentences_per_second": count / seconds,
        "examples": [
            {"source": dataset.decode_source(texts.source[i]), "reference": references[i], "hypothesis": hypotheses[i]}
            for i in range(min(EXAMPLES, count))
        ],
    }
    text = io.StringIO()
    table = csv.writer(text, delimiter="\t", lineterminator="\n")
    table.writerows([("reference", "hypothesis"), *zip(references, hypotheses, strict=True)])
    replace_file(path / TRANSLATIONS, text.getvalue().encode())
    replace_file(path / RESULT, (json.dumps(result, indent=2, ensure_ascii=False) + "\n").encode())
    return result


def paired(first: Path, *others: Path) -> dict[str, Any]:
    """Each other run against ``first`` by paired bootstrap resampling (Koehn 2004), as sacrebleu does it.

    Raises InputError where a run was not evaluated, or on another text.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.significance import PairedTest

    read = {path: _translations(path) for path in (first, *others)}
    references = [reference for reference, _ in read[first]]
    for path, rows in read.items():
        if [reference for reference, _ in rows] != references:
            raise InputError(f"{path} was evaluated on another text than {first}: evaluate both with the same --data.")
    named = [(str(path), [hypothesis for _, hypothesis in rows]) for path, rows in read.items()]
    test = PairedTest(
        named, {"BLEU": BLEU(references=[references])}, None, test_type="bs", n_samples=RESAMPLES
    )  # fmt: skip
    _, scores = test()
    return {
        "test": f"paired bootstrap, {RESAMPLES} resamples, seed {SEED}, against {first}",
        "systems": [
            {"run": name, "bleu": found.score, "mean": found.mean, "half_width": found.ci, "p": found.p_value}
            for (name, _), found in zip(named, scores["BLEU"], strict=True)
        ],
    }


def _translations(path: Path) -> list[tuple[str, str]]:
    try:
        with (path / TRANSLATIONS).open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file, delimiter="\t"))
    except OSError as error:
        raise InputError(f"{path} has no {TRANSLATIONS}: run 'stabilitylab evaluate {path}' first.") from error
    if rows[:1] != [["reference", "hypothesis"]] or any(len(row) != 2 for row in rows):
        raise InputError(f"{path / TRANSLATIONS} is damaged: evaluate the run again.")
    return [(reference, hypothesis) for reference, hypothesis in rows[1:]]
