"""The gradient of each layer at initialisation, every architecture as a decoder alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from .... import arch_notes
from ....experiments import Experiment, Recipe, command, probing, sweep
from ... import style
from ...arrange import alike
from ...base import Figure, MissingRuns, Panel, Picture, Series, figure
from ...collection import Record, Runs
from ...measures.by_label import by_label
from ...measures.families import among_others, families
from ...measures.layers import layer_values
from ...measures.provenance import provenance

LAYERS_DRAWN = 200
# T-Fixup is not defined for a decoder alone; AttnRes in full needs memory by the square of the depth
LEFT_OUT = ("tfixup", "attnres")
SIZE = {"model": {"stack": "decoder"}, "data": {"sentences": 4}}
FLAT = 10.0  # between the largest and the smallest gradient of a stack whose layers learn alike


@sweep("family:gradients", scales=("tiny",), minutes=45)
def one_step_each(ask: Recipe) -> Iterator[Experiment]:
    """Steps once with every architecture as a decoder of 200 layers, three seeds; not AttnRes in full, whose memory
    grows with the square of the depth."""
    names = [note.name for note in arch_notes.built_in() if note.name not in LEFT_OUT]
    yield from ask.runs(names, [LAYERS_DRAWN], SIZE, probing("grad_norm"), seeds=(3, 4, 5), kind="onestep")


@figure("family:gradients", title="Gradients by layer, every architecture", source="stabilitylab onestep")
class GradientsOfAll(Figure):
    """The norm of the loss's gradient with respect to all parameters of each decoder layer, at initialisation, for
    decoders alone, in float64. Each panel has one family in colour, and the lines of all others in grey. Layers with a
    gradient of exactly 0 have no point. No paper draws this: ours."""

    def picture(self, runs: Runs) -> Picture:
        groups = runs.where(lambda run: run.layers[0] == 0, kind="onestep", table="grad_norm").groups()
        if not groups:
            raise MissingRuns("no one-step run of a decoder alone with grad_norm", command("family:gradients"))
        group = max(groups, key=lambda own: (len(own.labels), own[0].depth, len(own)))
        lines = {label: by_label(group.where(label=label), _gradients, log=True) for label in group.labels}
        drawn = {label: own for label, own in lines.items() if own}
        panels = [
            Panel(title, "decoder layer", "gradient norm (L2)", among_others(drawn, own), log_y=True, direct=True)
            for title, own in families([*drawn]).items()
        ]
        notes = [f"Drawn: {group.describe()}, float64. Lines are geometric means over seeds, bands their range."]
        if none := [style.title(label) for label in lines if label not in drawn]:
            notes.append(f"Not drawn: {', '.join(none)}, whose gradient is exactly 0 in every layer.")
        return Picture(alike(panels), _finding(drawn, group[0].depth), notes, provenance=provenance(group))


def _gradients(run: Record) -> dict[float, float]:
    """Return the gradient norm of each decoder layer where it is not 0."""
    values = layer_values(run, "grad_norm", "value", "decoder", 0)
    return {layer: value for layer, value in values.items() if value > 0}


def _finding(lines: Mapping[str, Sequence[Series]], depth: int) -> str:
    """Say in how many architectures the gradients of all layers are alike, and where they fall and rise most."""
    if not lines:
        return f"No architecture has a gradient in any of {depth} layers."
    flat = [label for label, own in lines.items() if max(own[0].y) / min(own[0].y) < FLAT]
    return (
        f"At {depth} layers the gradients of all layers lie within a factor of {FLAT:g} in {len(flat)} of {len(lines)} "
        f"architectures. From the first tenth of the layers to the last they "
        f"{_course({label: _ends(own[0].y) for label, own in lines.items()})}."
    )


def _course(ratios: Mapping[str, float]) -> str:
    """Say where the ratio last / first is smallest and where it is largest, and which of the two is a fall."""
    low, high = (choice(ratios, key=lambda label: ratios[label]) for choice in (min, max))
    least, most = (f"in {style.title(label)} ({ratios[label]:.2g} times)" for label in (low, high))
    if low == high:
        return f"{'fall' if ratios[low] < 1 else 'rise'} {least}"
    if ratios[high] < 1:
        return f"fall in all, most {least} and least {most}"
    if ratios[low] >= 1:
        return f"rise in all, most {most} and least {least}"
    return f"fall most {least} and rise most {most}"


def _ends(values: Sequence[float]) -> float:
    """Return the geometric mean of the last tenth of the values over that of the first."""
    tenth = max(1, len(values) // 10)
    return float(np.exp(np.mean(np.log(values[-tenth:])) - np.mean(np.log(values[:tenth]))))
