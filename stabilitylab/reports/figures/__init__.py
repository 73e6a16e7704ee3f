"""Holds a folder a paper and a module a figure: its panels, the claims that it shows, and the runs that it needs."""
