"""What attention does: the entropy of its weights and its largest logit, of any model, read where softmax is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ..base import Numbers, Probe, probe, wide
from ..places.sites import Site, attentions
from ..rules import Max, Mean

MASKED = -9e3  # what masks add lies below (-inf, finfo.min, -1e4); position biases and logits lie above
SOFTMAX = {F.softmax, torch.softmax, torch.special.softmax, torch.Tensor.softmax}
Caught = dict[str, torch.Tensor]  # each (..., queries): the numbers of one softmax, over its keys


@probe(
    "attention",
    on="reference",
    at=attentions,
    unit={"entropy": "nats", "entropy_min": "nats", "ceiling": "nats", "max_logit": "logits"},
    columns={"entropy": Mean(), "entropy_min": Mean(), "ceiling": Mean(), "max_logit": Max()},
    log=False,
)
class Attention(Probe):
    """entropy: -sum_j A_ij log A_ij in nats, mean over heads and real queries; entropy_min: of each query's lowest
    head; ceiling: log of the number of keys that a query may see, which the entropy of uniform attention reaches.
    max_logit: largest q_i k_j / sqrt(d_h), any bias added, over real queries, the keys they may see, and heads. Zhai et
    al. 2023 (2303.06296); Dehghani et al. 2023 (2302.05442).

    Look for an entropy that falls to 0 while its ceiling stays (collapse: each query copies one token, and gradients
    through the softmax vanish), and for a max_logit that grows from row to row, which comes before a divergence.

    Exact, in float32 or the model's wider type: logits are recomputed from the q, k and mask of each call of
    ``F.scaled_dot_product_attention``, or taken from each softmax over the last dimension, while an attention module
    runs. A kernel that calls neither (flash-attn, FlexAttention) leaves its row absent. A key counts as one that may
    be seen if its mask (where only the sum is known: its logit) is above -9000; a query that may see none has entropy
    and ceiling 0. Several softmaxes of one call count as further heads, several calls add up.

    Cost: the logits and weights of one module at a time, twice; the reference pass runs its operators through Python.
    """

    def __init__(self) -> None:
        self._running: list[tuple[nn.Module, list[Caught]]] = []  # attention modules under way, innermost last

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        heads = [by_head(caught, site.module, weight) for caught in self._running[-1][1]]
        if not (heads := [each for each in heads if each]):
            return {}
        caught = (torch.cat([each[n] for each in heads]) for n in ("entropy", "ceiling", "max_logit"))
        entropy, ceiling, logit = (self.all_heads(site, numbers) for numbers in caught)
        return {
            "entropy": entropy.mean(0),
            "entropy_min": entropy.amin(0),
            "ceiling": ceiling.mean(0),
            "max_logit": logit.amax(0),
        }

    @contextmanager
    def around(self, sites: Sequence[Site]) -> Iterator[None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._running.append((module, []))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._running.pop()

        handles = []
        try:
            for site in sites:
                handles.append(site.module.register_forward_pre_hook(enter))
                handles.append(site.module.register_forward_hook(leave))  # behind the pass's own, which measures
            with Softmaxes(self._catch):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._running.clear()

    def _catch(self, attended: Callable[[], Caught]) -> None:
        if self._running:  # a softmax outside attention is a router's, or a loss's
            self._running[-1][1].append(attended())


class Softmaxes(TorchFunctionMode):
    """Shows each softmax over keys to ``catch`` before it is taken, and changes nothing."""

    def __init__(self, catch: Callable[[Callable[[], Caught]], None]) -> None:
        super().__init__()
        self._catch = catch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._catch(lambda: of_product(*args, **kwargs))
        elif func in SOFTMAX and _over_last(*args, **kwargs):
            self._catch(lambda: of_logits(kwargs["input"] if "input" in kwargs else args[0]))
        elif func is F.multi_head_attention_forward:
            with self:  # what it calls is seen only if it does not hand itself over to this mode again
                return _inlined(func)(*args, **kwargs)
        return func(*args, **kwargs)


def of_product(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Caught:
    """Takes the numbers of a call of ``F.scaled_dot_product_attention``: query (..., H, T, d), key (..., H, L, d)."""
    with torch.autocast(query.device.type, enabled=False):
        query, key = query.to(wide(query)), key.to(wide(key))
        if enable_gqa:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        logits = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        allowed = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device)
        if is_causal:
            allowed = allowed.tril()
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            allowed = allowed & attn_mask
        elif attn_mask is not None:
            allowed = allowed & (attn_mask > MASKED)
            logits = logits + attn_mask
        return _over_keys(logits, allowed)


def of_logits(logits: torch.Tensor) -> Caught:
    """Takes the numbers of what enters a softmax, masks added: (..., T, L)."""
    # not >: NaN is no mask
    return _over_keys(logits.to(wide(logits)), ~(logits <= MASKED))


def by_head(caught: Caught, module: nn.Module, weight: torch.Tensor) -> Caught:
    """The numbers as (heads, *tokens), the tokens in the layout of ``weight``; empty if they are not its tokens."""
    queries = caught["entropy"].shape[-1] if caught["entropy"].dim() else 0
    if not queries or weight.numel() % queries or caught["entropy"].numel() % weight.numel():
        return {}
    batch = weight.numel() // queries
    by_sentence = {name: value.reshape(batch, -1, queries).transpose(0, 1) for name, value in caught.items()}
    if weight.dim() == 2 and _sequence_first(module, weight, queries):
        by_sentence = {name: value.transpose(1, 2) for name, value in by_sentence.items()}
    return {name: value.reshape(-1, *weight.shape) for name, value in by_sentence.items()}


def _over_keys(logits: torch.Tensor, allowed: torch.Tensor) -> Caught:
    seen = logits.masked_fill(~allowed, -torch.inf)
    keys = allowed.sum(-1).expand(logits.shape[:-1])
    entropy = torch.special.entr(seen.softmax(-1)).sum(-1)
    return {
        "entropy": torch.where(keys > 0, entropy, 0),  # without a key the softmax is 0 / 0
        "ceiling": keys.clamp(min=1).to(logits.dtype).log(),
        "max_logit": seen.amax(-1),
    }


def _over_last(input: torch.Tensor, dim: int | None = None, *rest: Any, **others: Any) -> bool:
    return input.dim() > 1 and dim in (-1, input.dim() - 1)


def _sequence_first(module: nn.Module, weight: torch.Tensor, queries: int) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return not module.batch_first
    return weight.shape[0] == queries != weight.shape[1]


_INLINED: dict[Any, Callable[..., Any]] = {}


def _inlined(function: Any) -> Callable[..., Any]:
    """The same code, that does not ask whether somebody overrides it."""
    if function not in _INLINED:
        names: Mapping[str, Any] = {**function.__globals__, "has_torch_function": lambda tensors: False}
        twin = FunctionType(function.__code__, dict(names), function.__name__, function.__defaults__)
        twin.__kwdefaults__ = function.__kwdefaults__
        _INLINED[function] = twin
    return _INLINED[function]
