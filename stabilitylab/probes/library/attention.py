"""Attention: the entropy of its weights and its largest logit, read where the softmax is taken, for any model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ..base import Numbers, Probe, probe, wide
from ..places.attending import KERNELS
from ..places.copied import Copied
from ..places.sites import Site, attentions
from ..rules import Max, Mean

MASKED = -9e3  # what masks add lies below (-inf, finfo.min, -1e4); position biases and logits lie above
SOFTMAX = {F.softmax, torch.softmax, torch.special.softmax, torch.Tensor.softmax}
_numbers = itertools.count(1)
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
    """The entropy of the attention weights and the largest logit of each attention module. ``entropy``: -sum_j A_ij log
    A_ij in nats, the mean over heads and real queries. ``entropy_min``: the same, but for each query only the head with
    the lowest entropy. ``ceiling``: the log of the number of keys that a query may see, which is the entropy of uniform
    attention. ``max_logit``: the largest q_i k_j / sqrt(d_h), with any bias added, over real queries, the keys that
    they may see, and heads. Zhai et al. 2023 (2303.06296); Dehghani et al. 2023 (2302.05442).

    Look for an entropy that falls to 0 while its ceiling stays. This is entropy collapse: each query copies one token,
    and gradients through the softmax vanish. Look also for a max_logit that grows from row to row, since this comes
    before a divergence.

    The numbers are exact, in float32 or in the model's wider type. While an attention module runs, the logits are
    recomputed from q, k and the mask of each call of ``F.scaled_dot_product_attention``, or they are taken from each
    softmax over the last dimension. If a kernel calls neither (flash-attn, FlexAttention), the row of the module is
    absent, and the log and the run name the module.

    A key counts as visible if its mask is above -9000; if only the sum of logit and mask is known, the sum has to be
    above -9000. A query that may see no key has entropy and ceiling 0. Several softmaxes of one call count as further
    heads. Several calls add up.

    Cost: the logits and weights of one module at a time, computed twice. The operators of the reference pass run
    through Python.
    """

    @staticmethod
    def caught(logits: torch.Tensor, allowed: torch.Tensor) -> Caught:
        """Return the numbers of each query's softmax, from its logits and from which of them are allowed."""
        seen = logits.masked_fill(~allowed, -torch.inf)
        keys = allowed.sum(-1).expand(logits.shape[:-1])
        entropy = torch.special.entr(seen.softmax(-1)).sum(-1)
        return {
            "entropy": torch.where(keys > 0, entropy, 0),  # without a key the softmax is 0 / 0
            "ceiling": keys.clamp(min=1).to(logits.dtype).log(),
            "max_logit": seen.amax(-1),
        }

    def __init__(self) -> None:
        self._running: list[tuple[nn.Module, list[Caught]]] = []  # attention modules under way, innermost last
        self._left: list[tuple[nn.Module, list[Caught]]] = []  # the one that ended last, if what measures comes after

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        if not (heads := self._heads(site, weight)):
            return {}
        caught = (torch.cat([each[n] for each in heads]) for n in ("entropy", "ceiling", "max_logit"))
        entropy, ceiling, logit = (self.all_heads(site, numbers) for numbers in caught)
        return {
            "entropy": entropy.mean(0),
            "entropy_min": entropy.amin(0),
            "ceiling": ceiling.mean(0),
            "max_logit": logit.amax(0),
        }

    def _heads(self, site: Site, weight: torch.Tensor) -> list[Caught]:
        """Return the numbers that were caught in the running module; without any, note the reason in ``missed``."""
        way = [each for each in (*self._running[-1:], *self._left) if each[0] is site.module]
        caught = way[0][1] if way else []
        heads = [found for each in caught if (found := by_head(each, site.module, weight, self.batch_first))]
        if not heads:
            self.missed.setdefault(site.name, why_unseen(site.module, bool(caught)))
        return heads

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
            with Softmaxes(self._catch, self.caught):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._running.clear()

    def _catch(self, attended: Callable[[], Caught]) -> None:
        if self._running:  # a softmax outside attention is a router's, or a loss's
            self._running[-1][1].append(attended())


