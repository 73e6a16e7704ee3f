#!/usr/bin/env python
"""The exact part: what the inverted gain and one alpha for all depths do at initialisation, in float64.

    python results/deepnorm-baseline/exact.py [--runs runs/deepnorm-baseline/exact]

Measures every arm at 12 and 32 layers with three seeds (``stabilitylab onestep``, synthetic text) into ``exact.csv``
and draws ``figures/exact.png``: the gradient norm of each layer, and by how much the output of each layer changes if
q, k, v, out, gate, fc1 and fc2 move by 1e-6 along the signs of their gradients, as far as by a first step of Adam.
What is measured already is not measured again. ``page.py --write`` renews the tables of README.md.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))

import matplotlib as mpl
import numpy as np
from page_blocks import table
from protocol import LAYERS, STUDY, arms, constants
from shared import rows_of

from stabilitylab.onestep import measure
from stabilitylab.store import Run

mpl.use("agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
SEEDS = (3, 4, 5)
SWIGLU = 0.13912  # variance of a SwiGLU branch at gain 1, inner width 8d/3, unit input
COLUMNS = ("arm", "layers", "seed", "layer", "gradient", "change")
LOOKS = {
    "deepnorm": ("DeepNorm, DeepNet's constants", "#E69F00", "-"),
    "inverted": ("gain inverted", "#D55E00", "-"),
    "fixed-alpha": ("alpha 2.83", "#E69F00", ":"),
    "both": ("gain inverted, alpha 2.83", "#D55E00", ":"),
    "preln": ("Pre-LN", "#56B4E9", "-"),
    "mix-ln": ("Mix-LN", "#0072B2", "-"),
    "layernorm-scaling": ("LayerNorm scaling", "#636363", "-"),
}


def measured(arm: str, layers: int, seed: int, runs: Path) -> list[tuple[object, ...]]:
    """Return the rows of one model, measured now or before."""
    experiment = STUDY.experiment(arm, layers, 1e-6, seed, {"data": {"source": "synthetic"}})
    name = f"{arm}-{layers}-s{seed}"
    config = experiment.config.changed(probes={"names": ("grad_norm",)})
    if not (runs / name / "run.json").exists():
        measure(config, runs, name)
    run = Run.open(runs / name)
    if run.config["model"] != config.model_dump(mode="json")["model"]:
        raise SystemExit(f"{runs / name} is a measurement of another model: give an empty folder with --runs.")
    gradients = run.frame("grad_norm", by="layer").query("layer > 0").set_index("layer")["value"]
    changes = run.frame("perturbation").query("sublayer == 'ffn'").set_index("layer")["gradient"]
    return [
        (arm, layers, seed, layer, f"{gradients[layer]:.6e}", f"{changes[layer]:.6e}") for layer in range(1, layers + 1)
    ]


def rows(runs: Path) -> Iterator[tuple[object, ...]]:
    for layers in LAYERS:
        for arm in arms(layers):
            for seed in SEEDS:
                yield from measured(arm, layers, seed, runs)


def drawn(path: Path) -> None:
    """Draw ``exact.csv``: a row of panels a depth."""
    found: dict[tuple[int, str, str], dict[int, list[float]]] = {}
    for row in rows_of(HERE / "exact.csv"):
        for what in ("gradient", "change"):
            own = found.setdefault((int(row["layers"]), what, row["arm"]), {})
            own.setdefault(int(row["layer"]), []).append(float(row[what]))
    figure, axes = plt.subplots(len(LAYERS), 2, figsize=(9, 6.4), layout="constrained", sharey="col")
    titles = {
        "gradient": ("Gradient of each layer's parameters", "L2 norm"),
        "change": ("Change of each output by 1e-6 sign(gradient)", "mean square"),
    }
    for line, layers in zip(axes, LAYERS, strict=True):
        for axis, (what, (title, unit)) in zip(line, titles.items(), strict=True):
            for arm, (label, colour, dash) in LOOKS.items():
                if (own := found.get((layers, what, arm))) is not None:
                    middle = [np.exp(np.mean(np.log(own[layer]))) for layer in own]
                    axis.plot([*own], middle, dash, color=colour, label=label)
            axis.set(yscale="log", xlabel="layer", ylabel=unit)
            axis.set_title(f"{title}, {layers} layers", fontsize=9)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def closed() -> list[str]:
    """The table of the constants, in closed form."""
    found = {layers: constants(layers, SWIGLU) for layers in (6, 12, 24, 32, 64)}
    columns = (
        ("alpha", "alpha", "{:.4f}"),
        ("beta", "beta", "{:.4f}"),
        ("inverted gain", "inverted gain", "{:.4f}"),
        ("matrix ratio", "gain ratio", "{:.2f}"),
        ("branch ratio", "branch ratio", "{:.0f}"),
        ("c, DeepNet", "c", "{:.4f}"),
        ("c, inverted", "inverted c", "{:.3f}"),
        ("shortcut, DeepNet", "shortcut", "{:.6f}"),
        ("shortcut, inverted", "inverted shortcut", "{:.4f}"),
        ("2.83 / alpha", "fixed alpha ratio", "{:.3f}"),
    )
    lines = [(layers, *(text.format(own[key]) for _, key, text in columns)) for layers, own in found.items()]
    return table(("layers M", *(name for name, *_ in columns)), lines)


def first_last() -> list[str]:
    """The table of the measured ratios, from exact.csv: geometric means over seeds."""
    found: dict[tuple[int, str], dict[int, list[tuple[float, float]]]] = {}
    for row in rows_of(HERE / "exact.csv"):
        own = found.setdefault((int(row["layers"]), row["arm"]), {})
        own.setdefault(int(row["layer"]), []).append((float(row["gradient"]), float(row["change"])))
    lines = []
    for (layers, arm), own in found.items():
        means = {layer: np.exp(np.mean(np.log(values), axis=0)) for layer, values in own.items()}
        first, last = means[1], means[layers]
        lines.append(
            (layers, LOOKS[arm][0], f"{first[0]:.2e}", f"{last[0]:.2e}", f"{first[0] / last[0]:.2e}", f"{last[1]:.2e}")
        )
    names = ("layers", "arm", "gradient, layer 1", "gradient, last layer", "ratio", "change, last layer")
    return table(names, lines)


BLOCKS = {"closed": closed, "measured": first_last}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/deepnorm-baseline/exact"))
    given = parser.parse_args()
    found = list(rows(given.runs))
    with (HERE / "exact.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(found)
    drawn(HERE / "figures" / "exact.png")


if __name__ == "__main__":
    main()
