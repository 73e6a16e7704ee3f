"""The probes of this package, one family a file; each registers itself when it is imported."""
