"""Places of a model that are not trained, known before the first update, so that a place frozen on purpose is no
finding."""

from __future__ import annotations

from .pieces import Parameters


def untrained(parameters: Parameters) -> dict[str, str]:
    """Map the site of each row without a trained parameter to the reason: all of it is frozen, or no optimizer has
    it."""
    held = {id(tensor) for group in parameters.optimizer_groups for tensor in group["params"]}
    # without an optimizer, or if it holds copies of its own, nobody knows which parameters it lacks
    known = any(id(tensor) in held for tensor in parameters.originals)
    learn: dict[str, list[bool]] = {row.site: [] for row in parameters.rows}
    for piece in parameters.pieces:
        tensor = parameters.originals[piece.index]
        if tensor.requires_grad:
            learn[piece.row.site].append(id(tensor) in held)
    frozen = {site: "frozen" for site, own in learn.items() if not own}
    left_out = {site: "not in the optimizer" for site, own in learn.items() if own and known and not any(own)}
    return frozen | left_out
