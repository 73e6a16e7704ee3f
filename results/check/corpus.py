"""Checks models of the alarm's corpus (results/alarm, test half) before their first update.

    python results/check/corpus.py --data PATH/multi30k      # corpus.csv

Twice each: at the rate that step one has (``first``), and at the highest rate of the plan without a warm-up (``peak``),
which is how the table of results/alarm was made with the bounds of that time. GPT-2 and LLaMA: all runs. Reference
Transformers: the healthy twin of each, of one seed. What is there is not made again.
"""

from __future__ import annotations

import argparse
import csv
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "benchmarks" / "faults"), str(ROOT), str(HERE.parent)]
from families import UPDATES, Plan, plan  # noqa: E402
from judging import mask_of  # noqa: E402
from shared import Lines, rows_of  # noqa: E402
from subjects import dataset, student  # noqa: E402

import stabilitylab as sl  # noqa: E402

COLUMNS = ("run", "subject", "group", "at", "rate", "ok", "fails", "warns", "output change", "output moved")
CASES = ("first", "peak")
MODELS = ("gpt2", "llama")  # how the names of these subjects begin: all that the former bound failed in vain


def runs() -> list[dict[str, str]]:
    """Healthy ones and failures from within; GPT-2 and LLaMA first."""
    csv.field_size_limit(1 << 24)
    every = rows_of(ROOT / "results" / "alarm" / "runs.csv")
    found = [row for row in every if row["half"] == "test" and not row["at"] and not row["open"]]
    language = [row for row in found if row["subject"].startswith(MODELS)]
    return language + [row for row in found if row not in language and (row["family"], row["seed"]) == ("twin", "1")]


def checked(run: dict[str, str], text: Path) -> Iterator[dict[str, Any]]:
    seed = int(run["seed"])
    what: Plan = plan(run["family"], float(run["edge"]), float(run["strength"]), seed)
    data = dataset(run["subject"], seed + what.order, text)
    subject = student(run["subject"], seed, data, text)
    with torch.no_grad():
        subject.embedding.mul_(what.embedding)
    batch = data.micro_batch(0)
    real = batch.weight > 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(subject.logits(model, batch)[real], batch.labels[real])

    rates = {"first": what.rate(0), "peak": max(what.rate(row) for row in range(UPDATES))}
    for case in CASES:
        optimizer = torch.optim.AdamW(
            subject.model.parameters(), lr=rates[case], betas=what.betas, eps=what.eps, weight_decay=what.decay
        )
        found = sl.preflight(subject.model, batch, loss, optimizer, mask=mask_of(batch))
        row: dict[str, Any] = {"run": run["run"], "subject": run["subject"], "at": case, "ok": found.ok}
        row |= {"group": "failure" if run["failed"] else "healthy", "rate": f"{rates[case]:.4g}"}
        for severity in ("fail", "warn"):
            own = dict.fromkeys(one.bound for one in found.findings if one.severity == severity)
            row[f"{severity}s"] = "; ".join(own)
        row["output change"] = "".join(f"{one.value:.4g}" for one in found.checks if one.name == "output change")
        row["output moved"] = f"{max(found.numbers['moved'].values()):.4g}" if found.numbers["moved"] else ""
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of Multi30k")
    options = parser.parse_args()
    logging.getLogger("stabilitylab").setLevel(logging.ERROR)
    torch.set_flush_denormal(True)
    lines = Lines(HERE / "corpus.csv", COLUMNS)
    for run in runs():
        if not lines.has(run["run"]):
            lines.add(*checked(run, options.data))


if __name__ == "__main__":
    main()
