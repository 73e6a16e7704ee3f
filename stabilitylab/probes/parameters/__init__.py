"""What probes of parameters read: parameters cut into rows and groups, sums of their squares, copies, ranks."""
