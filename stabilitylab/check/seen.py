"""The record of one pass of a loss: its cross-entropies, the model's output, and the inputs that have a gradient."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

UNSEEN = "no embedding was seen to take tokens of the batch"
AT_ONCE = 1 << 22  # logits that are copied in float64 at a time
PREFERRED = ("logits", "prediction_logits", "lm_logits", "last_hidden_state", "sample")  # main outputs of models
DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
SIGNATURES = {
    func: inspect.signature(func) for func in (*DROPOUTS, F.cross_entropy, F.nll_loss, F.multi_head_attention_forward)
}


@dataclass(frozen=True)
class CrossEntropy:
    """A call of ``cross_entropy`` or ``nll_loss``: ``logits`` (N, C), ``target`` (N,) of classes, or (N, C) of
    probabilities; ``counted`` (N,): True for targets that are not ignored. ``shape``: the original shape of the
    target."""

    logits: Tensor
    target: Tensor
    counted: Tensor
    shape: tuple[int, ...]

    @property
    def classes(self) -> int:
        return self.logits.shape[1]

    def losses(self) -> Tensor:
        """Return the loss of each target that counts [nats], without weights or smoothing, float64."""
        if self.target.is_floating_point():
            parts = [F.cross_entropy(own.double(), goal.double(), reduction="none") for own, goal in self._parts()]
            return torch.cat(parts)[self.counted]
        return self.log_sums[self.counted] - self.picked(self.target)[self.counted]

    @cached_property
    def log_sums(self) -> Tensor:
        """Return log sum exp of the logits of each target, float64."""
        return torch.cat([own.double().logsumexp(dim=1) for own, _ in self._parts()])

    def picked(self, classes: Tensor) -> Tensor:
        """Return the logit of one class of each target, float64; for a number that is no class, the logit of any
        class."""
        return self.logits.gather(1, classes.clamp(0, self.classes - 1).long()[:, None])[:, 0].double()

    def rows(self) -> list[slice]:
        """Return slices of so few rows that all logits of a slice may be copied."""
        step = max(1, AT_ONCE // self.classes)
        return [slice(at, at + step) for at in range(0, len(self.logits), step)]

    def _parts(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.logits[rows], self.target[rows]) for rows in self.rows()]


@dataclass
class Seen:
    """The record of a pass. ``output``: the main tensor that the model returned, None if it returned its loss alone or
    was not called itself. ``tokens``: (indices, leaf) of each embedding whose indices come from the batch; ``floats``:
    the leaves in place of the batch's own floating-point tensors. ``dropouts``: calls of dropout that were active."""

    loss: Tensor | None = None
    entropies: list[CrossEntropy] = field(default_factory=list)
    output: Tensor | None = None
    tokens: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    floats: list[Tensor] = field(default_factory=list)
    dropouts: list[str] = field(default_factory=list)

    @property
    def main(self) -> CrossEntropy | None:
        """Return the cross-entropy with most targets; the first of several."""
        return max(self.entropies, key=lambda own: int(own.counted.sum()), default=None)

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for _, leaf in self.tokens] + self.floats


def look(model: nn.Module, batch: Any, loss_fn: Callable[[nn.Module, Any], Tensor], *, inputs: bool = False) -> Seen:
    """Run ``loss_fn(model, batch)`` on the model as it is, and record the pass. ``inputs``: with gradients, and leaves
    in place of inputs."""
    seen = Seen()
    given = with_leaves(batch, seen.floats) if inputs else batch
    listener = _Listener(seen, list(tensors_of(batch)), inputs)
    handle = model.register_forward_hook(lambda module, args, output: listener.returned(output))
    try:
        with listener, torch.set_grad_enabled(inputs):
            seen.loss = loss_fn(model, given)
    finally:
        handle.remove()
    return seen


class _Listener(TorchFunctionMode):
    """Records functions of torch as they are called, in Python and in torch's own modules."""

    def __init__(self, seen: Seen, given: Sequence[Tensor], leaves: bool) -> None:
        super().__init__()
        self._seen, self._leaves = seen, leaves
        self._integers = [own for own in given if not own.is_floating_point() and own.dim() >= 2]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss):
            own = _bound(func, args, kwargs)
            self._entropy(own["input"], own["target"], own["ignore_index"])
        elif drops(func, args, kwargs):
            self._seen.dropouts.append(func.__name__)
        result = func(*args, **kwargs)
        if func is F.embedding and self._leaves:
            index = args[0] if args else kwargs["input"]
            if any(_is_of(index, own) for own in self._integers):
                leaf = result.detach().requires_grad_()
                self._seen.tokens.append((index.detach(), leaf))
                result = leaf.clone()  # which may be written to
        return result

    def returned(self, output: Any) -> None:
        found = main_tensor(output)
        if found is not None:
            self._seen.output = found

    def _entropy(self, input: Tensor, target: Tensor, ignore_index: int) -> None:
        if not isinstance(input, Tensor) or input.dim() == 0 or not isinstance(target, Tensor):
            return
        logits = input.detach()
        if logits.dim() == 1:
            logits, target = logits[None], target[None]
        classes = logits.shape[1]
        soft = target.is_floating_point()
        flat = logits.movedim(1, -1).reshape(-1, classes)
        goal = target.detach().movedim(1, -1).reshape(-1, classes) if soft else target.detach().reshape(-1)
        counted = torch.ones(len(flat), dtype=torch.bool, device=flat.device) if soft else goal != ignore_index
        if len(flat) and (soft or len(goal) == len(flat)) and counted.any():
            self._seen.entropies.append(CrossEntropy(flat, goal, counted, tuple(target.shape)))


