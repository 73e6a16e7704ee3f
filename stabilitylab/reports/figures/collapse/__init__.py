"""The figures of the collapse of encoders, which are ours: no paper has them."""
