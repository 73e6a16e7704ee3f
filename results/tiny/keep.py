"""What is kept of a run beside its line in the ledger: small tables, from which figures and claims can be checked."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))

from shared import Lines, rows_of

from stabilitylab.config import validated
from stabilitylab.diagnose import diagnose
from stabilitylab.lr_find import Choice
from stabilitylab.store import Run
from stabilitylab.sweep import TRIAL, trials
from stabilitylab.train import load_model

WHICH = ("arm", "layers", "seed", "lr", "T", "updates")  # layers a side
DIGITS = 6  # significant ones of what is kept


def which(run: Run) -> tuple[Any, ...]:
    config = validated(run.config)
    model, train = config.model, config.train
    return run.manifest["label"], model.encoder_layers, train.seed, train.lr, model.T, train.steps


def course(run: Run, out: Path) -> None:
    """``course.csv``: the loss of the held-out batch (24 sentences) wherever it was measured."""
    data = run.metrics[["step", "held_out_nll"]].dropna()
    _append(out / "course.csv", ("step", "held_out_nll"), run, data.itertuples(index=False, name=None))


def reading(run: Run, out: Path) -> None:
    """``reading.csv``: wherever the held-out batch was measured, its loss [nats/token], by how much another sentence's
    source raises it, and 1 - cosine of the encoder's tokens with those of their own sentence and of others: the
    course on which a dip towards a constant encoder and the way back are seen."""
    names = ["step", "held_out_nll", "source_worth", "encoder_distance_within", "encoder_distance_between"]
    data = run.metrics[names].dropna(subset=["held_out_nll"])
    _append(out / "reading.csv", names, run, data.itertuples(index=False, name=None))


def reading_course(run: Run, out: Path) -> None:
    """``reading_course.csv``: of a run of the map of collapse, with its warm-up, wherever the held-out batch was
    measured: by how much another sentence's source raises the loss [nats/token], and 1 - cosine of the encoder's tokens
    with those of other sentences."""
    names = ["step", "source_worth", "encoder_distance_between"]
    data = run.metrics[names].dropna(subset=["source_worth"])
    warmup = validated(run.config).train.warmup
    rows = ((warmup, *row) for row in data.itertuples(index=False, name=None))
    _append(out / "reading_course.csv", ("warmup", *names), run, rows)


def layers(run: Run, out: Path) -> None:
    """``layers.csv``: cosine with the layer below and share of activations that are not 0, of every layer, at the
    beginning, where the ramp ends, and after training."""
    ramp = validated(run.config).train.warmup  # that of T too
    cosine = run.frame("cosine_similarity", columns=["raw"], by="layer")
    nonzero = run.frame("activation_sparsity", columns=["nonzero_fraction"], by="layer")
    keys = ["step", "stack_name", "layer"]
    data = cosine.merge(nonzero, on=keys)[[*keys, "raw", "nonzero_fraction"]]
    steps = np.unique(data["step"])
    chosen = {steps[0], steps[np.abs(steps - ramp).argmin()], steps[-1]}
    rows = data[data["step"].isin(chosen)].itertuples(index=False, name=None)
    _append(out / "layers.csv", ("step", "stack_name", "layer", "cosine", "nonzero_fraction"), run, rows)


def activity(run: Run, out: Path) -> None:
    """``activity.csv``: the share of activations that are not 0, the mean over the layers of each stack, at every
    row."""
    data = run.frame("activation_sparsity", columns=["nonzero_fraction"], by="layer")
    means = data.pivot_table("nonzero_fraction", "step", "stack_name", aggfunc="mean").reset_index()
    rows = means[["step", "encoder", "decoder"]].itertuples(index=False, name=None)
    _append(out / "activity.csv", ("step", "encoder", "decoder"), run, rows)


def shares(run: Run, out: Path) -> None:
    """``shares.csv``: beta_ii^2 of every layer after training: the branch's share of the variance of the norm's input,
    the mean over the layer's sub-layers."""
    data = run.frame("branch_variance", columns=["branch", "total"])
    data = data[data["step"] == data["step"].max()]
    own = (data["branch"] / data["total"]).groupby([data["stack_name"], data["layer"]]).mean().reset_index()
    _append(out / "shares.csv", ("stack_name", "layer", "share"), run, own.itertuples(index=False, name=None))


def beginning(run: Run, out: Path) -> None:
    """``beginning.csv``: gradient norm of all parameters and of those outside the branches, and training loss, of
    every row."""
    names = ["step", "grad_norm_total", "grad_norm_nonbranch", "nll"]
    data = run.metrics[names].dropna()
    _append(out / "beginning.csv", names, run, data.itertuples(index=False, name=None))


