"""The table, the figure and the verdicts of depth.py, from what each update took."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
from timing import RESAMPLES, Middle

ANCHOR = "anchor"  # a mode: one bare model at all depths, over whose time those of several depths are compared
TOLERANCE = 0.10  # "constant per layer": within so much of the first pair of depths
LOOKS = {  # Okabe and Ito's colours, and a marker each, so that grey print tells them apart
    "bare": ("#000000", "o"),
    "probes": ("#0072B2", "s"),
    "checkpointing": ("#D55E00", "^"),
    "checkpointing, probes": ("#009E73", "D"),
}
DASHES = {"CPU": "solid", "GPU eager": "dashed", "GPU graphs": "dotted"}
MIB = 2**20


def costs(updates: pd.DataFrame, cadence: int) -> dict[str, np.ndarray]:
    """Mode -> seconds of an update, as measured and then in each bootstrap resample, of one series at one depth.

    A row with a reference pass, and the one before it, are kinds of their own: a median within each kind, weighted by
    the share that the kind has in a long run. All modes are resampled alike, since they shared the rounds.
    """
    table = updates.pivot_table(index="row", columns="mode", values="seconds")
    kinds = np.minimum(-table.index.to_numpy() % cadence, 2)  # 0: reference pass; 1: the row before it; 2: others
    random, total = np.random.default_rng(int(updates["depth"].iloc[0])), 0.0  # depths are independent of each other
    for kind, share in ((0, 1 / cadence), (1, 1 / cadence), (2, 1 - 2 / cadence)):
        values = table.to_numpy()[kinds == kind]  # (rounds, modes)
        chosen = random.integers(len(values), size=(RESAMPLES, len(values)))
        medians = np.concatenate([np.median(values, axis=0)[None], np.median(values[chosen], axis=1)])
        total = total + share * medians
    return dict(zip(table.columns, np.asarray(total).T, strict=True))


def interval(samples: np.ndarray) -> Middle:
    low, high = np.quantile(samples[1:], [0.025, 0.975])
    return Middle(float(samples[0]), float(low), float(high))


def marginals(values: dict[int, np.ndarray]) -> dict[str, Middle]:
    """Pair of neighbouring depths -> what a layer more costs there, over what it costs between the first two."""
    slopes = {(a, b): (values[b] - values[a]) / (b - a) for a, b in pairwise(sorted(values))}
    first = next(iter(slopes.values()), None)
    return {f"{a}-{b}": interval(slope / first) for (a, b), slope in [*slopes.items()][1:]}


def verdict(found: dict[str, Middle]) -> str:
    inside = [abs(m.low - 1) <= TOLERANCE and abs(m.high - 1) <= TOLERANCE for m in found.values()]
    outside = [m.low > 1 + TOLERANCE or m.high < 1 - TOLERANCE for m in found.values()]
    if not found:
        return "needs three depths"
    return "constant" if all(inside) else "not constant" if any(outside) else "inconclusive"


def text(frame: pd.DataFrame, cadence: int) -> str:
    lines = ["# Step time and memory against depth", "", *dict.fromkeys(f"{made}." for made in frame["made"]), ""]
    lines += [
        "| device | depth | mode | ms an update [95 %] | over bare [95 %] | ms a layer | peak MiB | KiB a layer |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    times: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    peaks: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    for (series, depth), updates in frame.groupby(["series", "depth"]):
        found = costs(updates, cadence)
        for mode in (name for name in frame["mode"].unique() if name in found and name != ANCHOR):
            samples = found[mode]
            peak = float(updates[updates["mode"] == mode]["peak_bytes"].iloc[0])
            times.setdefault((series, mode), {})[depth] = samples / found[ANCHOR]
            peaks.setdefault((series, mode), {})[depth] = np.full(RESAMPLES + 1, peak)
            ms, over = interval(1e3 * samples), interval(samples / found["bare"])
            lines.append(
                f"| {series} | {depth} | {mode} | {number(ms.value)} [{number(ms.low)}, {number(ms.high)}] | {over} "
                f"| {ms.value / depth:.3g} | {peak / MIB:,.0f} | {peak / 1024 / depth:,.0f} |"
            )
    lines += [
        "",
        f"What a layer more costs, over what it costs between the first two depths; within {TOLERANCE:.0%}:",
        "",
    ]
    lines += ["| device | mode | what | pairs of depths | verdict |", "|---|---|---|---|---|"]
    for (series, mode), values in times.items():
        if mode == "control":
            continue
        for what, quantity in (("time", values), ("memory", peaks[series, mode])):
            found = marginals(quantity)
            pairs = "; ".join(f"{pair}: {m if what == 'time' else f'{m.value:.3f}'}" for pair, m in found.items())
            lines.append(f"| {series} | {mode} | {what} | {pairs} | {verdict(found)} |")
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw(frame: pd.DataFrame, path: Path, cadence: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullLocator, ScalarFormatter

    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (time, memory) = plt.subplots(1, 2, figsize=(6.9, 3.2), layout="constrained")
        for (series, mode), updates in frame[~frame["mode"].isin(["control", ANCHOR])].groupby(
            ["series", "mode"], sort=False
        ):
            depths = sorted(updates["depth"].unique())
            colour, marker = LOOKS[mode]
            look = {"color": colour, "linestyle": DASHES[series], "marker": marker, "markersize": 4, "linewidth": 1.3}
            found = []
            for depth in depths:
                whole = frame[(frame["series"] == series) & (frame["depth"] == depth)]
                found.append(interval(1e3 * costs(whole, cadence)[mode]))
            ends = [[m.value - m.low for m in found], [m.high - m.value for m in found]]
            label = f"{series}: {mode}"
            time.errorbar(depths, [m.value for m in found], yerr=ends, capsize=2, label=label, **look)
            memory.plot(depths, updates.groupby("depth")["peak_bytes"].first() / MIB, **look)
        for axes, title in ((time, "an update (ms)"), (memory, "peak memory (MiB)")):
            axes.set(xscale="log", yscale="log", xlabel="layers", ylabel=title)
            axes.set_xticks(sorted(frame["depth"].unique()))
            axes.xaxis.set_major_formatter(ScalarFormatter())
            axes.xaxis.set_minor_locator(NullLocator())
            axes.grid(alpha=0.25, linewidth=0.5)
        columns = max(2, frame["series"].nunique())
        figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
        figure.savefig(path, dpi=300)
        plt.close(figure)


def write(frame: pd.DataFrame, out: Path, cadence: int) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(out.with_suffix(".csv"), index=False, float_format="%.6g")
    out.with_suffix(".md").write_text(text(frame, cadence), encoding="utf-8")
    draw(frame, out.with_suffix(".png"), cadence)
