"""The process and the machine: device, threads, denormals, and the entries of run.json about them."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from ..config import TrainConfig
from ..data import Batch
from ..errors import ResourceError, UsageError
from ..probes.numerics import process_facts

ALIGNMENT = {"cuda": 8}  # kind of device -> divisor of padded lengths


def prepare_process(threads: int) -> None:
    """Set threads and the denormal mode. Call before the first tensor operation: an existing OpenMP pool does not
    inherit the denormal mode.

    Deep Post-LN's activation gradients underflow into denormals, which makes the CPU's backward pass 2 to 10 times
    slower. Denormals are flushed to zero, and the run records that.
    """
    torch.set_flush_denormal(True)
    torch.set_num_threads(threads)


def resolve_device(train: TrainConfig) -> torch.device:
    """Return ``train.device`` as an existing device; ``auto`` is CUDA if there is one. Raises UsageError for an unknown
    or unsupported device, ResourceError for a CUDA device that torch does not see."""
    if train.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(train.device)
    except RuntimeError as error:
        raise UsageError(f"unknown device {train.device!r}: use auto, cpu, cuda or cuda:N.") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {train.device!r} is not supported: use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        why = "install a CUDA build of torch" if torch.version.cuda is None else "see why with nvidia-smi"
        raise ResourceError(
            f"--device {train.device}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices; "
            f"use --device cpu, or {why}."
        )
    return device


def attention_kernels(train: TrainConfig, device: torch.device) -> tuple[str, ...] | None:
    """Return the attention kernels for ``train.attention`` on this device; None: torch's own choice."""
    if train.attention == "math":
        return ("math",)
    return ("flash", "efficient", "math") if train.attention == "auto" and device.type == "cuda" else None


def aligned(batch: Batch, device: torch.device) -> Batch:
    """Return ``batch`` padded for the device. On a GPU, lengths become multiples of 8: otherwise the memory-efficient
    kernel of attention pads the mask in each layer."""
    return batch.padded(alignment(device))


def alignment(device: torch.device) -> int:
    return ALIGNMENT.get(device.type, 1)


def provenance(train: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Return the provenance of a run: versions, git revision of this package, device, threads, numeric modes."""
    return {
        **process_facts(device, attention_kernels(train, device)),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),  # instruction sets round sums differently
        "threads": train.threads,
        "git_revision": git_revision(Path(__file__)),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def peak_memory(device: torch.device) -> int:
    """Return bytes: the maximum that the CUDA allocator reserved, or on a CPU the resident set of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return psutil.Process().memory_info().rss


def git_revision(file: Path) -> str | None:
    """Return the git revision of the repository that tracks ``file``; None if no repository tracks it, such as an
    installed file in a folder of somebody's repository."""

    def answer(*arguments: str) -> str:
        command = ["git", "-C", str(file.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()

    try:
        answer("ls-files", "--error-unmatch", file.name)
        return answer("describe", "--always", "--dirty", "--abbrev=40") or None
    except (OSError, subprocess.SubprocessError):
        return None
