"""The detectors of this package, one family a file, each threshold beside its rule; each registers itself."""
