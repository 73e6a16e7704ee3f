"""Could the norm of what enters a LayerNorm come from its own statistics?  ||x||^2 = d (1 / rstd^2 - eps + mean^2).

    python benchmarks/norm_statistics.py

Prints the largest relative error over 4,096 tokens of width 512, against float64, of that and of a float32 norm, by
the root mean square of x; and the time of both, beside that of the LayerNorm. docs/speed.md says what followed.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from timing import machine, seconds
from torch import Tensor

TOKENS, WIDTH, EPS, CPU = 4096, 512, 1e-5, torch.device("cpu")


def from_statistics(mean: Tensor, rstd: Tensor) -> Tensor:
    mean, rstd = mean.double(), rstd.double()  # (tokens, 1) each
    return (WIDTH * (rstd**-2 - EPS + mean**2)).clamp_min(0).sqrt().squeeze(-1)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| rms of x | from the statistics | float32 norm |\n|---|---|---|")
    for scale in (30, 1, 1e-2, 1e-3, 1e-4, 1e-8):
        x = torch.randn(TOKENS, WIDTH) * scale
        _, mean, rstd = torch.native_layer_norm(x, (WIDTH,), None, None, EPS)
        exact = x.double().norm(dim=-1)
        errors = [
            float(((found - exact) / exact).abs().max()) for found in (from_statistics(mean, rstd), x.norm(dim=-1))
        ]
        print(f"| {scale:g} | {errors[0]:.1e} | {errors[1]:.1e} |")
    x = torch.randn(TOKENS, WIDTH)
    _, mean, rstd = torch.native_layer_norm(x, (WIDTH,), None, None, EPS)
    works = {
        "from the statistics": lambda: from_statistics(mean, rstd),
        "float32 norm": lambda: torch.linalg.vector_norm(x, dim=-1),
        "LayerNorm": lambda: F.layer_norm(x, (WIDTH,)),
    }
    taken = {name: 1e6 * float(np.median([seconds(work, CPU) for _ in range(60)])) for name, work in works.items()}
    print("\n" + "; ".join(f"{name} {time:,.0f} us" for name, time in taken.items()) + f". {machine(CPU)}.")


if __name__ == "__main__":
    main()
