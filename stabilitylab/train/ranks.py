"""The trainer on several ranks under torchrun: ranks, each rank's part of a batch, and each rank's part of a
checkpoint."""

from __future__ import annotations

import atexit
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from ..config import Parallel, TrainConfig
from ..data import Batch, Dataset
from ..errors import ResourceError, UsageError
from ..models import Transformer

STREAM = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: seeds of ranks lie far from those of other runs


@dataclass(frozen=True)
class Team:
    """The processes that train one model: DDP's replicas, FSDP2's shards, or a single one."""

    kind: Parallel = "none"
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def seed(self, seed: int) -> int:
        """Return this rank's seed of dropout: the first rank has that of a single process, each other rank a stream of
        its own."""
        return (seed + self.rank * STREAM) % 2**63

    def spread(self, model: Transformer, device: torch.device) -> nn.Module:
        """Return the module to call instead of ``model``. All ranks hold the same weights, since weights depend on the
        seed alone."""
        if self.kind == "ddp":
            where = [device.index] if device.type == "cuda" else None
            return nn.parallel.DistributedDataParallel(model, device_ids=where)
        if self.kind == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(device.type, (self.size,))
            for stack in model.stacks.values():
                for layer in stack.layers:
                    fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)  # the root's own group holds both tied embeddings
        return model

    def check(self, dataset: Dataset) -> None:
        fewest = min(bucket.rows for bucket in dataset.buckets)
        if fewest < self.size:
            raise UsageError(
                f"a batch of {fewest} sentences leaves some of {self.size} processes without one: "
                "raise data.sentences, or start fewer processes."
            )

    def part(self, batch: Batch) -> Batch:
        """Return this rank's sentences of a batch, in its padded shape."""
        if self.size == 1:
            return batch
        rows = torch.arange(len(batch.labels)).tensor_split(self.size)[self.rank]
        cut = slice(int(rows[0]), int(rows[-1]) + 1)
        weight = batch.weight[cut]
        return replace(
            batch,
            inputs={name: tensor[cut] for name, tensor in batch.inputs.items()},
            labels=batch.labels[cut],
            weight=weight,
            tokens=int(weight.sum()),
            masks={stack: mask[cut] for stack, mask in batch.masks.items()},
        )

    def accumulating(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch, in which DDP exchanges gradients only at the last micro-batch."""
        return model.no_sync() if isinstance(model, nn.parallel.DistributedDataParallel) and not last else nullcontext()

    def largest(self, number: int) -> int:
        """Return the largest of the numbers of all ranks."""
        if self.size == 1:
            return number
        held = torch.tensor(number)
        dist.all_reduce(held, dist.ReduceOp.MAX)
        return int(held)

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole state on the first rank; FSDP2 gathers its shards for it."""
        if self.kind != "fsdp":
            return optimizer.state_dict()
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        return get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )

    def load_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if self.kind != "fsdp":
            optimizer.load_state_dict(state)
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        if self.kind != "fsdp":
            return model.state_dict()
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def gathered(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return the parts of the checkpoint that differ by rank, gathered on the first rank."""
        if self.size == 1:
            return own
        own = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, own)
        everybody = [None] * self.size if self.first else None
        dist.gather_object(own, everybody)
        return {"ranks": everybody}

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a checkpoint. Raises UsageError if another number of ranks wrote it."""
        before = len(state.get("ranks", (None,)))
        if before != self.size:
            raise UsageError(
                f"{before} processes wrote this checkpoint and {self.size} would go on: "
                f"resume with {f'torchrun --nproc-per-node {before}' if before > 1 else 'one process'}."
            )
        return state["ranks"][self.rank] if self.size > 1 else state


def gather_team(train: TrainConfig) -> Team:
    """Join the processes that torchrun started, for ``train.parallel``; one process needs nothing.

    Raises UsageError for several processes without ``train.parallel``, and for ``train.parallel`` without torchrun.
    """
    started = "TORCHELASTIC_RUN_ID" in os.environ
    size = int(os.environ.get("WORLD_SIZE", 1)) if started else 1
    if train.parallel == "none":
        if size > 1:
            raise UsageError(f"torchrun started {size} processes: say with --parallel ddp or fsdp what they share.")
        return Team()
    if not started and not dist.is_initialized():
        raise UsageError(
            f"--parallel {train.parallel} needs torchrun: "
            f"torchrun --nproc-per-node 2 -m stabilitylab probe --parallel {train.parallel} ..."
        )
    if not dist.is_initialized():
        dist.init_process_group(backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(dist.destroy_process_group)
    team = Team(train.parallel, dist.get_rank(), dist.get_world_size())
    if not team.first:
        logging.getLogger("stabilitylab").setLevel(logging.ERROR)  # warnings once, not once a rank
    return team


def device_of(team: Team, device: torch.device, asked: str) -> torch.device:
    """Return ``device``, or the process's own GPU if several processes share the work.

    Raises UsageError if ``--device`` names one GPU for all processes, ResourceError if there are too few GPUs.
    """
    if team.kind == "none" or device.type != "cuda":
        return device
    if asked not in ("auto", "cuda"):
        raise UsageError(f"--device {asked} would put every process on one GPU: with --parallel give cuda, or nothing.")
    place = int(os.environ.get("LOCAL_RANK", team.rank))
    if place >= torch.cuda.device_count():
        raise ResourceError(
            f"process {place} of this machine has no GPU of its own, there are {torch.cuda.device_count()}: "
            "lower --nproc-per-node, or give --device cpu."
        )
    torch.cuda.set_device(place)
    return torch.device("cuda", place)
