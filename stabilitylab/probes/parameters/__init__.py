"""Parameters as probes read them: cut into rows and groups, sums of their squares, copies, ranks."""
