"""The questions to the processes of a training, in their order, and the published bug that each of them is about."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import UsageError
from ...probes.parameters.sharing import Share
from .. import wiring
from ..answers import SKIPPED, Answers
from ..bounds import not_checked
from ..result import Check
from ..updates import Given, optimizers_given
from . import copies, data, dropout, evaluating, gradients, optimizing
from .members import Members, RankFailedError
from .passes import Action, Loss, RankPasses, own_values
from .report import RankCheck
from .restoring import KeptTraining

# question -> published bugs of that kind (repository#number)
SOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        copies.REPLICAS: ("allenai/OLMo-core#319",),
        copies.BUFFERS: ("pytorch/pytorch#111138",),
        copies.SHARDS: ("modelscope/ms-swift#7944",),
        data.SAME: ("openspeech-team/openspeech#149",),
        data.TENSOR: ("huggingface/accelerate#3092",),
        optimizing.MISSES: ("pytorch/pytorch#149205",),
        wiring.DOUBLES: ("pytorch/pytorch#40967",),
        dropout.DATA: ("huggingface/transformers#31412",),
        dropout.TENSOR: ("NVIDIA/Megatron-LM#206",),
        gradients.COPIES: ("jingyaogong/minimind#853", "NVIDIA/Megatron-LM#1446"),
        gradients.SCALE: (
            "TianhongDai/hindsight-experience-replay#4",
            "verl-project/verl-SpeCo#29",
            "EleutherAI/gpt-neox#1259",
        ),
        optimizing.UPDATE: ("pytorch/pytorch#176076",),
        evaluating.EVALUATION: ("pytorch/pytorch#149029", "pytorch/pytorch#137348"),
    }
)
NAMES = tuple(SOURCES)


def check_ranks(
    model: nn.Module,
    batch: Any,
    loss_fn: Loss,
    optimizer: Given = None,
    *,
    batches: Sequence[Any] | None = None,
    after_backward: Action | None = None,
    evaluate: Action | None = None,
    share: Share | None = None,
    skip: Collection[str] = (),
) -> RankCheck:
    """Check whether the processes of a training fit together. Call it on every rank of the process group, with the
    objects that this rank trains.

    - ``model``: the model as the loop calls it: DistributedDataParallel, after fully_shard or after parallelize_module.
    - ``batch``: the batch of this rank.
    - ``loss_fn(model, batch)``: returns the scalar on which the loop calls backward.
    - ``optimizer``: the loop's optimizer, a list of several, or a function that makes one or several, as in
      :func:`stabilitylab.preflight`.
    - ``batches``: more batches of this rank. They are also searched for samples that two ranks have.
    - ``after_backward(model)``: anything that the loop does with gradients between backward and the optimizer's step,
      if it averages or adds them up over ranks itself.
    - ``evaluate(model)``: the evaluation of the loop. The check calls it between backward and the optimizer's step.
    - ``share``: the process group over which code of your own splits a parameter, as in :func:`stabilitylab.watch`.
    - ``skip``: the names of questions to leave out.

    One update is made and undone: afterwards model, gradients, optimizers and random states have the same bits on every
    rank. The result is the same on all ranks. The check takes the memory of three more models and a copy of the
    optimizer's state. It takes the time of three training steps, and of 4 forward passes for each kind of parameter
    (one name in all layers).

    If something fails on one rank, all ranks raise an error with that rank's number and message. If the other ranks
    wait in a collective of the loss at that time, the failed rank raises after 10 s, and the others once its process
    has ended.

    Raises UsageError for a wrong argument or an unknown layout, InputError if one of your functions fails.

    >>> found = check_ranks(model, batch, loss_fn, optimizer)  # doctest: +SKIP
    >>> if dist.get_rank() == 0: print(found)  # doctest: +SKIP
    """
    answers = _OfRanks(NAMES, skip)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        why = "there is one process: start several, as with torchrun --nproc-per-node 2"
        answers.leave(NAMES, why)
        return RankCheck(1, 1, 1, answers.checks)
    members = Members(model, share)
    _Asked(members, answers).all(model, batch, loss_fn, optimizer, batches, after_backward, evaluate)
    return RankCheck(members.size, members.data_ranks, members.tensor_ranks, answers.checks)


class _OfRanks(Answers):
    """Answers in which only an error that all ranks raise counts as a reason. Any other error ends the check, since the
    ranks would then ask different questions."""

    def why_not(self, error: Exception) -> str:
        return str(error) if isinstance(error, RankFailedError) else ""


class _Asked:
    """Asks the questions, each of which is reached by all ranks."""

    def __init__(self, members: Members, answers: Answers) -> None:
        self._members, self._answers = members, answers

    def all(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: Loss,
        optimizer: Given,
        batches: Sequence[Any] | None,
        after_backward: Action | None,
        evaluate: Action | None,
    ) -> None:
        members = self._members
        given = (optimizer, batches, after_backward, evaluate)
        self._agree_on(type(model).__name__, sorted(self._answers.skip), *(one is not None for one in given))
        optimizers = members.together("the optimizer", lambda: optimizers_given(optimizer, model))
        self._agree_on(bool(optimizers))
        kept = members.together("a copy of the state", lambda: KeptTraining(model, optimizers, members.processes))
        try:
            self._answers.ask((copies.REPLICAS, copies.SHARDS), lambda: copies.replicas(members))
            self._answers.ask((copies.BUFFERS,), lambda: [copies.buffers(model, members)])
            self._answers.ask((data.SAME, data.TENSOR), lambda: data.batches(members, batches or [batch]))
            passes = RankPasses(model, batch, loss_fn, after_backward, members, kept)
            passes.rehearse()
            self._passes(passes, kept, optimizers, evaluate)
        finally:
            kept.undo()

    def _passes(
        self,
        passes: RankPasses,
        kept: KeptTraining,
        optimizers: Sequence[torch.optim.Optimizer],
        evaluate: Action | None,
    ) -> None:
        members, listener = self._members, dropout.DropoutListener()
        loss = passes.gradients(listener)
        own = {name: None if one is None else one.clone() for name, one in passes.own_gradients().items()}
        self._answers.ask((dropout.DATA, dropout.TENSOR), lambda: dropout.dropouts(members, listener))
        apart: frozenset[str] = frozenset()

        def compared() -> list[Check]:
            nonlocal apart
            check, apart = gradients.copies(members, own)
            return [check]

        self._answers.ask((gradients.COPIES,), compared)
        self._answers.ask((optimizing.MISSES, wiring.DOUBLES), lambda: optimizing.held(members, optimizers, own))
        plain = self._update(passes, optimizers, own, apart)
        self._evaluation(passes, kept, optimizers, evaluate, plain)
        kept.undo()
        self._answers.ask((gradients.SCALE,), lambda: [gradients.scale(members, passes, own, apart, loss)])

    def _update(
        self,
        passes: RankPasses,
        optimizers: Sequence[torch.optim.Optimizer],
        own: Mapping[str, torch.Tensor | None],
        apart: frozenset[str],
    ) -> float | None:
        """Make the update and ask about it; return this rank's loss after it, None if there was none."""
        if not optimizers:
            self._answers.leave((optimizing.UPDATE,), optimizing.NONE)
            return None
        before = {name: value.clone() for name, value in own_values(self._members).items()}
        if problem := self._stepped(optimizers):
            self._answers.leave((optimizing.UPDATE,), problem)
            return None
        self._answers.ask(
            (optimizing.UPDATE,),
            lambda: [
                not_checked(optimizing.UPDATE, "the gradients of copies differ already")
                if apart
                else optimizing.updated(self._members, before, own)
            ],
        )
        return passes.loss()

    def _evaluation(
        self,
        passes: RankPasses,
        kept: KeptTraining,
        optimizers: Sequence[torch.optim.Optimizer],
        evaluate: Action | None,
        plain: float | None,
    ) -> None:
        """Make the update again, with the loop's evaluation before it."""
        if evaluate is None or plain is None or evaluating.EVALUATION in self._answers.skip:
            why = evaluating.NOT_GIVEN if evaluate is None else "there was no update"
            why = SKIPPED if evaluating.EVALUATION in self._answers.skip else why
            self._answers.leave((evaluating.EVALUATION,), why)
            return
        kept.undo()
        passes.gradients()
        self._members.together("evaluate(model)", lambda: evaluate(passes.model))
        left = evaluating.gathered_now(self._members, passes.model)
        self._stepped(optimizers)
        after = passes.loss()
        self._answers.ask((evaluating.EVALUATION,), lambda: [evaluating.evaluated(self._members, plain, after, left)])

    def _stepped(self, optimizers: Sequence[torch.optim.Optimizer]) -> str:
        """Step the optimizers; return why they cannot be stepped, "" if they were."""

        def step() -> str:
            for one in optimizers:
                try:
                    one.step()
                except TypeError:
                    return f"{type(one).__name__} needs a closure, which a check does not have"
            return ""

        own = self._members.together("the optimizer's step", step)
        return next(filter(None, self._members.gathered(own)), "")

    def _agree_on(self, *given: Any) -> None:
        """Raise UsageError on all ranks if they would ask different questions."""
        told = self._members.gathered(given)
        if any(one != told[0] for one in told):
            raise UsageError("the ranks give different arguments: call check_ranks with the same ones on every rank.")
