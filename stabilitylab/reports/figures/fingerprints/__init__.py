"""The figures of the probe fingerprint, of no paper."""
