"""One fixed colour, marker and dash for each architecture, everywhere: on paper, on the page, in grey."""

from __future__ import annotations

from dataclasses import dataclass

from ..arch_notes import note, notes

__all__ = ["PARTS", "of_amounts", "title"]

INK, GREY = "#222222", "#7f7f7f"
# Okabe and Ito's colour-blind safe palette is given to the six architectures of the papers, with a marker each, so that
# grey print tells them apart. Nineteen such colours do not exist: the other architectures differ from each other and
# from these in colour or in marker, and within a family in both. These are left for labels without a look:
SPARE = (("#8c6d31", "X"), ("#6a51a3", "h"), ("#636363", "p"), ("#393b79", "*"))
# Colours of groups of parameters, none of them an architecture's: seaborn.cubehelix_palette(6, start=2.6, rot=.9,
# dark=.12, light=.64, hue=1.2), from dark to light, so that grey print keeps their order.
PARTS = ("#171c3d", "#492869", "#833477", "#b14c6c", "#c3745d", "#bea162")
# Colours of the outputs of stacks, which stand in one legend with groups of parameters and with INK:
OUTPUTS = ("#1b7f79", "#a5c85a", "#4aa3df")
AMOUNTS = ("#b0b0b0", "#8a8a8a", "#666666", "#444444", "#202020")  # greys for the values of one setting
PALER = 0.55  # share of white in the markers of controls; hollow markers mean few seeds
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


@dataclass(frozen=True)
class Style:
    """The look of a series. A control of an architecture keeps its colour, with pale markers and another dash."""

    colour: str
    marker: str
    dash: str
    face: str  # colour of the inside of a marker behind which enough seeds stand


def looks() -> dict[str, tuple[str, str]]:
    """Map each architecture that has a look to its colour and marker, in the order of tables and legends."""
    return {said.name: said.look for said in notes().values() if said.look}


def family(label: str) -> str:
    """Names the architecture that a label is about: ``branchnorm`` of ``branchnorm T=1``."""
    first = label.split("/")[0]
    known = (said.name for said in notes().values())
    return max((arch for arch in known if first.startswith(arch)), key=len, default=first)


def style(label: str) -> Style:
    """Return the look of a label. A label without a look gets a spare one, the same in every figure and process."""
    arch = family(label)
    own = said.look if (said := note(arch)) else None
    known = own is not None
    colour, marker = own or SPARE[sum(label.encode()) % len(SPARE)]
    control = known and label != arch
    dash = CONTROLS.get(label, DASHES[1 + sum(label.encode()) % 3]) if control else "solid"
    return Style(colour, marker, dash, paler(colour) if control else colour)


def paler(colour: str) -> str:
    """Mixes #rrggbb with white, about half and half."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + PALER * (255 - part)):02x}" for part in parts)


def title(label: str) -> str:
    """Writes a label as figures print it: ``BranchNorm T=1``, ``Post-LN/Pre-LN``."""
    parts = [(part, family(part)) for part in label.split("/")]
    titles = {arch: said.title for _, arch in parts if (said := note(arch)) and said.title}
    return "/".join(part.replace(arch, titles.get(arch, arch), 1) for part, arch in parts)


def of_amounts(count: int) -> list[str]:
    """Returns neutral colours for values of one setting, smallest first: the larger, the darker."""
    places = [round(at * (len(AMOUNTS) - 1) / max(count - 1, 1)) for at in range(count)] if count > 1 else [-1]
    return [AMOUNTS[place] for place in places]


def use_print_style() -> None:
    """Sets seaborn's theme and context for paper; embeds fonts in PDF and keeps them as text in SVG."""
    import seaborn

    own = {
        "axes.grid": True,
        "axes.linewidth": 0.6,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "figure.dpi": 100,
        "font.sans-serif": ["DejaVu Sans"],
        "grid.color": "#dddddd",
        "grid.linewidth": 0.3,
        "legend.frameon": False,
        "lines.linewidth": 1.1,
        "lines.markersize": 3.2,
        "pdf.fonttype": 42,
        "savefig.dpi": 300,
        "svg.fonttype": "none",
        "svg.hashsalt": "stabilitylab",
        "xtick.major.size": 2.2,
        "xtick.minor.size": 1.2,
        "ytick.major.size": 2.2,
        "ytick.minor.size": 1.2,
    }
    seaborn.set_theme(context="paper", style="ticks", font_scale=0.76, rc=own)
