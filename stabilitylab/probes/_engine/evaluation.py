"""Random states and training flags, which a pass of our own leaves as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

DRAWN = 0  # the seed of what a model draws in an evaluation


@contextmanager
def random_states_kept(model: nn.Module | None = None, seed: int | None = None) -> Iterator[None]:
    """Keep the random states of Python, numpy and torch, also of the model's GPUs; without a model, of all GPUs that a
    process can see once it uses one. ``seed``: within the block their generators begin with it; None: as they are."""
    if model is None:
        devices = set(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else set()
    else:
        devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)  # noqa: NPY002
                for generator in (torch.default_generator, *(torch.cuda.default_generators[at] for at in devices)):
                    generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs of others, too
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Run the block in eval mode without gradients, then restore each module's own training flag and the random states,
    also if the block itself calls ``model.train()``. Buffers that a forward itself changes in eval mode (a counter,
    say) are not restored.

    A model that draws random numbers in eval mode, too (a masked autoencoder, a diffusion model), draws the same ones
    in each evaluation, so that two evaluations differ by the weights alone.
    """
    flags = [(module, module.training) for module in model.modules()]
    with random_states_kept(model, DRAWN), torch.no_grad():
        try:
            for module, training in flags:
                if training:
                    module.training = False
            yield
        finally:
            for module, training in flags:
                if module.training is not training:
                    module.training = training
