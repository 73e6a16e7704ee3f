"""``HuggingFaceCallback`` for the Trainer of Hugging Face."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import torch

from ..api import WatchKeywords
from ..errors import ResourceError, UsageError
from ..probes.parameters.ranks import from_first_rank, is_first_rank
from .accelerate import AcceleratedSession
from .session import TOTAL, Batch, Masking, refuse

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise ResourceError("the Trainer is not installed: pip install transformers accelerate.") from error


class HuggingFaceCallback(TrainerCallback):
    """A callback that records the training of a Hugging Face Trainer in the new run directory ``out``.

    >>> trainer = Trainer(  # doctest: +SKIP
    ...     model=model, args=args, train_dataset=data,
    ...     callbacks=[HuggingFaceCallback(out="runs/mine", every=10, reference=held_out)],
    ... )
    >>> trainer.train()

    Row t is update t. ``loss`` is the loss as it was backpropagated, the mean of its micro-batches. ``lr`` is the
    learning rate. Gradients are those of the whole batch, unscaled, and before ``max_grad_norm`` clips them (the
    Trainer clips before it calls its callbacks). Evaluation and generation within training leave no trace.

    - ``mask``: "auto" reads ``attention_mask`` (``decoder_attention_mask``, or labels other than -100) from the
      arguments of the model.
    - ``reference``: a held-out batch (a dict of tensors), or a function.
    - ``options``: those of :func:`stabilitylab.watch`, such as ``probes``, ``every``, ``sites`` and ``tracker``.

    ``record=stabilitylab.Recorder(lambda model, batch: model(**batch).loss, clip=args.max_grad_norm)`` records for
    ``stabilitylab explain``. Its batches are the arguments of the model in training.

    At its logging steps the Trainer also shows ``grad_norm_total``, the gradient norm of the update that it logs, and
    ``alarm``, the last alert of ``alarm=``. Callbacks that come after this one get them in their ``logs``, the progress
    bar or the printer last. ``log_history`` does not change.

    Each checkpoint of the Trainer gets a file of the watcher, so ``train(resume_from_checkpoint=...)`` goes on in the
    same run. Rows after the checkpoint are moved aside. If ``out`` does not exist yet, a resumed training starts a run
    at its own step.

    The run is "finished" when training is. The Trainer does not call callbacks at an error. So the status becomes
    "failed" (with the error, if it ended the program) at the latest when the process ends, and at once within ``with
    HuggingFaceCallback(...) as callback:`` around ``train()``. ``train()`` raises UsageError if ``out`` exists, if a
    named probe finds no site, under DeepSpeed and under ``DataParallel``.
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
        self._session: AcceleratedSession | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.n_gpu > 1:
            raise UsageError("DataParallel cannot be watched: start the script with torchrun, or show it one GPU.")
        if self._session is not None:
            self._session.abandon()  # the session of a loop that the Trainer began again
        step, stored = state.global_step, None
        if step and from_first_rank(self.out.exists()):
            stored = _load(_file(args, step))
        self._session = AcceleratedSession(
            kwargs["model"],
            kwargs["optimizer"],
            out=self.out,
            step=step,
            resume=stored,
            parallel="ddp" if args.world_size > 1 and not args.fsdp else "auto",
            **self._options,
        )
        weakref.finalize(self, self._session.abandon)  # also when the process ends

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        file = _file(args, state.global_step)
        if self._session is not None and self._session.open:
            checkpoint = self._session.watcher.checkpoint()  # on all ranks, since each holds a part of it
            if file.parent.is_dir():  # else this checkpoint was rotated away, or belongs to a trial
                torch.save(checkpoint, file)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if "loss" in logs and self._session is not None and self._session.open:  # not those of an evaluation
            logs |= self._shown(self._session)
        if "train_runtime" in logs:  # the last call before load_best_model_at_end
            self._finish()

    def _shown(self, session: AcceleratedSession) -> dict[str, Any]:
        """Return what the Trainer's bar or printed lines, whose callback comes last, show beside its own numbers."""
        norm, alert = session.gradient_norm(wait=True), session.alert
        shown: dict[str, Any] = {} if norm is None else {TOTAL: norm}
        return shown if alert is None else shown | {"alarm": f"{alert.title} at step {alert.step}"}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._session is not None:
            self._session.finish()

    def __enter__(self) -> HuggingFaceCallback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None and error is not None:
            self._session.fail(error)


def _file(args: TrainingArguments, step: int) -> Path:
    rank = "" if is_first_rank() else f"-{args.process_index}"
    return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{step}" / f"stabilitylab{rank}.pt"


def _load(file: Path) -> dict[str, Any]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UsageError(
            f"training resumes, but {file} is missing, with which the run would go on: give another out=."
        ) from error


StabilityCallback = HuggingFaceCallback  # its name until 0.1
