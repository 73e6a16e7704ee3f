"""BranchNorm's figures (Liu et al. 2023), a module a figure."""