def drops(func: Any, args: Any, kwargs: Any) -> bool:
    """True for a call of dropout that is active."""
    if func is F.scaled_dot_product_attention:
        return (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0
    if func is F.multi_head_attention_forward:
        own = _bound(func, args, kwargs)
        return own["dropout_p"] > 0 and own["training"]
    if func in DROPOUTS:
        own = _bound(func, args, kwargs)
        return own["p"] > 0 and own["training"]
    if func in (torch.dropout, torch.feature_dropout):
        _, p, train = (*args, *kwargs.values())
        return p > 0 and train
    return False


def _bound(func: Any, args: Any, kwargs: Any) -> Mapping[str, Any]:
    own = SIGNATURES[func].bind(*args, **kwargs)
    own.apply_defaults()
    return own.arguments


def _is_of(index: Tensor, own: Tensor) -> bool:
    """True if indices are a tensor of the batch, a view of one or a copy of some neighbouring columns, or one moved by
    a place, as a decoder's inputs are."""
    if index.shape == own.shape and torch.equal(index, own.to(index)):
        return True
    memory = index.untyped_storage()
    if memory.nbytes() and memory.data_ptr() == own.untyped_storage().data_ptr():
        return True
    if index.dim() < 2 or index.shape[:1] != own.shape[:1] or not index.numel():
        return False
    if index.dim() == own.dim() == 2 and 1 < index.shape[1] <= own.shape[1]:
        length = index.shape[1]
        given = own.to(index)
        starts = (given[:, : given.shape[1] - length + 1] == index[:, :1]).all(dim=0).nonzero()[:, 0].tolist()
        if any(torch.equal(index, given[:, at : at + length]) for at in starts):
            return True
    pairs = ((index, own[:, :-1]), (index, own[:, 1:]), (index[:, 1:], own[:, :-1]), (index[:, 1:], own))
    for one, other in pairs:
        if one.shape == other.shape and one.numel() and float((one == other.to(one)).double().mean()) > 0.5:
            return True
    return False


def main_tensor(output: Any) -> Tensor | None:
    """Return the main tensor of a model's output: itself, its ``logits``, or the first that is no loss."""
    if isinstance(output, Tensor):
        return output if _is_main(output) else None
    if isinstance(output, Mapping):
        named = [output[name] for name in PREFERRED if name in output]
        rest = [value for name, value in output.items() if "loss" not in str(name)]
        return next((value for value in (*named, *rest) if _is_main(value)), None)
    if isinstance(output, (tuple, list)):
        return next((found for value in output if (found := main_tensor(value)) is not None), None)
    if dataclasses.is_dataclass(output):
        return main_tensor({each.name: getattr(output, each.name, None) for each in dataclasses.fields(output)})
    return None


def _is_main(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor of a batch: in mappings, sequences, data classes and plain objects."""
    if isinstance(batch, Tensor):
        yield batch
        return
    for value in _parts(batch).values():
        yield from tensors_of(value)


def with_leaves(batch: Any, leaves: list[Tensor]) -> Any:
    """Return a copy of a batch whose floating-point tensors of two dimensions or more require a gradient, and are added
    to ``leaves``. An entry that is no mapping, sequence or object with attributes is not copied."""
    if isinstance(batch, Tensor):
        if not batch.is_floating_point() or batch.dim() < 2:
            return batch
        leaves.append(batch.detach().clone().requires_grad_())
        return leaves[-1].clone()  # which may be written to
    changed = {name: with_leaves(value, leaves) for name, value in _parts(batch).items()}
    if isinstance(batch, tuple):
        values = list(changed.values())
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if isinstance(batch, list):
        return list(changed.values())
    if not changed:
        return batch
    twin = copy.copy(batch)
    for name, value in changed.items():
        if isinstance(twin, MutableMapping):
            twin[name] = value
        else:
            object.__setattr__(twin, name, value)
    return twin


def _parts(batch: Any) -> Mapping[Any, Any]:
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, (tuple, list)):
        return dict(enumerate(batch))
    own = getattr(batch, "__dict__", None)
    if isinstance(batch, (str, bytes, nn.Module, type)) or not isinstance(own, dict):
        return {}
    return {name: value for name, value in own.items() if isinstance(value, (Tensor, Mapping, tuple, list))}
