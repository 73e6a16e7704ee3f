"""The loss of a fixed batch around theta_t: along the optimizer's update, and its Hessian at theta_t."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import first_line
from ..parameters.copies import kept
from ..parameters.layouts import ddp_wrappers
from ..parameters.pieces import Parameters
from ..parameters.processes import Processes
from .hessian_products import HessianProducts, Vector, in_float64, inner_product

log = logging.getLogger("stabilitylab")

APART = 0.05  # relative difference: far above the rounding of two products, in bf16 too
PARTS = 3  # batches into which the entries of a loss are split, in order


class Landscape:
    """The surroundings of theta_t that a probe of curvature looks at, between the optimizer's step and the next
    forward: theta_t, theta_{t+1} and a loss.

    ``loss()``: one number, or one per token or sentence. The mean of the numbers counts, and the mean of each third of
    them too (three batches). The result must be the same each time. On several ranks the loss is the mean over ranks,
    and all numbers here are those of all ranks. ``of_update``: the loss is that of the batch from which the update was
    made. ``count``: the number of forwards of the loss so far. ``relative``: the length of the update as a share of
    that of the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[], Tensor],
        parameters: Parameters,
        ranks: Processes,
        of_update: bool,
    ) -> None:
        self.model, self.parameters, self.of_update = model, parameters, of_update
        self._loss, self._ranks = loss, ranks
        self._eps = 0.0  # eps of the type of the last loss
        self._before: list[Tensor] = []
        self._after: list[Tensor] = []
        self.count = 0
        self.relative = 0.0  # ||theta_{t+1} - theta_t|| / ||theta_t||
        self._backward = False  # gradients are taken by backward()
        self.way: Literal["exact", "differences"] | None = None  # how products are taken, once that is known

    @property
    def optimizers(self) -> Sequence[Any]:
        return self.parameters.optimizers

    @property
    def rate(self) -> float:
        """The largest learning rate of the optimizers; 0 if they have none."""
        return max((float(group.get("lr") or 0) for group in self.parameters.optimizer_groups), default=0.0)

    def start(self) -> None:
        """Keep a copy of theta_t, before the optimizer's step."""
        self._before = kept(self.parameters.tensors, self._before)

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Enter after the optimizer's step; yield True if the step moved a parameter. On exit the parameters and
        buffers are what they were at entry, bit for bit."""
        self.count = 0
        self._after = [tensor.detach().clone() for tensor in self.parameters.tensors]
        buffers = [buffer for buffer in self.model.buffers() if buffer is not None]
        own = [buffer.clone() for buffer in buffers]
        trained = [own.requires_grad for own in self.parameters.originals]
        pairs = [(new, old.to(new.device)) for (new, old), yes in zip(self._pairs(), trained, strict=True) if yes]
        update, theta = [in_float64(new) - old for new, old in pairs], [old for _, old in pairs]
        self.relative = math.sqrt(self.inner(update, update) / (self.inner(theta, theta) or 1.0))
        del update, theta, pairs
        try:
            yield self.relative > 0  # False for NaN
        finally:
            self._put(1.0)
            for buffer, value in zip(buffers, own, strict=True):
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
            self._after = []

    def losses(self, share: float) -> Tensor:
        """Return this rank's ``loss()`` at theta_t + ``share`` (theta_{t+1} - theta_t): flat, float64."""
        self._put(share)
        self.count += 1
        with torch.no_grad():
            said = self._said().detach()
        self._eps = torch.finfo(said.dtype).eps
        return said.double().flatten()

    def noise(self, base: Tensor, again: bool) -> tuple[float, float]:
        """Return two standard errors [loss]: (the difference between the mean loss of ``base`` and that of a second
        evaluation at theta_t, 0 if they are equal or without ``again``; the rounding of the mean in the type of the
        loss).

        If the loss has n entries, the first number is at least the standard error of the mean difference. A difference
        that happens to be small does not count as none.
        """
        rounding = (self._eps * base).square().mean() / len(base)
        told = torch.stack([rounding, *[torch.zeros_like(rounding)] * 2])
        if again:
            try:
                gap = self.losses(0.0) - base
            except Exception:
                self._mean(told, failed=True)
                raise
            told[1] = gap.mean()
            told[2] = gap.var() / len(gap) if len(gap) > 1 else 0.0
        rounding, mean, square = self._mean(told).tolist()
        size = self._ranks.size
        return max(abs(mean), math.sqrt(square / size)), math.sqrt(rounding / size)

    def rises(self, base: Tensor, share: float) -> Tensor:
        """Return the rise of the loss at ``share`` above ``base``, the losses at 0: on the whole batch and on each
        third of it. The thirds are NaN for fewer than three entries. Differences are taken entry by entry, in
        float64."""
        try:
            gap = self.losses(share) - base
            found = torch.stack([gap.mean(), *(part.mean() for part in _thirds(gap))])
        except Exception:
            self._mean(torch.zeros(1 + PARTS, dtype=torch.float64), failed=True)
            raise
        return self._mean(found)

    def base(self) -> Tensor:
        """Return the losses at theta_t."""
        return self.losses(0.0)

    @contextmanager
    def products(self) -> Iterator[HessianProducts]:
        """Yield products with the Hessian at theta_t, in the parameters that require a gradient. The products are exact
        if the model can be differentiated twice, else (the log says so once) by differences. For sharded parameters
        they are always by differences."""
        self._put(0.0)
        if self.way is None:
            self.way = self._found()
        with self._made(self.way) as made:
            yield made

    def trained(self) -> list[Tensor]:
        """Return the parameters that require a gradient, as the optimizer knows them."""
        return [tensor for tensor in self.parameters.originals if tensor.requires_grad]

    def inner(self, one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
        """Return the inner product over all ranks; each vector has one tensor for each of :meth:`trained`. Entries that
        several ranks hold count once."""
        shares = [self._ranks.share(tensor) for tensor in self.trained()]
        parts = [s * inner_product(a, b) for s, a, b in zip(shares, one, other, strict=True)]
        total = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)
        return float(self._ranks.sum(total, self.parameters.device))

    def random(self) -> Vector:
        """Return this rank's part of a fixed direction, which is the same each time and for every layout of the
        parameters."""
        return [_noise(number, tensor) for number, tensor in enumerate(self.trained())]

    def _found(self) -> Literal["exact", "differences"]:
        """Find how the model can be differentiated: twice, or once, or by backward() alone (if autograd.grad fails, as
        with reentrant checkpointing). The log says why not twice."""
        ways: tuple[Literal["exact", "differences"], ...] = ("exact", "differences")
        for how in ways if not self._ranks.sharded else ():
            try:
                with self._made(how) as product:
                    once = product(product.gradient)
                    if how == "differences" or self._symmetric(product, once):
                        return how
                    log.info("curvature is taken by differences: the second derivative is not symmetric.")
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, NotImplementedError) as error:
                said = first_line(error, 200)
                log.info("curvature is not taken by autograd.grad, %s: %s", how, said)
        self._backward = True
        return "differences"

    def _symmetric(self, product: HessianProducts, once: Vector) -> bool:
        """True if g'H(Hg) = (Hg)'(Hg), up to rounding. A backward that autograd cannot look into (written by hand, say)
        drops terms of a part of the rows without a message."""
        left, right = self.inner(product.gradient, product(once)), self.inner(once, once)
        return abs(left - right) <= APART * max(abs(left), right)

    def _made(self, how: Literal["exact", "differences"]) -> HessianProducts:
        replicas = not self._ranks.alone and not self._ranks.sharded
        return HessianProducts(
            self._scalar,
            self.trained(),
            how,
            backward=self._backward,
            inner=self.inner,
            mean=self._mean_of if replicas else None,
        )

    def _scalar(self) -> Tensor:
        said = self._said()
        return said.mean() if said.dim() else said

    def _said(self) -> Tensor:
        self._ranks.reshard()  # parameters that an earlier forward gathered are out of date
        try:
            with self._alone():
                return self._loss()
        finally:
            if not torch.is_grad_enabled():
                self._ranks.reshard()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep DDP from averaging gradients: they are averaged here."""
        wrappers = ddp_wrappers(self.model)
        before = [wrapper.require_backward_grad_sync for wrapper in wrappers]
        for wrapper in wrappers:
            wrapper.require_backward_grad_sync = False
        try:
            yield
        finally:
            for wrapper, was in zip(wrappers, before, strict=True):
                wrapper.require_backward_grad_sync = was

    def _put(self, share: float) -> None:
        """Set the parameters to theta_t + ``share`` (theta_{t+1} - theta_t); for shares 0 and 1 bit for bit."""
        for (new, old), own in zip(self._pairs(), self.parameters.tensors, strict=True):
            if share == 1.0:
                own.data.copy_(new)
            elif share == 0.0:
                own.data.copy_(old)
            else:
                own.data.copy_(torch.lerp(old.to(new.device), new, share))
        torch.clear_autocast_cache()  # a context around the whole update keeps casts of the parameters before it

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self._after, self._before, strict=True)

    def _mean_of(self, vector: Vector) -> Vector:
        for tensor in vector:
            dist.all_reduce(tensor)
            tensor /= self._ranks.size
        return vector

    def _mean(self, numbers: Tensor, failed: bool = False) -> Tensor:
        return self._ranks.mean(numbers, self.parameters.device, failed)


def _noise(number: int, parameter: Any) -> Tensor:
    draw = torch.Generator().manual_seed(number)
    whole = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype).to(parameter.device)
    if not hasattr(parameter, "placements"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    cut = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return cut.to_local()


def _thirds(values: Tensor) -> Sequence[Tensor]:
    return torch.tensor_split(values, PARTS) if len(values) >= PARTS else [values * torch.nan] * PARTS
