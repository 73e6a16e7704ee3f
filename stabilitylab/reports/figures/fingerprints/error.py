"""The error of a run against another, by its fingerprints, along the depth of the model."""

from __future__ import annotations

from ....bisect import Bisection
from ....diagnose.compare import sketched
from ...base import Figure, MissingRuns, Picture, figure
from ...collection import Record, Runs
from ...measures.bisection import error_panels
from ...measures.provenance import provenance

MOST = 2  # runs that are compared with the first
TABLE, SEED = "fingerprint", "train.seed"
COMMAND = "stabilitylab probe --probes default,fingerprint"


@figure("fingerprints:error", title="Where two runs part", source="stabilitylab bisect")
class FingerprintError(Figure):
    """The relative difference ||x_B - x_A|| / ||x_A|| at each place of the model, estimated by sums with random signs,
    for the first row that two runs have in common and in which they differ. Runs of one model with one seed are
    compared: the first of them with each of the next. The grey line is three times the control, here an assumed
    rounding; an added error above it counts. No paper draws this: ours."""

    def picture(self, runs: Runs) -> Picture:
        own = runs.where(lambda run: TABLE in run.run.tables)
        if len(own) < 2:
            raise MissingRuns("fewer than two runs have recorded fingerprints", COMMAND)
        models = [model for model in _by_model(own) if len(model) > 1]
        if not models:
            why = f"of {len(own)} runs with fingerprints no two have one model (architecture, settings and seed)"
            raise MissingRuns(why, COMMAND)
        for first, *others in models:
            found = {run.name: answer for run in others[:MOST] if (answer := sketched(first.run, run.run)) is not None}
            if found:
                break
        else:
            pair = f"{first.name}" if len(models) == 1 else "another of its model"
            raise MissingRuns(f"no run differs from {pair} in a row of fingerprints that both have", COMMAND)
        panels = [
            panel for name, answer in found.items() for panel in error_panels(answer, f"{name} against {first.name}")
        ]
        notes = [f"{name}, step {answer.step}: {answer.sentences()[0]}" for name, answer in found.items()]
        if left := len(own) - 1 - len(found):
            notes.append(f"Left out: {left} more run{'s' * (left > 1)} with fingerprints.")
        shown = own.where(lambda run: run.name in found or run.name == first.name)
        finding = _finding(first.name, found)
        return Picture(panels, finding, notes, columns=1, provenance=provenance(shown))


def _by_model(runs: Runs) -> list[Runs]:
    """Return groups of runs of one label, with equal settings of the model and one seed of its weights. Watched runs
    have no settings; those of a group have the same layers."""
    found: dict[object, list[Record]] = {}
    for run in runs:
        own = {key: repr(value) for key, value in run.settings.items() if key.startswith("model.") or key == SEED}
        rows = run.run.table(TABLE).rows if run.kind == "watched" else ()
        layers = frozenset((row.stack, row.layer) for row in rows)
        found.setdefault((run.kind, run.label, layers, *sorted(own.items())), []).append(run)
    return [Runs(group) for group in found.values()]


def _finding(first: str, found: dict[str, Bisection]) -> str:
    parted = [f"{name} {_parting(answer)}" for name, answer in found.items() if answer.exit_code]
    alike = [name for name, answer in found.items() if not answer.exit_code]
    if alike:
        parted.append(f"{' and '.join(alike)} differ{'s' * (len(alike) == 1)} by no more than rounding")
    return f"Against {first}, {'; '.join(parted)}: by an assumed rounding, without a control."


def _parting(answer: Bisection) -> str:
    if answer.first is not None and answer.first.phase == "weights":
        return f"has another parameter {answer.first.name} before anything is computed"
    return f"computes something else in {answer.where}"
