"""A folder a paper, a module a figure: its panels, the claims that it shows, and the runs that it needs."""
