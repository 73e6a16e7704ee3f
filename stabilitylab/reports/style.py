"""One fixed colour, marker and dash for each architecture, everywhere: on paper, on the page, in grey."""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib

INK, GREY = "#222222", "#7f7f7f"
# Okabe and Ito's colour-blind safe palette, and a marker of its own for each, so that grey print tells them apart.
ARCHS: dict[str, tuple[str, str]] = {
    "postln": ("#D55E00", "o"),
    "postln-init": ("#CC79A7", "v"),
    "preln": ("#56B4E9", "^"),
    "deepnorm": ("#E69F00", "s"),
    "branchnorm": ("#0072B2", "D"),
    "admin": ("#009E73", "P"),
}
# Nineteen colours cannot be told apart: these differ from each other, and from the six above, in colour or in marker,
# and within a family in both.
LATER: dict[str, tuple[str, str]] = {
    "dsinit": ("#D55E00", "X"),
    "dsinit-code": ("#CC79A7", "h"),
    "rezero": ("#009E73", "*"),
    "rfixup": ("#0072B2", "p"),
    "tfixup": ("#393b79", "v"),
    "dlcl": ("#8c6d31", "^"),
    "dlcl-post": ("#D55E00", "s"),
    "normformer": ("#6a51a3", "X"),
    "subln": ("#009E73", "p"),
    "sandwich": ("#8c6d31", "h"),
    "periln": ("#56B4E9", "o"),
    "layernorm-scaling": ("#636363", "*"),
    "resi-dual": ("#0072B2", "*"),
}
LOOKS = {**ARCHS, **LATER}  # in the fixed order of tables and legends
SPARE = (("#8c6d31", "X"), ("#6a51a3", "h"), ("#636363", "p"), ("#393b79", "*"))
DASHES = ("solid", "dashed", "dotted", "dashdot")
CONTROLS = {  # the look of the controls that the sweeps run; any other gets one by its name
    "postln+beta": "dashed",
    "postln gain=1": "dashdot",
    "postln-init gain=1": "dashdot",
    "postln/preln": "dotted",
    "branchnorm T=1": "dashed",
    "branchnorm alpha=0": "dotted",
    "branchnorm xavier": "dashdot",
    "branchnorm exp": "dashdot",
    "branchnorm sigmoid": "dotted",
    "deepnorm alpha-only": "dashed",
    "deepnorm alpha-only gain=1": "dashdot",
    "deepnorm beta-only": "dotted",
}
NAMES = {
    "postln": "Post-LN",
    "postln-init": "Post-LN-init",
    "preln": "Pre-LN",
    "deepnorm": "DeepNorm",
    "branchnorm": "BranchNorm",
    "admin": "Admin",
    "dsinit": "DS-Init",
    "dsinit-code": "DS-Init (code)",
    "rezero": "ReZero",
    "rfixup": "R-Fixup",
    "tfixup": "T-Fixup",
    "dlcl": "DLCL",
    "dlcl-post": "DLCL (Post-LN)",
    "normformer": "NormFormer",
    "subln": "Sub-LN",
    "sandwich": "Sandwich-LN",
    "periln": "Peri-LN",
    "layernorm-scaling": "LayerNorm scaling",
    "resi-dual": "ResiDual",
}


@dataclass(frozen=True)
class Style:
    """How a series looks; a control of an architecture keeps its colour, with open markers and another dash."""

    colour: str
    marker: str
    dash: str
    filled: bool


def family(label: str) -> str:
    """The architecture that a label is about: ``branchnorm`` of ``branchnorm T=1``."""
    first = label.split("/")[0]
    return max((arch for arch in NAMES if first.startswith(arch)), key=len, default=first)


def style(label: str) -> Style:
    """The look of a label; one that no table knows gets a spare one, the same in every figure and process."""
    arch = family(label)
    known = arch in LOOKS
    colour, marker = LOOKS[arch] if known else SPARE[sum(label.encode()) % len(SPARE)]
    control = known and label != arch
    dash = CONTROLS.get(label, DASHES[1 + sum(label.encode()) % 3]) if control else "solid"
    return Style(colour, marker, dash, not control)


def title(label: str) -> str:
    """A label as figures print it: ``BranchNorm T=1``, ``Post-LN/Pre-LN``."""
    parts = [(part, family(part)) for part in label.split("/")]
    return "/".join(part.replace(arch, NAMES[arch], 1) if arch in NAMES else part for part, arch in parts)


def use_print_style() -> None:
    """Sizes for print, fonts embedded in PDF and kept as text in SVG."""
    matplotlib.rcParams.update(
        {
            "font.size": 7.5,
            "axes.titlesize": 8,
            "axes.labelsize": 7.5,
            "legend.fontsize": 6.5,
            "xtick.labelsize": 6.5,
            "ytick.labelsize": 6.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.linewidth": 0.6,
            "axes.grid": True,
            "grid.linewidth": 0.3,
            "grid.color": "#dddddd",
            "lines.linewidth": 1.1,
            "lines.markersize": 3.2,
            "legend.frameon": False,
            "pdf.fonttype": 42,
            "svg.fonttype": "none",
            "svg.hashsalt": "stabilitylab",
            "figure.dpi": 100,
            "savefig.dpi": 300,
        }
    )
