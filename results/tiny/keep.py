"""What is kept of a run beside its line in the ledger: small tables, from which figures and claims can be checked."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from stabilitylab.config import validated
from stabilitylab.data import Dataset, load_data
from stabilitylab.data.corpus import PAD
from stabilitylab.diagnose import diagnose
from stabilitylab.lr_find import Choice
from stabilitylab.models import build_model
from stabilitylab.probes.library.rank import likeness
from stabilitylab.store import Run
from stabilitylab.sweep.rates import TRIAL, trials
from stabilitylab.train import checkpoint

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


def beginning(run: Run, out: Path) -> None:
    """``beginning.csv``: gradient norm of all parameters and of those outside the branches, and training loss, of
    every row."""
    names = ["step", "grad_norm_total", "grad_norm_nonbranch", "nll"]
    data = run.metrics[names].dropna()
    _append(out / "beginning.csv", names, run, data.itertuples(index=False, name=None))


def restored(run: Run) -> tuple[torch.nn.Module, Dataset]:
    """The model of the newest checkpoint, in evaluation, and its data."""
    config = validated(run.config)
    dataset = load_data(config.data, stack=config.model.stack)
    model = build_model(config.model, source_vocab=dataset.source_vocab, target_vocab=dataset.target_vocab)
    state = checkpoint.load(run.path / "checkpoints", torch.device("cpu"))
    model.load_state_dict(state["model"])
    model.set_row(int(state["row"]))
    return model.eval(), dataset


@torch.inference_mode()
def sentences(run: Run, out: Path) -> None:
    """``sentences.csv``: the loss of each validation sentence [nats, summed over its tokens] after training, of the
    newest checkpoint; the first line has their numbers of tokens."""
    model, dataset = restored(run)
    losses: list[float] = []
    tokens: list[float] = []
    for batch in dataset.validation():
        logits = model(**batch.inputs).float()
        each = F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none") * batch.weight
        real = batch.weight.sum(1) > 0
        losses += each.sum(1)[real].tolist()
        tokens += batch.weight.sum(1)[real].tolist()
    path = out / "sentences.csv"
    columns = tuple(f"s{place}" for place in range(len(losses)))
    if not path.exists():
        _write(path, [(*WHICH, *columns), (*["tokens"] * len(WHICH), *map(int, tokens))])
    _write(path, [(*which(run), *(f"{loss:.{DIGITS}g}" for loss in losses))])


@torch.inference_mode()
def source(run: Run, out: Path) -> None:
    """``source.csv``: the validation loss [nats/token] after training, with each sentence's own source and with that of
    another one, the next of its batch (sentences are sorted by length, so that it is about as long); and how alike the
    encoder leaves a sentence's tokens: the mean of 1 - cosine of a token with the others, as probe ``rank`` has it."""
    model, dataset = restored(run)
    left: list[torch.Tensor] = []
    encoder: Any = model.encoder
    encoder.layers[-1].register_forward_hook(lambda *given: left.append(given[-1]))
    sums, tokens, apart, words = [0.0, 0.0], 0.0, 0.0, 0
    for batch in dataset.validation():
        for place, inputs in enumerate((batch.inputs, batch.of_other_sources())):
            logits = model(**inputs).float()
            each = F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")
            sums[place] += float((each * batch.weight).sum())
        here = batch.inputs["source"] != PAD
        hidden = torch.where(here[..., None], left[-2].double(), 0)
        apart += float((1 - likeness(hidden, here)[0])[here].sum())
        words += int(here.sum())
        tokens += float(batch.weight.sum())
    _append(out / "source.csv", ("own", "other", "apart"), run, [(*(each / tokens for each in sums), apart / words)])


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
    header = (*WHICH, *columns)
    if not path.exists():
        _write(path, [header])
    with path.open(newline="") as file:
        if tuple(known := next(csv.reader(file), [])) != header:
            raise SystemExit(f"{path} has the columns {','.join(known)}, not {','.join(header)}: move it away first.")
    made = [(*which(run), *(f"{x:.{DIGITS}g}" if isinstance(x, float) else x for x in row)) for row in rows]
    if short := next((row for row in made if len(row) != len(header)), None):
        raise ValueError(f"a row of {path.name} has {len(short)} cells, and its header {len(header)}: {short}")
    _write(path, made)


def _write(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    with path.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def has(path: Path, run: Run) -> bool:
    """Does the table hold this run?"""
    if not path.exists():
        return False
    with path.open(newline="") as file:
        return any(tuple(row[: len(WHICH)]) == tuple(map(str, which(run))) for row in csv.reader(file))
