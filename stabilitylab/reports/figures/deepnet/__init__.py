"""DeepNet's figures (Wang et al. 2022), a module a figure."""
