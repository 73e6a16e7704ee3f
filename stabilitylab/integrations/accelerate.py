"""``watch`` for a training loop that is written with an Accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn

from ..api import WatchKeywords
from .before_clipping import Seam
from .session import Batch, Masking, Session, refuse

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer

    from ..api import RunWatcher


@contextmanager
def watch(
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    *,
    out: str | Path,
    mask: Masking = "auto",
    reference: Callable[[], Any] | Batch | None = None,
    **options: Unpack[WatchKeywords],
) -> Iterator[RunWatcher]:
    """Record every update of a loop that calls ``accelerator.backward`` and ``optimizer.step``. Give it the model and
    the optimizer that ``accelerator.prepare`` returned.

    The loop itself does not change. Gradients are read before ``accelerator.clip_grad_norm_`` (or ``clip_grad_value_``)
    changes them, or else before ``optimizer.step``. Under fp16 they are read unscaled. With ``accelerator.accumulate``
    they are read once per update. ``loss`` of a row is the mean over its micro-batches, ``lr`` the learning rate of its
    update.

    - ``mask``: "auto" reads the model's ``attention_mask``.
    - ``reference``: a held-out batch (a dict of tensors), or a function.
    - ``options``: those of :func:`stabilitylab.watch`.

    Raises UsageError for an optimizer that was not prepared, for DeepSpeed and for Megatron.

    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
    >>> with watch(model, optimizer, out="runs/mine", every=10):
    ...     for batch in loader:
    ...         with accelerator.accumulate(model):
    ...             accelerator.backward(model(**batch).loss)
    ...             optimizer.step(), optimizer.zero_grad()
    """
    refuse(options)
    session = AcceleratedSession(model, optimizer, out=out, mask=mask, reference=reference, **options)
    try:
        yield session.watcher
    except BaseException as error:
        session.fail(error)
        raise
    session.finish()


class AcceleratedSession(Session):
    """A session that Accelerate itself calls at each loss and update."""

    def __init__(self, model: nn.Module, optimizer: Any, **options: Any) -> None:
        self._seam = Seam(optimizer, self)
        super().__init__(model, self._seam.inner, scaler=optimizer.scaler, **options)
        self._seam.open()

    def _end(self, error: BaseException | None) -> None:
        self._seam.close()
        super()._end(error)
