"""The reference Transformer as the subject of a search, with the batches, losses and schedule of a training run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import Config, ModelConfig
from ..data import Dataset, load_data
from ..errors import UsageError
from ..labels import label
from ..models import Transformer, build_model
from ..models.groups import groups_of
from ..train.passes import Passes
from ..train.recipe import learning_rate, optimizer_of, param_groups, token_losses
from .subject import RateSubject, TrialModel


def reference_subject(config: Config, dataset: Dataset, device: torch.device) -> RateSubject:
    """Return the subject of a search for ``config``. Its horizon is ``train.steps``. A trial has the initial weights,
    sentences and updates of a run of ``stabilitylab probe`` with the same rate and seed.

    The parts of the held-out loss are sentences, weighted by their tokens.
    """
    train = config.train

    @lru_cache(maxsize=4)
    def dataset_of(seed: int) -> Dataset:
        if seed == config.data.seed:
            return dataset
        return load_data(config.data.model_copy(update={"seed": seed}), stack=config.model.stack)

    def make(seed: int) -> TrialModel:
        own = dataset_of(seed)
        sizes = {"source_vocab": own.source_vocab, "target_vocab": own.target_vocab}
        model = build_model(config.model, **sizes, seed=seed).to(device)
        torch.manual_seed(seed)  # dropout
        model.calibrate(**own.micro_batch(0, 0, train.accumulate).to(device).inputs)
        model.set_row(0)
        optimizer = optimizer_of(train, param_groups(train, groups_of(model)))
        factors = tuple(group.get("rate_factor", 1.0) for group in optimizer.param_groups)
        return TrialModel(model, (optimizer,), (factors,))

    def losses(model: nn.Module, t: int, seed: int) -> Iterator[Tensor]:
        own = dataset_of(seed)
        batches = [own.micro_batch(t, index, train.accumulate).to(device) for index in range(train.accumulate)]
        tokens = sum(batch.tokens for batch in batches)
        for batch in batches:
            with passes_of(model).autocast():
                logits = model(**batch.inputs)
            yield token_losses(logits, batch.labels, batch.weight, train.label_smoothing)[0] / tokens

    latest: list[Passes] = []  # of the model of the present trial

    def passes_of(model: nn.Module) -> Passes:
        assert isinstance(model, Transformer)
        if not latest or latest[0].model is not model:
            first = dataset.micro_batch(0, 0, train.accumulate)
            latest[:] = [Passes(config, dataset, device, model, model, None, lambda: first, lambda: [first])]
        return latest[0]

    def held_out(model: nn.Module) -> Sequence[float]:
        batch = passes_of(model).held_out
        with passes_of(model).autocast():
            logits = model(**batch.inputs)
        nll = F.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten(), reduction="none")
        sums = (nll.view_as(batch.weight) * batch.weight).sum(dim=1).double()  # (B,)
        return (sums * len(sums) / batch.tokens).tolist()

    def worth(model: nn.Module) -> float | None:
        found = passes_of(model).source().get("source_worth")
        return None if found is None else float(found)

    def rate_at(peak: float, t: int, warmup: int) -> float:
        return learning_rate(train.model_copy(update={"lr": peak, "warmup": warmup}), t)

    return RateSubject(
        name=label(config.model),
        make=make,
        losses=losses,
        rate_at=rate_at,
        rate=train.lr,
        rates=(train.lr,),
        held_out=held_out,
        enter=lambda model, t: model.set_row(t),  # pyright: ignore[reportCallIssue]
        warmup=train.warmup,
        clipping=train.clip_norm,
        source_worth=worth,
        manifest={"unigram": asdict(dataset.unigram), "data": dataset.describe()},
        measured="held_out_nll",
        config=config.model_dump(mode="json"),
    )


def sizes(width: int, of: ModelConfig) -> dict[str, int]:
    """Return the sizes of a model of another width. Feed-forward blocks and heads keep their proportion to the width.
    Raises UsageError if they cannot."""
    ffn, heads = of.d_ffn * width / of.d_model, of.heads * width / of.d_model
    if ffn != int(ffn) or heads != int(heads) or width % max(1, int(heads)):
        raise UsageError(
            f"width {width} does not allow blocks and heads in the proportion {of.d_model}-{of.d_ffn}-{of.heads}: give "
            f"a multiple of {of.d_model // of.heads}, the width of a head."
        )
    return {"d_model": width, "d_ffn": int(ffn), "heads": int(heads)}
