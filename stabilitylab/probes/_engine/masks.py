"""The tokens that count: the caller's masks, looked up by stack and laid out as the values are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from ...errors import UsageError

Mask = torch.Tensor | Mapping[str, torch.Tensor]


class Masks:
    """Tells which tokens of a stack are real: all without a mask, else the caller's, asked for once a forward pass."""

    def __init__(self, given: Mask | Callable[[], Mask | None] | None, stacks: Iterable[str]) -> None:
        self._given = given
        self._stacks = tuple(stacks)
        self.renew()

    def renew(self) -> None:
        """A new pass begins: the next look-up asks again."""
        self._asked = False
        self._masks: Mask | None = None
        self._found: dict[tuple[str | None, torch.Size], torch.Tensor] = {}
        self._nearest: dict[tuple[str | None, torch.Size], torch.Tensor] = {}

    def __call__(self, stack: str | None, tokens: torch.Size, device: torch.device) -> torch.Tensor:
        """True per real token, of shape ``tokens``; everywhere for the stack None, that of routed tokens."""
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
        fitting = {name: found for name, mask in every.items() if (found := _laid_out(mask, tokens)) is not None}
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
        return self._masks

    def _look_up(self, stack: str | None, tokens: torch.Size, device: torch.device) -> torch.Tensor:
        if stack is None:
            return torch.ones(tokens, dtype=torch.bool, device=device)
        masks = self.given()
        mask = masks.get(stack) if isinstance(masks, Mapping) else masks
        if mask is None:
            return torch.ones(tokens, dtype=torch.bool, device=device)
        if (fitting := _laid_out(mask, tokens)) is None:
            raise UsageError(
                f"mask has shape {tuple(mask.shape)} where stack {stack!r} has tokens {tuple(tokens)}: give one "
                "value per token, in the layout of the hidden states, or a function that returns each pass's own mask, "
                "or leave out the probes that look there (probes='-NAME')."
            )
        return fitting.to(device=device, dtype=torch.bool)


def _laid_out(mask: torch.Tensor, tokens: torch.Size) -> torch.Tensor | None:
    """``mask`` (B, T) for tokens (B, T), flattened ones (B T), or those of each head, (B, T, H) or (B, H, T)."""
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
