"""A probe: the largest entry of what each layer yields."""

from stabilitylab.probes import Max, Probe, probe
from stabilitylab.probes.places import layers


@probe("largest_entry", on="forward", at=layers, unit="units of x", columns={"value": Max()}, log=True)
class LargestEntry(Probe):
    """max |x| over the entries of each layer's output, over real tokens."""

    def measure(self, site, x, y, weight):
        return y.abs().amax(dim=-1)
