"""The data sources of this package, one a file; each registers itself."""
