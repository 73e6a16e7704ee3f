# pyright: reportMissingImports=false, reportUnknownMemberType=false
"""The Triton kernel of :mod:`.one_pass`, in a module of its own, since Triton must be installed to import it."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def update(
    gradients: Any,  # (parameters,) addresses
    addresses: Any,  # (3, parameters) addresses of weights and moments
    of_tensor: Any,  # (chunks,) each
    first: Any,
    entries: Any,
    corrections: Any,  # (2, parameters) float64: 1 - beta1^t and sqrt(1 - beta2^t)
    rate: Any,  # 0-dim
    sums: Any,  # (chunks, SUMS) float64
    parameters: Any,
    beta1: Any,
    beta2: Any,
    eps: Any,
    decay: Any,
    TURNS: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
):
    """AdamW's update of one chunk, as ``torch._fused_adamw_`` writes it, and the sums of what it read and wrote."""
    chunk = tl.program_id(0)
    tensor = tl.load(of_tensor + chunk)
    start = tl.load(first + chunk)
    count = tl.load(entries + chunk)
    g_at = tl.load(gradients + tensor).to(tl.pointer_type(tl.float32)) + start
    w_at = tl.load(addresses + tensor).to(tl.pointer_type(tl.float32)) + start
    m_at = tl.load(addresses + parameters + tensor).to(tl.pointer_type(tl.float32)) + start
    v_at = tl.load(addresses + 2 * parameters + tensor).to(tl.pointer_type(tl.float32)) + start
    lr = tl.load(rate).to(tl.float32)
    size = lr / tl.load(corrections + tensor).to(tl.float32)
    root = tl.load(corrections + parameters + tensor).to(tl.float32)
    gg = tl.zeros((BLOCK,), tl.float64)
    ww = tl.zeros((BLOCK,), tl.float64)
    dd = tl.zeros((BLOCK,), tl.float64)
    below = tl.zeros((BLOCK,), tl.float64)
    for turn in range(TURNS):
        place = turn * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        g = tl.load(g_at + place, mask=inside, other=0.0)
        w = tl.load(w_at + place, mask=inside, other=0.0)
        m = beta1 * tl.load(m_at + place, mask=inside, other=0.0) + (1 - beta1) * g
        v = beta2 * tl.load(v_at + place, mask=inside, other=0.0) + (1 - beta2) * g * g
        new = w - lr * decay * w
        new = new - size * m / (tl.sqrt(v) / root + eps)
        tl.store(w_at + place, new, mask=inside)
        tl.store(m_at + place, m, mask=inside)
        tl.store(v_at + place, v, mask=inside)
        moved = tl.where(inside, new - w, 0.0).to(tl.float64)
        wide_g = g.to(tl.float64)
        wide_w = w.to(tl.float64)
        gg += wide_g * wide_g
        ww += wide_w * wide_w
        dd += moved * moved
        below += tl.where(inside & (tl.abs(g) < eps), 1.0, 0.0).to(tl.float64)
    at = sums + chunk * SUMS
    tl.store(at, tl.sum(gg))
    tl.store(at + 1, tl.sum(ww))
    tl.store(at + 2, tl.sum(dd))
    tl.store(at + 3, tl.sum(below))
