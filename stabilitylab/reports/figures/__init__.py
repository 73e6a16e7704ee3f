"""The figures: a folder a paper and a module a figure, with its panels, the claims that it shows, and its runs."""