@probe(
    "attention_heads",
    on="forward",
    at=attentions,
    unit="logits",
    columns={"max_logit": Max()},
    log=False,
)
class AttentionHeads(Attention):
    """The largest logit q_i k_j / sqrt(d_h) of each head in the training forwards, with any bias added: the maximum
    over real queries, the keys that they may see, micro-batches and ranks. Each head has a row of its own after the row
    of its module (``layers.3.attn.head_0``); the row of the module is the largest of its heads. Dehghani et al. 2023
    (2302.05442); Kimi Team 2025 (2507.20534, QK-clip).

    Look for one head that leaves the others behind, long before the mean of its layer shows it.

    This probe reads from the training batches what ``attention`` reads from the held-out batch, with the same limits.
    It sees fused kernels by their q, k and mask. It does not see FlexAttention, flash-attn or compiled code; the log
    and the run name such modules.

    Cost: in probed rows, the logits of one attention module at a time, computed a second time.
    """

    heads = True

    @staticmethod
    def caught(logits: torch.Tensor, allowed: torch.Tensor) -> Caught:
        """Return the largest logit of each query's keys."""
        return {"max_logit": logits.masked_fill(~allowed, -torch.inf).amax(-1)}

    def __init__(self) -> None:
        super().__init__()
        self._modes: list[Softmaxes] = []

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        if not (heads := self._heads(site, weight)):
            return {}
        return {  # each (H, B, T)
            name: self.all_heads(site, torch.cat([each[name] for each in heads])) for name in self.columns
        }

    @contextmanager
    def around(self, sites: Sequence[Site]) -> Iterator[None]:
        """Look for softmaxes inside attention modules alone, while they run."""
        modules = dict.fromkeys(site.module for site in sites)
        own = -next(_numbers)  # one number in all modules, or Dynamo would not let layers share what it compiles
        try:
            for module in modules:
                module._forward_pre_hooks[own] = Entering(self)
                module._forward_hooks[own] = Leaving(self)
                module._forward_hooks_always_called[own] = True
            yield
        finally:
            for module in modules:
                for hooks in (module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called):
                    hooks.pop(own, None)
            self.leave(None)
            self._left = []

    def enter(self, module: nn.Module) -> None:
        self._running.append((module, []))
        self._modes.append(Softmaxes(self._catch, self.caught))
        self._modes[-1].__enter__()

    def leave(self, module: nn.Module | None) -> None:
        """Leave one module, or all that a forward which failed has left."""
        while self._running and (module is None or self._running[-1][0] is module):
            self._modes.pop().__exit__(None, None, None)
            self._left = [self._running.pop()]
            if module is not None:
                break

    def _catch(self, attended: Callable[[], Caught]) -> None:
        with torch.no_grad():
            super()._catch(attended)


