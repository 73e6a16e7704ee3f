"""Admin's figures (Liu et al. 2020), a module a figure."""
