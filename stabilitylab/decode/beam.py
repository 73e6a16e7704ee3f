"""Batched beam search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.corpus import BOS, EOS, MASK, PAD
from ..errors import InputError, UsageError
from ..models import Transformer
from .cache import CachedDecoder

NEVER = (PAD, BOS, MASK)  # no label of a translation is one of these
PENALTIES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "fairseq": lambda length: length,
    "gnmt": lambda length: (5 + length) / 6,  # Wu et al. 2016, Eq. 14
}


@dataclass(frozen=True)
class Hypothesis:
    """The translation of one sentence."""

    ids: list[int]  # ended by EOS
    score: float  # sum of log p of all ids, EOS too, over the length penalty
    log_p: float  # the sum itself, in nats


@torch.inference_mode()
def translate(
    model: Transformer,
    source: Tensor,  # (B, S) ids
    source_mask: Tensor | None = None,  # (B, S) True on real tokens
    *,
    beam: int = 4,
    length_penalty: float = 0.6,
    penalty_kind: str = "fairseq",
    max_length: int | None = None,
    stop_early: bool = True,
) -> list[Hypothesis]:
    """The best hypothesis of each sentence found by beam search, in eval mode; ``beam=1`` is greedy search.

    The score of a hypothesis of n ids, EOS counted, is its log p over n^length_penalty ("fairseq") or over
    ((5 + n) / 6)^length_penalty ("gnmt"). PAD, BOS and MASK are never generated (log p is that of the model, not
    renormalised without them); an empty translation, EOS alone, may be. A hypothesis has at most ``max_length`` ids,
    EOS counted: its last place can only hold EOS. Default: real tokens of its source + 50 (Vaswani et al. 2017,
    Sec. 6.1).

    As in fairseq, of the 2 ``beam`` best continuations the ``beam`` best without EOS go on, and those with EOS end a
    hypothesis if they are among the ``beam`` best. A sentence is finished when no open hypothesis can reach a score
    above that of the best ended one; with ``stop_early`` (fairseq's default) also when ``beam`` hypotheses have ended,
    which the first rule might still have improved upon. Among equal scores the earlier hypothesis, then the smaller
    id, comes first. Raises UsageError for wrong arguments, InputError where the model's output is NaN.
    """
    _check(beam, penalty_kind, max_length)
    limit = source.new_full((len(source),), source.shape[1]) if source_mask is None else source_mask.sum(dim=1)
    limit = limit + 50 if max_length is None else torch.full_like(limit, max_length)
    training = model.training
    model.eval()
    try:
        search = _Search(CachedDecoder(model, source, source_mask), limit, beam, length_penalty, penalty_kind)
        while search.unfinished:
            search.step(stop_early)
    finally:
        model.train(training)
    return [search.done[sentence] for sentence in range(len(source))]


class _Search:
    """The state of all unfinished sentences: B of them with K open hypotheses each, best first."""

    def __init__(self, decoder: CachedDecoder, limit: Tensor, beam: int, penalty: float, kind: str) -> None:
        device = limit.device
        self.decoder, self.beam, self.limit = decoder, beam, limit
        self.norm = lambda length: PENALTIES[kind](length.double()) ** penalty
        count = len(limit)
        self.length = 0  # ids of each open hypothesis
        self.sentence = torch.arange(count, device=device)  # (B,) places in the batch
        self.tokens = torch.full((count, beam, 1), BOS, device=device)  # (B, K, 1 + length)
        self.log_p = torch.full((count, beam), -torch.inf, dtype=torch.float64, device=device)
        self.log_p[:, 0] = 0  # the others are not there yet
        self.ended = torch.zeros(count, dtype=torch.int64, device=device)  # (B,) hypotheses
        self.best = torch.full((count,), -torch.inf, dtype=torch.float64, device=device)  # (B,) score of the best ended
        self.best_log_p = self.best.clone()
        self.best_ids = torch.full((count, int(limit.max()) if count else 0), PAD, device=device)
        self.done: dict[int, Hypothesis] = {}

    @property
    def unfinished(self) -> int:
        return len(self.sentence)

    def step(self, stop_early: bool) -> None:
        """One more token for every open hypothesis."""
        count, beam = self.tokens.shape[:2]
        log_p = self._continuations()  # (B, K, V)
        vocabulary = log_p.shape[2]
        self.length += 1
        values, places = best_of(log_p.flatten(1), 2 * beam)  # (B, 2 K)
        origin, token = places // vocabulary, places % vocabulary
        ends = token == EOS

        first = torch.arange(values.shape[1], device=values.device) < beam
        ending = ends & first & values.isfinite()
        self._end(ending, values, origin)

        order = ends.to(torch.int8).sort(dim=1, stable=True).indices[:, :beam]  # without EOS first, each best first
        self.log_p = values.masked_fill(ends, -torch.inf).gather(1, order)
        origin, token = origin.gather(1, order), token.gather(1, order)

        open_best = self.log_p[:, 0]
        reach = torch.maximum(  # log p only falls; the penalty grows with the length, or falls where its exponent is < 0
            open_best / self.norm(torch.full_like(open_best, self.length + 1)), open_best / self.norm(self.limit)
        )
        finished = (self.best >= reach) | (self.limit == self.length)
        if stop_early:
            finished |= self.ended >= beam
        for place in finished.nonzero().flatten().tolist():
            ids = self.best_ids[place].tolist()
            self.done[int(self.sentence[place])] = Hypothesis(
                ids[: ids.index(EOS) + 1], float(self.best[place]), float(self.best_log_p[place])
            )
        self._go_on((~finished).nonzero().flatten(), origin, token, all_of_them=len(finished) == count - 0)

    def _continuations(self) -> Tensor:
        logits = self.decoder.step(self.tokens[:, :, -1].flatten())
        if bool(logits.isnan().any()):
            raise InputError("the model's output is NaN: it has diverged and translates nothing; take an earlier one.")
        log_p = logits.log_softmax(dim=1).unflatten(0, self.log_p.shape)  # (B, K, V)
        log_p[:, :, NEVER] = -torch.inf
        last = (self.limit == self.length + 1)[:, None, None]
        only_end = torch.full_like(log_p[0, 0], -torch.inf)
        only_end[EOS] = 0
        log_p = torch.where(last, log_p + only_end, log_p)
        return self.log_p[:, :, None] + log_p