@probe(
    "attention_sink",
    on="forward",
    at=attentions,
    unit="share of attention",
    columns={"value": Mean(), "uniform": Mean()},
    log=False,
)
class AttentionSink(AttentionHeads):
    """The share of attention that falls on the first key, for each head in the training forwards
    (``layers.3.attn.head_0``). ``value``: A_i1, the attention of query i on the first key that it may see, the mean
    over real queries; the row of a module is the mean over its heads. ``uniform``: the share that uniform attention
    would put there, which is 1 / the number of keys that the query may see. Xiao et al. 2023 (2309.17453: attention
    sinks). The mean over all queries is the importance score of Gu et al. 2024 (2410.10781), who call a head above 0.3
    a sink.

    Look for heads that rest on the first token. Most heads of a trained causal model do. A sudden gain or loss of such
    heads goes with massive activations (``outliers``). Under a padding mask the first key is the first real token.
    Under a sliding window it is the oldest key of the window, which is not a sink.

    This probe sees the same modules as ``attention_heads``, and names those that it cannot see in the same way. The
    group "all" does not include this probe.

    Cost: in probed rows, the logits of one attention module at a time, computed a second time, and a logsumexp of them.
    """

    by_name = True

    @staticmethod
    def caught(logits: torch.Tensor, allowed: torch.Tensor) -> Caught:
        """Return each query's attention on its first key, and what uniform attention would put there."""
        allowed = allowed.expand(logits.shape)
        seen = logits.masked_fill(~allowed, -torch.inf)
        first = seen.gather(-1, allowed.int().argmax(-1, keepdim=True)).squeeze(-1)
        keys = allowed.sum(-1)
        share = (first - seen.logsumexp(-1)).exp()  # no softmax, which another probe would catch
        return {
            "value": torch.where(keys > 0, share, 0),  # without a key it is 0 / 0
            "uniform": torch.where(keys > 0, 1 / keys.clamp(min=1).to(logits.dtype), 0),
        }

    def over_heads(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.mean(0)


class Entering(Copied):
    """A hook before the forward of an attention module."""

    def __init__(self, probe: AttentionHeads) -> None:
        self._probe = probe

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and self._probe.awake:
            self._probe.enter(module)


class Leaving(Copied):
    """A hook behind the forward of an attention module, which runs even if the forward fails."""

    def __init__(self, probe: AttentionHeads) -> None:
        self._probe = probe

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._probe.leave(module)


class Softmaxes(TorchFunctionMode):
    """Shows each softmax over keys to ``catch`` before it is taken, and changes nothing. ``numbers``: what is to be
    known of the logits and of where they are allowed."""

    def __init__(
        self, catch: Callable[[Callable[[], Caught]], None], numbers: Callable[[torch.Tensor, torch.Tensor], Caught]
    ) -> None:
        super().__init__()
        self._catch, self._numbers = catch, numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._catch(lambda: self._numbers(*of_product(*args, **kwargs)))
        elif func in SOFTMAX and _over_last(*args, **kwargs):
            self._catch(lambda: self._numbers(*of_logits(kwargs["input"] if "input" in kwargs else args[0])))
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a call of ``F.scaled_dot_product_attention``, and which are allowed: query (..., H, T, d),
    key (..., H, L, d)."""
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
        return logits, allowed


def of_logits(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what enters a softmax, with masks added, and which entries are allowed: (..., T, L)."""
    # not >: NaN is no mask
    return logits.to(wide(logits)), ~(logits <= MASKED)


def why_unseen(module: nn.Module, caught: bool) -> str:
    """Return in words why the softmax of an attention module was not seen."""
    if caught:
        return "takes its softmax over other tokens than its output has"
    code = getattr(type(module).forward, "__code__", None)
    kernels = sorted(KERNELS.intersection(code.co_names)) if code is not None else []
    if kernels and kernels != ["scaled_dot_product_attention"]:
        return f"calls {' and '.join(k for k in kernels if k != 'scaled_dot_product_attention')}"
    return "takes its softmax in compiled code, or in a kernel that shows no logits"


def by_head(caught: Caught, module: nn.Module, weight: torch.Tensor, batch_first: bool | None = None) -> Caught:
    """Return the numbers as (heads, *tokens), the tokens in the layout of ``weight``; {} if the tokens are others.
    ``batch_first``: the caller's word for the layout, which counts where the sizes do not tell it."""
    first = next(iter(caught.values()))
    queries = first.shape[-1] if first.dim() else 0
    if not queries or not weight.numel() or weight.numel() % queries or first.numel() % weight.numel():
        return {}
    batch = weight.numel() // queries
    by_sentence = {name: value.reshape(batch, -1, queries).transpose(0, 1) for name, value in caught.items()}
    if weight.dim() == 2 and _sequence_first(module, weight, queries, batch_first):
        by_sentence = {name: value.transpose(1, 2) for name, value in by_sentence.items()}
    return {name: value.reshape(-1, *weight.shape) for name, value in by_sentence.items()}


def _over_last(input: torch.Tensor, dim: int | None = None, *rest: Any, **others: Any) -> bool:
    return input.dim() > 1 and dim in (-1, input.dim() - 1)


def _sequence_first(module: nn.Module, weight: torch.Tensor, queries: int, batch_first: bool | None) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return not module.batch_first
    if batch_first is False and weight.shape[0] == weight.shape[1]:
        return True
    return weight.shape[0] == queries != weight.shape[1]


_INLINED: dict[Any, Callable[..., Any]] = {}


def _inlined(function: Any) -> Callable[..., Any]:
    """Return a function of the same code that does not ask whether somebody overrides it."""
    if function not in _INLINED:
        names: Mapping[str, Any] = {**function.__globals__, "has_torch_function": lambda tensors: False}
        twin = FunctionType(function.__code__, dict(names), function.__name__, function.__defaults__)
        twin.__kwdefaults__ = function.__kwdefaults__
        _INLINED[function] = twin
    return _INLINED[function]
