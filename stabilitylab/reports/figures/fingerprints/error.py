"""The error of a run against another, by its fingerprints, along the depth of the model."""

from __future__ import annotations

from ....bisect import Bisection
from ....diagnose.compare import sketched
from ...base import Figure, MissingRuns, Picture, figure
from ...collection import Runs
from ...measures.bisection import error_panels
from ...measures.provenance import provenance

MOST = 2  # runs that are compared with the first
TABLE = "fingerprint"
COMMAND = "stabilitylab probe --probes default,fingerprint"


@figure("fingerprints:error", title="Where two runs part", source="stabilitylab bisect")
class FingerprintError(Figure):
    """The relative difference ||x_B - x_A|| / ||x_A|| at each place of the model, estimated by sums with random signs,
    for the first row that two runs have in common and in which they differ. The first run with fingerprints is compared
    with each of the next. The grey line is three times the control, here an assumed rounding; an added error above it
    counts. No paper draws this: ours."""

    def picture(self, runs: Runs) -> Picture:
        own = runs.where(lambda run: TABLE in run.run.tables)
        if len(own) < 2:
            raise MissingRuns("fewer than two runs have recorded fingerprints", COMMAND)
        first, *others = own
        found = {run.name: answer for run in others[:MOST] if (answer := sketched(first.run, run.run)) is not None}
        if not found:
            raise MissingRuns(f"no run differs from {first.name} in a row of fingerprints that both have", COMMAND)
        panels = [
            panel for name, answer in found.items() for panel in error_panels(answer, f"{name} against {first.name}")
        ]
        notes = [f"{name}, step {answer.step}: {answer.sentences()[0]}" for name, answer in found.items()]
        if left := len(own) - 1 - len(found):
            notes.append(f"Left out: {left} more run{'s' * (left > 1)} with fingerprints.")
        shown = own.where(lambda run: run.name in found or run.name == first.name)
        finding = _finding(first.name, found)
        return Picture(panels, finding, notes, columns=1, provenance=provenance(shown))


def _finding(first: str, found: dict[str, Bisection]) -> str:
    parted = [f"{name} computes something else in {answer.where}" for name, answer in found.items() if answer.exit_code]
    alike = [name for name, answer in found.items() if not answer.exit_code]
    if alike:
        parted.append(f"{' and '.join(alike)} differ{'s' * (len(alike) == 1)} by no more than rounding")
    return f"Against {first}, {'; '.join(parted)}: by an assumed rounding, without a control."
