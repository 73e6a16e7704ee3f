"""The figure of a search for a learning rate."""