@torch.inference_mode()
def sentences(run: Run, out: Path) -> None:
    """``sentences.csv``: the loss of each validation sentence [nats, summed over its tokens] after training, of the
    newest checkpoint; the first line has their numbers of tokens."""
    model, dataset, _ = load_model(run)
    losses: list[float] = []
    tokens: list[float] = []
    for batch in dataset.validation():
        logits = model(**batch.inputs).float()
        each = F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none") * batch.weight
        real = batch.weight.sum(1) > 0
        losses += each.sum(1)[real].tolist()
        tokens += batch.weight.sum(1)[real].tolist()
    lines = Lines(out / "sentences.csv", (*WHICH, *(f"s{place}" for place in range(len(losses)))))
    if not lines.path.exists():
        lines.add((*["tokens"] * len(WHICH), *map(int, tokens)))
    lines.add((*which(run), *(f"{loss:.{DIGITS}g}" for loss in losses)))


@torch.inference_mode()
def source(run: Run, out: Path) -> None:
    """``source.csv``: the validation loss [nats/token] after training, with each sentence's own source and with that of
    another one, the next of its batch (sentences are sorted by length, so that it is about as long); and how alike the
    encoder leaves a sentence's tokens: the mean of 1 - cosine of a token with the others, as probe ``rank`` has it."""
    model, dataset, _ = load_model(run)
    left: list[torch.Tensor] = []
    encoder: Any = model.encoder
    encoder.layers[-1].register_forward_hook(lambda *given: left.append(given[-1]))
    sums, tokens, apart, words = [0.0, 0.0], 0.0, 0.0, 0
    for batch in dataset.validation():
        for place, inputs in enumerate((batch.inputs, batch.of_other_sources())):
            logits = model(**inputs).float()
            each = F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")
            sums[place] += float((each * batch.weight).sum())
        here = batch.inputs["source_mask"]
        hidden = torch.where(here[..., None], left[-2].double(), 0)
        apart += float((1 - token_cosine(hidden, here))[here].sum())
        words += int(here.sum())
        tokens += float(batch.weight.sum())
    _append(out / "source.csv", ("own", "other", "apart"), run, [(*(each / tokens for each in sums), apart / words)])


def token_cosine(hidden: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """(B, T, D), zeros on padding -> of each token the mean cosine with the others of its sentence, (B, T)."""
    count = real.sum(1)[:, None].double()
    units = torch.where(real[..., None], hidden / torch.linalg.vector_norm(hidden, dim=-1)[..., None], 0)
    others = (units * units.sum(1, keepdim=True)).sum(-1) - 1
    return torch.where(count > 1, others / (count - 1), 1)


def collapse(run: Run, out: Path) -> None:
    """``collapse.csv``: what ``diagnose`` says of rank collapse, an event a line; one without a stack where it says
    nothing."""
    names = ("stack", "sublayer", "begun", "until", "severity", "places")
    rows = [
        (event.place.stack, event.place.sublayer, event.step, event.until, event.severity, event.places)
        for event in diagnose(run).events
        if event.kind == "rank_collapse" and event.place is not None
    ]
    _append(out / "collapse.csv", names, run, rows or [("",) * len(names)])


def choice(out: Path, arm: str, layers: int, found: Choice) -> None:
    """``rungs-choice.csv``: every trial of the search for the rate of an arm; ``rungs-notes.md``: what is unsure."""
    table, notes = out / "rungs-choice.csv", out / "rungs-notes.md"
    columns = ("arm", "layers", *TRIAL)
    known = pd.read_csv(table, dtype=str, keep_default_na=False) if table.exists() else pd.DataFrame(columns=columns)
    own = (known["arm"] == arm) & (known["layers"] == str(layers))
    new = pd.DataFrame([(arm, str(layers), *row) for row in trials(found)], columns=columns)
    pd.concat([known[~own], new]).to_csv(table, index=False, lineterminator="\n")
    heading = f"## {arm}, {layers} layers a side"
    sections = notes.read_text().split("\n\n## ") if notes.exists() else ["# The search for the rates"]
    sections = [section for section in sections if not heading.endswith(section.split("\n")[0])]
    rate = (
        f"The rate is {found.rate:g}."
        if found.rate
        else f"No rate is eligible; the lowest loss is at {found.lowest:g}."
    )
    lines = "\n".join(f"- {sentence}" for sentence in (rate, *found.notes))
    notes.write_text("\n\n## ".join([*(each.strip() for each in sections), f"{heading[3:]}\n\n{lines}"]) + "\n")


def _append(path: Path, columns: Sequence[str], run: Run, rows: Iterable[Sequence[Any]]) -> None:
    made = ((f"{x:.{DIGITS}g}" if isinstance(x, float) else x for x in row) for row in rows)
    Lines(path, (*WHICH, *columns)).add(*((*which(run), *row) for row in made))


def has(path: Path, run: Run) -> bool:
    """Does the table hold this run? A table with the column ``warmup`` holds runs that differ in nothing else."""
    known = dict(zip(WHICH, map(str, which(run)), strict=True)) | {"warmup": str(validated(run.config).train.warmup)}
    return any(all(row[name] == cell for name, cell in known.items() if name in row) for row in rows_of(path))
