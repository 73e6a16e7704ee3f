"""The random states of the process, in types that a checkpoint may hold."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

RandomStates = Mapping[str, Any]


def seed_all(seed: int) -> None:
    """Seed every generator that a model or a loader may draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def random_states() -> RandomStates:
    """Return the states of Python, numpy and torch, also of every GPU once this process uses one."""
    kind, keys, place, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [
            str(kind),
            torch.from_numpy(np.array(keys, dtype=np.int64)),
            int(place),
            int(has_gauss),
            float(gauss),
        ],
        "python": random.getstate(),
    }


def set_random_states(states: RandomStates) -> None:
    """Put back what :func:`random_states` returned."""
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    kind, keys, place, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), place, has_gauss, gauss))  # noqa: NPY002
    version, internal, after = states["python"]
    random.setstate((version, tuple(internal), after))
