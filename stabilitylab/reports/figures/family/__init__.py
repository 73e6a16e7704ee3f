"""The figures of all architectures together, of no paper."""
