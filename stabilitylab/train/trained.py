"""The model of a finished run: built as its configuration says, with the weights of its newest checkpoint."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..config import validated
from ..data import Dataset, load_data
from ..errors import InputError
from ..models import Transformer, build_model
from ..store import Run
from . import checkpoint

# Entries of run.json's ``data``. Another text has another vocabulary. Runs of older versions lack the validation text.
DIGESTS = ("train_sha256", "held_out_sha256", "validation_sha256", "tokenizer_sha256")


class TrainedModel(NamedTuple):
    """A model as a run left it, in evaluation mode. ``dataset``: the data on which it was trained. ``row``: the number
    of updates at its checkpoint."""

    model: Transformer
    dataset: Dataset
    row: int


def has_changed(dataset: Dataset, run: Run) -> bool:
    """True if a text of ``dataset`` differs from what ``run`` recorded of it. A digest that the run did not record is
    not compared."""
    now, then = dataset.describe(), run.manifest["data"]
    return any(now.get(key) != then[key] for key in DIGESTS if key in then)


def load_model(run: Run, device: torch.device | str = "cpu") -> TrainedModel:
    """Return the model of ``run``, a run of ``stabilitylab probe``, with the weights of its newest checkpoint.

    The model has the alpha of the checkpoint's row. Raises InputError if the run has no readable checkpoint, or if its
    data have changed.

    >>> model, dataset, row = load_model(sl.Run.open("runs/mine"))  # doctest: +SKIP
    """
    config, where = validated(run.config), torch.device(device)
    dataset = load_data(config.data, stack=config.model.stack)
    if has_changed(dataset, run):
        raise InputError(f"the data of {run.path} have changed since it was trained: restore them to use its model.")
    state = checkpoint.load(run.path / "checkpoints", where, run.identity)
    sizes = {"source_vocab": dataset.source_vocab, "target_vocab": dataset.target_vocab}
    model = build_model(config.model, **sizes).to(where)
    try:
        model.load_state_dict(state["model"])
        row = int(state["row"])
    except (KeyError, RuntimeError, TypeError) as error:
        raise InputError(
            f"the newest checkpoint of {run.path} does not belong to its configuration; remove it."
        ) from error
    model.set_row(row)
    return TrainedModel(model.eval(), dataset, row)
