"""The arms of the comparison, their constants, and what is asked: fixed before any run.

Constants of a decoder of M layers. DeepNet (2203.00555), Figure 2: alpha = (2M)^(1/4), gain beta = (8M)^(-1/4) on v,
out, fc1 and fc2. Inverted: gain (8M)^(+1/4). Fixed: alpha = 2.8284271 at every depth. README.md has the source of each.
"""

from __future__ import annotations

from typing import Any

from own_rates import DECODERS, Study

from stabilitylab.config import merge

ALPHA = 2.8284271  # (2 * 32)^(1/4)
LAYERS = (12, 32)
UPDATES = 1000
SCHEMES = ("preln", "mix-ln", "layernorm-scaling")
SHARED = merge(DECODERS, {"train": {"weight_decay": 0.0, "beta2": 0.999}})


def alpha_of(layers: int) -> float:
    """Return DeepNet's constant on the shortcut."""
    return (2 * layers) ** 0.25


def beta_of(layers: int) -> float:
    """Return DeepNet's gain of v, out, fc1 and fc2."""
    return (8 * layers) ** -0.25


def arms(layers: int) -> dict[str, dict[str, Any]]:
    """Return the model settings of each arm. At 32 layers the fixed alpha is DeepNet's own, and two arms fall away."""
    inverted = {"arch": "deepnorm", "options": {"beta": (8 * layers) ** 0.25}}
    found: dict[str, dict[str, Any]] = {
        **{scheme: {"arch": scheme} for scheme in SCHEMES},
        "deepnorm": {"arch": "deepnorm"},
        "inverted": inverted,
    }
    if abs(alpha_of(layers) - ALPHA) > 1e-6:
        found["fixed-alpha"] = {"arch": "deepnorm", "alpha": ALPHA}
        found["both"] = {**inverted, "alpha": ALPHA}
    return found


STUDY = Study(SHARED, arms, LAYERS, UPDATES)


def constants(layers: int, variance: float) -> dict[str, float]:
    """Return what the two gains do to a feed-forward block at initialisation, in closed form.

    ``variance``: of a branch with gain 1 at an input of variance 1. A branch of gain g is g^2 times that of gain 1, so
    that LN(alpha x + F) = LN(x + c F_1), c = g^2 / alpha; x has variance 1. The input of the norm has variance alpha^2
    + g^4 variance, the shortcut passes on alpha / sqrt(of that), and Adam's first update, whose entries have the size
    of the rate, is 1 / g as large beside a weight.
    """
    alpha, beta = alpha_of(layers), beta_of(layers)
    gain = 1 / beta
    after = {name: alpha**2 + g**4 * variance for name, g in (("deepnet", beta), ("inverted", gain))}
    return {
        "alpha": alpha,
        "beta": beta,
        "inverted gain": gain,
        "gain ratio": gain / beta,
        "branch ratio": gain**2 / beta**2,
        "c": beta**2 / alpha,
        "inverted c": gain**2 / alpha,
        "norm input": after["deepnet"],
        "inverted norm input": after["inverted"],
        "shortcut": alpha / after["deepnet"] ** 0.5,
        "inverted shortcut": alpha / after["inverted"] ** 0.5,
        "fixed alpha ratio": ALPHA / alpha,
    }
