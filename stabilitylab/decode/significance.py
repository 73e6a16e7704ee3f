"""A test if the scores of two runs differ by more than the random choice of test sentences explains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest, Result

from ..errors import InputError, UsageError
from . import translations

RESAMPLES = 1000
NAMES = {"bleu": "BLEU", "chrf": "chrF2"}  # our names and sacrebleu's


def paired(a: str | Path, b: str | Path, *more: str | Path) -> dict[str, Any]:
    """Compare BLEU and chrF of every run with the first, ``a``, by paired bootstrap resampling (Koehn 2004).

    The input is the result of ``evaluate``. For each system: the score, and the mean and half width of its 95 %
    interval over the resamples. Every system but the first also has the two-sided p that its difference to the first is
    chance. Sacrebleu computes these numbers; p is 1 if both systems gave the same translations. Raises UsageError for
    a run given twice, InputError if a run was not evaluated or was evaluated on other references.
    """
    paths = [Path(path) for path in (a, b, *more)]
    if len({path.resolve() for path in paths}) < len(paths):
        raise UsageError("a run cannot be compared with itself: name each run once.")
    read = [translations.read(path) for path in paths]
    references = read[0][0]
    for path, (other, _) in zip(paths, read, strict=True):
        if other != references:
            raise InputError(
                f"{path} was not evaluated on the same references as {paths[0]}: "
                "evaluate both with the same --data and --sentences."
            )
    systems: list[tuple[str, Sequence[str]]] = [
        (str(path), hypotheses) for path, (_, hypotheses) in zip(paths, read, strict=True)
    ]
    metrics = {"BLEU": BLEU(), "chrF2": CHRF()}
    test = PairedTest(systems, metrics, [references], test_type="bs", n_samples=RESAMPLES)
    signatures, scores = test()
    seed = signatures["BLEU"].info["seed"]  # 12345, or SACREBLEU_SEED of the environment
    return {
        "test": "paired bootstrap",
        "resamples": RESAMPLES,
        "seed": int(seed) if seed.isdigit() else seed,
        "baseline": str(paths[0]),
        "sentences": len(references),
        "signature": str(signatures["BLEU"]),
        "chrf_signature": str(signatures["chrF2"]),
        "systems": [
            {"run": str(path)}
            | {key: _numbers(scores[name][place], read[place][1] == read[0][1]) for key, name in NAMES.items()}
            for place, path in enumerate(paths)
        ],
    }


def _numbers(result: str | Result, alike: bool) -> dict[str, float | None]:
    """Return the numbers of a system. ``alike``: all its hypotheses are the baseline's; p is None for the baseline
    itself."""
    values = {"score": "score", "mean": "mean", "half_width": "ci", "p": "p_value"}
    found = {name: getattr(result, attribute) for name, attribute in values.items()}
    if alike and found["p"] is not None:
        found["p"] = 1.0  # sacrebleu counts resamples that differ by more than 0 and would say 1 / 1001
    return {name: None if value is None else float(value) for name, value in found.items()}
