"""The tokens that count: the caller's masks, looked up by stack and laid out as the values are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_

import torch

from ...errors import UsageError

Mask = torch.Tensor | Mapping[str, torch.Tensor]

OF_EACH_PASS = "a function that returns each pass's own mask"
OF_REFERENCE = "reference_mask=, the mask of the batch that reference= runs"


class Masks:
    """The real tokens of a stack: all without a mask, else those of the caller's mask, asked for once a forward.

    ``turned``: masks are (B, T), and the hidden states of layers (T, B, D). ``advice``: what the caller may do about a
    mask that does not fit. ``last``: the tensors of the last mask that was given. ``varies``: True if that of another
    forward had others.
    """

    def __init__(
        self,
        given: Mask | Callable[[], Mask | None] | None,
        stacks: Iterable[str],
        turned: bool = False,
        advice: str = OF_EACH_PASS,
    ) -> None:
        self._given, self._turned = given, turned
        self._stacks = tuple(stacks)
        self._advice = advice
        self.last: tuple[torch.Tensor, ...] = ()
        self.varies = False
        self.renew()

    def renew(self) -> None:
        """Begin a new pass: the next look-up asks again."""
        self._asked = False
        self._masks: Mask | None = None
        self._found: dict[tuple[str | None, torch.Size], torch.Tensor] = {}
        self._nearest: dict[tuple[str | None, torch.Size], torch.Tensor] = {}

    def __call__(
        self, stack: str | None, tokens: torch.Size, device: torch.device, of_layer: bool = False
    ) -> torch.Tensor:
        """Return a mask of shape ``tokens``, True on real tokens. All tokens are real for the stack None, that of
        routed tokens. ``of_layer``: they are the tokens of what a layer returns."""
        if of_layer and self._turned and stack is not None:
            self._check_turned(stack, tokens)
        if (found := self._found.get((stack, tokens))) is None:
            found = self._found[stack, tokens] = self._look_up(stack, tokens, device)
        return found

    def nearest(self, stack: str | None, tokens: torch.Size, device: torch.device) -> torch.Tensor:
        """Return the mask of this stack, or of the only other stack, whose layout fits the tokens; True everywhere if
        none fits. For values inside a sub-layer, which may be another stack's output."""
        if (found := self._nearest.get((stack, tokens))) is None:
            found = self._nearest[stack, tokens] = self._look_nearest(stack, tokens, device)
        return found

    def _look_nearest(self, stack: str | None, tokens: torch.Size, device: torch.device) -> torch.Tensor:
        masks = self.given() if stack is not None else None
        every = masks if isinstance(masks, Mapping) else {} if masks is None else {stack: masks}
        fitting = {name: found for name, mask in every.items() if (found := self._laid_out(mask, tokens)) is not None}
        if stack not in fitting and len(fitting) != 1:
            return torch.ones(tokens, dtype=torch.bool, device=device)
        found = fitting[stack] if stack in fitting else next(iter(fitting.values()))
        return found.to(device=device, dtype=torch.bool)

    def given(self) -> Mask | None:
        """Return what the caller gave for this pass."""
        if not self._asked:
            self._masks = self._given() if callable(self._given) else self._given
            self._asked = True
            if isinstance(self._masks, Mapping) and (foreign := set(self._masks) - set(self._stacks)):
                known = ", ".join(map(repr, self._stacks)) or "none"
                raise UsageError(f"mask names {sorted(foreign)}, but the model's stacks are {known}.")
            own = _tensors(self._masks)
            self.varies |= bool(self.last) and not are_same(own, self.last)
            self.last = own
        return self._masks

    def _look_up(self, stack: str | None, tokens: torch.Size, device: torch.device) -> torch.Tensor:
        if stack is None:
            return torch.ones(tokens, dtype=torch.bool, device=device)
        masks = self.given()
        mask = masks.get(stack) if isinstance(masks, Mapping) else masks
        if mask is None:
            return torch.ones(tokens, dtype=torch.bool, device=device)
        if (fitting := self._laid_out(mask, tokens)) is None:
            layout = "as (samples, tokens)" if self._turned else "in the layout of the hidden states"
            raise UsageError(
                f"mask has shape {tuple(mask.shape)} where stack {stack!r} has tokens {tuple(tokens)}: give one "
                f"value per token, {layout}, or {self._advice}, or leave out the probes that look there "
                "(probes='-NAME')."
            )
        return fitting.to(device=device, dtype=torch.bool)

    def _check_turned(self, stack: str, tokens: torch.Size) -> None:
        """Raise UsageError if the mask has the layout of hidden states (T, B, D): it or ``batch_first`` is wrong."""
        masks = self.given()
        mask = masks.get(stack) if isinstance(masks, Mapping) else masks
        if mask is not None and mask.dim() == 2 and mask.shape == tokens and tokens[0] != tokens[1]:
            sizes = ", ".join(map(str, tokens))
            raise UsageError(
                f"mask has shape ({sizes}) where the layers of stack {stack!r} return ({sizes}, width): with "
                "batch_first=False layers return (tokens, samples, width), and a mask is (samples, tokens). Turn the "
                "mask, or leave batch_first out."
            )

    def _laid_out(self, mask: torch.Tensor, tokens: torch.Size) -> torch.Tensor | None:
        """Return a mask in the layout of the tokens; None if no layout fits. With ``turned`` a mask (B, T) fits (T, B)
        first, then (B, T), in which a model may leave values inside a layer."""
        found = _laid_out(mask.T, tokens) if self._turned and mask.dim() == 2 else None
        return _laid_out(mask, tokens) if found is None else found


def _tensors(mask: Mask | None) -> tuple[torch.Tensor, ...]:
    if isinstance(mask, Mapping):
        return tuple(mask.values())
    return () if mask is None else (mask,)


def are_same(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Return True if these are the same tensors, one at least, not only equal ones."""
    return bool(first) and len(first) == len(second) and all(map(is_, first, second))


def _laid_out(mask: torch.Tensor, tokens: torch.Size) -> torch.Tensor | None:
    """Return a ``mask`` (B, T) in the layout of the tokens: (B, T), flattened (B T), or by head, (B, T, H) or (B, H,
    T); None if no layout fits."""
    if mask.shape == tokens:
        return mask
    if tokens == (mask.numel(),):
        return mask.reshape(tokens)
    if mask.dim() != 2 or len(tokens) != 3:
        return None
    ends, inner = mask.shape == (tokens[0], tokens[2]), mask.shape == tokens[:2]
    if ends == inner:  # (B, T, T) may be either
        return None
    return (mask[:, None, :] if ends else mask[:, :, None]).expand(tokens)
