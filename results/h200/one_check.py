"""One check of a GPU, in a process of its own: ``kernels``, ``memory on|off`` or ``capture``; JSON into ``--out``.

python results/h200/one_check.py kernels --device cuda --out kernels.json
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # what is imported from there waits until a function needs it
GIB = 2**30
LENGTHS = (21, 24, 48, 64, 192)  # odd, padded to 8, the custom one, and 64 mod 128, with which cuDNN gave NaN
DTYPES = (torch.bfloat16, torch.float32)
TELLING = ("mm", "attention", "fmha", "flash", "sdpa", "cudnn", "softmax", "pad")
MASKS = {"padding": 1, "everything": 0}  # tokens that the shortest sentence has left
LOW = -1e30  # of a masked token
KERNELS = {  # name in run.json -> kernel of scaled_dot_product_attention, and whether torch may choose it now
    "flash": (SDPBackend.FLASH_ATTENTION, torch.backends.cuda.flash_sdp_enabled),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.mem_efficient_sdp_enabled),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.cudnn_sdp_enabled),
    "math": (SDPBackend.MATH, torch.backends.cuda.math_sdp_enabled),
}


def kernels(device: torch.device, smoke: bool) -> list[dict[str, Any]]:
    """What attention really runs, forward and backward, and whether its gradients are finite.

    With the kernels that runs choose ("auto") and with torch's own choice; behind a mask as of padding, of which one
    sentence has a single token left, and behind one that leaves a sentence nothing, as no run has it.
    """
    from stabilitylab.config import TrainConfig
    from stabilitylab.train import provenance

    own = provenance(TrainConfig(), device)["numerics"]["attention"]
    cases = itertools.product((("auto", own), ("torch", None)), DTYPES, LENGTHS[:2] if smoke else LENGTHS, MASKS)
    found = []
    for (choice, chosen), dtype, length, masked in cases:
        gradients, work = attended((2, 2) if smoke else (192, 8), length, dtype, device, chosen, MASKS[masked])
        work()  # what is loaded at a first call is none of it
        names = profiled(work, device)
        facts = {"choice": choice, "dtype": str(dtype).removeprefix("torch."), "length": length, "masked": masked}
        finite = all(bool(each.isfinite().all()) for each in gradients())
        allowed = chosen or [kernel for kernel, (_, is_on) in KERNELS.items() if is_on()]
        found.append({**facts, "finite": finite, "allowed": allowed, "kernels": names})
    return found


def attended(
    size: tuple[int, int], length: int, dtype: torch.dtype, device: torch.device, chosen: Any, left: int
) -> tuple[Callable[[], list[torch.Tensor]], Callable[[], None]]:
    """The gradients of q, k and v, and what makes them; of the first sentence ``left`` tokens are not masked."""
    torch.manual_seed(0)
    rows, heads = size
    shape = (rows, heads, length, 64)
    inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    mask = torch.zeros(rows, 1, 1, length, device=device, dtype=dtype)
    mask[:, :, :, -5:] = LOW
    mask[0, :, :, left:] = LOW

    def work() -> None:
        with sdpa_kernel([KERNELS[kernel][0] for kernel in chosen]) if chosen else nullcontext():
            torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask).sum().backward()

    return lambda: [each.grad for each in inputs if each.grad is not None], work


def profiled(work: Callable[[], None], device: torch.device) -> list[str]:
    """Names of the device's kernels (on a CPU of operators) that attention may consist of."""
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as seen:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
    names = sorted({event.key[:120] for event in seen.key_averages()})
    return [name for name in names if any(word in name.lower() for word in TELLING)]


def memory(device: torch.device, smoke: bool, graphs: str) -> list[dict[str, Any]]:
    """Allocated against reserved memory of a wide deep run, update by update, beside what was estimated."""
    from subject import prepared, trainer

    sets = ["probes.names=['grad_norm']", "probes.every=2", f"train.device={device.type}"]
    wide = ["model.d_model=512", "model.d_ffn=2048", "model.heads=8", "train.precision=bf16", "data.sentences=192"]
    sets += ["data.sentences=4", "model.d_model=16", "model.d_ffn=16"] if smoke else wide
    sets.append(f"train.cuda_graphs={'off' if smoke else graphs}")
    plan = prepared(2 if smoke else 72, *sets)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        own = trainer(plan, Path(folder) / "run")
        for row in range(3 if smoke else 14):
            began = time.perf_counter()
            own.update()
            own.row += 1
            found.append({"row": row, **held(device), "seconds": round(time.perf_counter() - began, 4)})
        own.watcher.close()
    return [{"estimated_gib": plan.footprint.total / GIB, "recorded": plan.recorder is not None}, *found]


def held(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {"allocated_gib": 0.0, "reserved_gib": 0.0}
    torch.cuda.synchronize()
    return {
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.memory_reserved() / GIB,
    }


class Refusing:
    """Stands for a recorder where there is no GPU."""

    def warm_up(self, work: Callable[[], Any]) -> Any:
        return work()

    def record(self, work: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    def another(self) -> Refusing:
        return self


def capture(device: torch.device, smoke: bool) -> list[dict[str, Any]]:
    """A capture that must fail, since the host reads a number in it; and what came back: memory, random numbers, the
    next capture."""
    from stabilitylab.probes import CudaGraphs, attempt

    size = 1 << (10 if smoke else 28)
    x = torch.ones(size, device=device)
    before = held(device)
    recorder = CudaGraphs(device) if device.type == "cuda" else Refusing()
    why = attempt(recorder, lambda: float((x * 2 + 1).sum()))
    gc.collect()
    after = held(device)
    numbers = torch.rand(4, device=device)
    facts: dict[str, Any] = {
        "refused": why if isinstance(why, str) else None,
        "reserved_gib_before": before["reserved_gib"],
        "reserved_gib_after": after["reserved_gib"],
        "memory_came_back": after["reserved_gib"] <= before["reserved_gib"] + 0.1,
        "random_numbers": bool(((numbers >= 0) & (numbers < 1)).all()),
    }
    if device.type == "cuda":
        total, again = recorder.record(lambda: x.sum())
        again()
        facts["next_capture"] = total.item() == size
        facts["pinned"] = bool(torch.ones(3).pin_memory().to(device).sum() == 3)
    return [facts]


def main() -> int:
    from stabilitylab.config import TrainConfig
    from stabilitylab.train import provenance

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kernels", "memory", "capture"))
    parser.add_argument("graphs", nargs="?", choices=("on", "off"), default="off", help="of memory")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if asked.what == "memory":
        rows = memory(device, asked.smoke, asked.graphs)
    else:
        rows = {"kernels": kernels, "capture": capture}[asked.what](device, asked.smoke)
    entry = {"environment": provenance(TrainConfig(), device), "rows": rows}
    entry["environment"].pop("argv")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(entry, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row))
    checked = ("finite", "memory_came_back", "random_numbers", "next_capture", "pinned")
    wrong = [row for row in rows if any(row.get(key) is False for key in checked)]
    ours = [
        row for row in wrong if row.get("choice") != "torch" and row.get("masked") != "everything"
    ]  # others are news
    return 1 if ours or (asked.what == "capture" and not rows[0]["refused"]) else 0


if __name__ == "__main__":
    sys.exit(main())
