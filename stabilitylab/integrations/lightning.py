"""``LightningCallback`` for Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import torch

from ..api import WatchKeywords
from ..errors import ResourceError, UsageError
from ..probes.parameters.ranks import from_first_rank
from .session import TOTAL, Batch, Masking, Session, refuse

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
except ImportError as error:
    raise ResourceError("Lightning is not installed: pip install lightning.") from error


class LightningCallback(Callback):
    """A callback that records a fit of Lightning in the new run directory ``out``.

    >>> trainer = Trainer(  # doctest: +SKIP
    ...     max_steps=1000, gradient_clip_val=1.0,
    ...     callbacks=[LightningCallback(out="runs/mine", every=10)],
    ... )
    >>> trainer.fit(module, loader)

    Row t is update t. ``loss`` is the loss as it was backpropagated, without the factor of a GradScaler, summed over
    ``accumulate_grad_batches`` (so it is their mean). ``lr`` is the learning rate. Gradients are those of the whole
    batch, unscaled and before ``gradient_clip_val`` clips them, since Lightning calls ``on_before_optimizer_step``
    between the two. Validation leaves no trace.

    Lightning's progress bar gets ``grad_norm_total``, the gradient norm of the previous update (which the host already
    has, so that nothing waits for the device), and ``alarm_step``, the step of the last alert of ``alarm=``. Loggers do
    not get them.

    - ``mask``: "auto" reads ``attention_mask`` (``decoder_attention_mask``, or labels other than -100) from a batch
      that is a mapping.
    - ``reference``: a held-out batch (a dict), on which ``module(**batch)`` is run, or a function.
    - ``options``: those of :func:`stabilitylab.watch`.

    The state of the callback is in Lightning's checkpoints, so ``fit(ckpt_path=...)`` goes on in the same run. The
    status of the run becomes "finished", or "failed" or "interrupted" with the error. ``fit`` raises UsageError if
    ``out`` exists, if a named probe finds no site, for several optimizers and for DeepSpeed.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        mask: Masking = "auto",
        reference: Callable[[], Any] | Batch | None = None,
        **options: Unpack[WatchKeywords],
    ) -> None:
        refuse(options)
        self.out = Path(out)
        self._options = {"mask": mask, "reference": reference, **options}
        self._session: Session | None = None
        self._stored: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise UsageError(
                f"{len(trainer.optimizers)} optimizers are here, not one: use stabilitylab.watch in training_step."
            )
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise UsageError("DeepSpeed keeps gradients of its own, which cannot be watched: use DDP or FSDP2.")
        stored = self._stored if from_first_rank(self.out.exists()) else None
        self._session = Session(
            pl_module,
            trainer.optimizers[0],
            out=self.out,
            step=trainer.global_step,
            resume=stored,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            shows_batches=True,
            parallel="ddp" if isinstance(trainer.strategy, DDPStrategy) else "auto",
            **self._options,
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._session is None:
            return
        if self._session.masks is not None:
            self._session.masks.read(batch)
        self._session.batch(batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if self._session is not None:
            scaler = getattr(trainer.precision_plugin, "scaler", None)  # which has scaled the loss by now
            scale = None if scaler is None else scaler.scale(torch.ones((), device=loss.device))
            self._session.loss(loss if scale is None else loss.detach() / scale)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._session is not None:
            self._session.row()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any, **named: Any) -> None:
        if self._session is None:
            return
        norm, alert = self._session.gradient_norm(wait=False), self._session.alert
        shown = {TOTAL: norm, "alarm_step": None if alert is None else float(alert.step)}
        for name, value in shown.items():
            if value is not None:  # logger=False: loggers get what the module itself logs
                pl_module.log(name, value, prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session is not None:
            self._session.finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._session is not None:
            self._session.fail(exception)

    def state_dict(self) -> dict[str, Any]:
        if self._session is None or not self._session.open:
            return {}
        return self._session.watcher.checkpoint()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._stored = state_dict or None


StabilityCallback = LightningCallback  # its name until 0.1
