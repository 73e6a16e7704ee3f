"""The figures of the probe histograms, of no paper."""
