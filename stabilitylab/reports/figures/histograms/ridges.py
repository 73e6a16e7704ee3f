"""Histograms of weights, gradients, updates and activations over the updates, as ridges."""

from __future__ import annotations

from ....histograms import TABLES
from ...base import Figure, MissingRuns, Picture, figure
from ...collection import Runs
from ...measures.histograms import Ridges, ridges
from ...measures.provenance import provenance

MOST = 2  # runs that are drawn
COMMAND = "stabilitylab probe --probes default,histograms"


@figure("histograms:ridges", title="Histograms over the updates", source="stabilitylab probe")
class HistogramRidges(Figure):
    """The sizes of the entries of a weight, its gradient, its update and a layer's activations, with one ridge per
    recorded row. Each table is drawn at the place whose histogram moved most. A ridge begins at the row's update. Its
    height is the share of the place's entries in a bin; positive and negative entries are drawn separately. No paper
    draws this: ours."""

    def picture(self, runs: Runs) -> Picture:
        own = runs.where(lambda run: any(table in run.run.tables for table in TABLES))
        drawn: dict[str, list[Ridges]] = {}
        for run in own:
            if len(drawn) < MOST and (found := [one for table in TABLES for one in ridges(run, table, most=1)]):
                drawn[run.name] = found
        if not drawn:
            raise MissingRuns("no run has recorded histograms", COMMAND)
        several = len(drawn) > 1
        panels = [one.named(name if several else "") for name, found in drawn.items() for one in found]
        far = max((one for found in drawn.values() for one in found), key=lambda one: one.distance)
        notes = [note for name, found in drawn.items() for one in found for note in one.notes(name if several else "")]
        if left := len(own) - len(drawn):
            notes.append(f"Left out: {left} more run{'s' * (left > 1)} with histograms.")
        finding = f"The histogram that moved most is that of the {far.what}, by {far.distance:.3g} powers of two."
        shown = own.where(lambda run: run.name in drawn)
        return Picture(panels, finding, notes, columns=2, provenance=provenance(shown))
