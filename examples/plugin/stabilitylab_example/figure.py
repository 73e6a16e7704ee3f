"""A figure, the claim that it shows, and the runs that both need."""

from stabilitylab.experiments import command, probing, sweep
from stabilitylab.reports import Effect, Figure, MissingRuns, Panel, Picture, Region, Series, claim, figure

TABLE = "largest_entry"


@figure("example:1", title="Largest entry by layer", source="The example plug-in")
class LargestByLayer(Figure):
    """The largest entry of each layer's output at the last probed step, one line a run."""

    def picture(self, runs):
        ready = runs.where(table=TABLE)
        if not ready:
            raise MissingRuns(f"no run has recorded {TABLE}", command(self.id))
        lines = []
        for run in ready:
            last = run.at(TABLE, None, ["value"])
            encoder = last[last["stack_name"] == last["stack_name"].iloc[0]]
            lines.append(Series(run.name, encoder["layer"].tolist(), encoder["value"].tolist(), arch=run.label))
        panel = Panel("First stack", "layer", "largest entry [units of x]", lines)
        return Picture([panel], f"{len(lines)} runs recorded their largest entries.")


@claim(
    "X01",
    figure="example:1",
    paper="Example",
    sentence="No entry of a layer's output exceeds 10",
    source="The example plug-in",
    statistic="largest entry of all layers and rows, by seed",
    threshold="R: below 10; X: above 100",
    sweep="example:1",
)
def stays_small(runs):
    ready = runs.where(table=TABLE)
    if not ready:
        raise MissingRuns(f"no run has recorded {TABLE}")
    largest = {run.seed: float(run.frame(TABLE, ["value"])["value"].max()) for run in ready}
    return [Effect("largest entry", largest, Region(high=10), Region(low=100))]


@sweep("example:1", scales=("tiny",), minutes=0.25)
def damped_models(ask):
    """Trains Damped, one layer a side, with three seeds."""
    short = {"train": {"steps": 30, "warmup": 5}}
    yield from ask.runs(["damped"], [1], short, probing("default", TABLE), seeds=(3, 4, 5))
