"""Batched beam search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.corpus import BOS, EOS, MASK, PAD
from ..errors import InputError, UsageError
from ..models import Transformer
from .cache import CachedDecoder

NEVER = [PAD, BOS, MASK]  # ids that are never a label of a translation
PENALTIES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "fairseq": lambda length: length,
    "gnmt": lambda length: (5 + length) / 6,  # Wu et al. 2016, Eq. 14
}


@dataclass(frozen=True)
class Hypothesis:
    """The translation of one sentence."""

    ids: list[int]  # the last one is EOS
    score: float  # log_p over the length penalty
    log_p: float  # sum of log p of all ids, EOS too, in nats


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
    """Return the best hypothesis of each sentence that beam search finds, without dropout; ``beam=1`` is greedy search.

    The score of n ids, EOS counted, is their log p over n^length_penalty ("fairseq") or over ((5 + n) /
    6)^length_penalty ("gnmt"). PAD, BOS and MASK are never generated (the other log p are the model's own, not
    renormalised); an empty translation, EOS alone, may be. A hypothesis has at most ``max_length`` ids, EOS counted:
    the last place can only hold EOS. Default: real tokens of its source + 50 (Vaswani et al. 2017, Sec. 6.1). A decoder
    with learned positions gives at most as many ids as it has positions.

    As in fairseq, of the best 2 ``beam`` continuations the best ``beam`` without EOS stay open, and those with EOS end
    a hypothesis if they are among the best ``beam``. A sentence is finished when no open hypothesis can exceed the
    score of the best ended one; with ``stop_early`` (fairseq's default) also once ``beam`` hypotheses have ended. Among
    equals the earlier hypothesis, then the smaller id, comes first. Raises UsageError for wrong arguments and
    InputError if the model's output is not finite.
    """
    _check(beam, penalty_kind, max_length)
    limit = source.new_full((len(source),), source.shape[1]) if source_mask is None else source_mask.sum(dim=1)
    limit = limit + 50 if max_length is None else torch.full_like(limit, max_length)
    training = model.training
    model.eval()
    try:
        decoder = CachedDecoder(model, source, source_mask)
        limit = limit if decoder.longest is None else limit.clamp(max=decoder.longest)
        search = _Search(decoder, limit, beam, length_penalty, penalty_kind)
        while search.unfinished:
            search.step(stop_early)
    finally:
        model.train(training)
    return [search.done[sentence] for sentence in range(len(source))]


class _Search:
    """The state of the search for all unfinished sentences: B sentences with K open hypotheses each, the best first."""

    def __init__(self, decoder: CachedDecoder, limit: Tensor, beam: int, penalty: float, kind: str) -> None:
        device, count = limit.device, len(limit)
        self.decoder, self.beam, self.limit = decoder, beam, limit
        self.norm = lambda length: PENALTIES[kind](length.double()) ** penalty
        self.length = 0  # ids of an open hypothesis
        self.sentence = torch.arange(count, device=device)  # (B,) its place in the batch
        self.tokens = torch.full((count, beam, 1), BOS, device=device)  # (B, K, 1 + length)
        self.log_p = torch.full((count, beam), -torch.inf, dtype=torch.float64, device=device)
        self.log_p[:, 0] = 0  # -inf: there is no such hypothesis
        self.ended = torch.zeros(count, dtype=torch.int64, device=device)  # (B,) hypotheses
        self.best_log_p = torch.full((count,), -torch.inf, dtype=torch.float64, device=device)  # (B,) of the ended
        self.best_score = self.best_log_p.clone()
        self.best_ids = torch.full((count, max(limit.tolist(), default=0)), PAD, device=device)
        self.done: dict[int, Hypothesis] = {}

    @property
    def unfinished(self) -> bool:
        return len(self.sentence) > 0

    def step(self, stop_early: bool) -> None:
        """Add one id to every open hypothesis."""
        log_p, origin, token = self._continuations()  # (B, 2 K) each, the best first
        self.length += 1
        ends = token == EOS
        in_beam = torch.arange(ends.shape[1], device=ends.device) < self.beam
        self._end(ends & in_beam & log_p.isfinite(), log_p, origin)

        open_first = ends.to(torch.int8).sort(dim=1, stable=True).indices[:, : self.beam]
        self.log_p = log_p.masked_fill(ends, -torch.inf).gather(1, open_first)  # (B, K)
        finished = (self.best_score >= self._reach()) | (self.limit == self.length)
        if stop_early:
            finished |= self.ended >= self.beam
        self._finish(finished.nonzero().flatten())
        self._go_on((~finished).nonzero().flatten(), origin.gather(1, open_first), token.gather(1, open_first))

    def _continuations(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (log p, the continued hypothesis, id) of the 2 K best continuations of each sentence."""
        logits = self.decoder.step(self.tokens[:, :, -1].flatten())  # (B K, V)
        total = logits.logsumexp(dim=1, keepdim=True)
        if not bool(total.isfinite().all()):
            raise InputError("the model's output is not finite, so it translates nothing: take an earlier checkpoint.")
        logits[:, NEVER] = -torch.inf
        last = (self.limit == self.length + 1).repeat_interleave(self.beam)
        other = torch.arange(logits.shape[1], device=logits.device) != EOS
        logits.masked_fill_(last[:, None] & other, -torch.inf)
        values, token = best_of(logits, 2 * self.beam)  # the best of each hypothesis include the best of the sentence
        log_p = self.log_p[:, :, None] + (values.double() - total).unflatten(0, self.log_p.shape)
        best, place = best_of(log_p.flatten(1), 2 * self.beam)
        return best, place // values.shape[1], token.view(len(best), -1).gather(1, place)

    def _end(self, ending: Tensor, log_p: Tensor, origin: Tensor) -> None:
        """Record the continuations of this step that are ``ending``, (B, 2 K), as ended hypotheses."""
        self.ended += ending.sum(dim=1)
        first = ending.to(torch.int8).argmax(dim=1, keepdim=True)  # all have one length: the first is the best
        new = log_p.gather(1, first)[:, 0].masked_fill(~ending.any(dim=1), -torch.inf)
        score = new / self.norm(torch.full_like(self.limit, self.length))
        better = score > self.best_score
        self.best_score = torch.where(better, score, self.best_score)
        self.best_log_p = torch.where(better, new, self.best_log_p)
        ids = F.pad(_take(self.tokens, origin.gather(1, first))[:, 0, 1:], (0, 1), value=EOS)  # (B, length)
        self.best_ids[:, : self.length] = torch.where(better[:, None], ids, self.best_ids[:, : self.length])

    def _reach(self) -> Tensor:
        """Return an upper bound of the score of an open hypothesis: further ids of log p 0, at the most favourable
        length."""
        best, shortest = self.log_p[:, 0], torch.full_like(self.limit, self.length + 1)
        return torch.maximum(best / self.norm(shortest), best / self.norm(self.limit))

    def _finish(self, sentences: Tensor) -> None:
        for place in sentences.tolist():
            ids = self.best_ids[place].tolist()
            score, log_p = float(self.best_score[place]), float(self.best_log_p[place])
            self.done[int(self.sentence[place])] = Hypothesis(ids[: ids.index(EOS) + 1], score, log_p)

    def _go_on(self, sentences: Tensor, origin: Tensor, token: Tensor) -> None:
        """Drop all but ``sentences``; their open hypotheses continue ``origin`` by ``token``, (B, K) each."""
        some = len(sentences) < len(self.sentence)
        origin = origin[sentences]
        self.decoder.keep((sentences[:, None] * self.beam + origin).flatten(), sentences if some else None)
        self.tokens = torch.cat([_take(self.tokens[sentences], origin), token[sentences][:, :, None]], dim=2)
        for name in ("sentence", "limit", "log_p", "ended", "best_score", "best_log_p", "best_ids"):
            setattr(self, name, getattr(self, name)[sentences])


def best_of(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest of each row (all, if there are fewer), descending, and their places: (R, N) -> (R,
    count).

    Among equal values those at the front come first; ``topk`` does not define their order.
    """
    count = min(count, values.shape[1])
    best, place = values.topk(min(count + 1, values.shape[1]), dim=1)
    left_out = best[:, count:]
    if bool(((left_out == best[:, count - 1 : count]) & left_out.isfinite()).any()):  # rare
        best, place = values.sort(dim=1, descending=True, stable=True)
    place, order = place[:, :count].sort(dim=1)
    best, order = best[:, :count].gather(1, order).sort(dim=1, descending=True, stable=True)
    return best, place.gather(1, order)


def _take(tokens: Tensor, hypotheses: Tensor) -> Tensor:
    """Return the tokens of chosen hypotheses: (B, K, T) tokens and (B, k) numbers of hypotheses -> (B, k, T)."""
    return tokens.gather(1, hypotheses[:, :, None].expand(-1, -1, tokens.shape[2]))


def _check(beam: int, penalty_kind: str, max_length: int | None) -> None:
    if beam < 1:
        raise UsageError(f"beam = {beam} must be at least 1.")
    if penalty_kind not in PENALTIES:
        raise UsageError(f"unknown length penalty {penalty_kind!r}; choose one of {', '.join(PENALTIES)}.")
    if max_length is not None and max_length < 1:
        raise UsageError(f"max_length = {max_length} must be at least 1 (an empty translation is one id, EOS).")
