"""Figures of the curvature of the loss: learning rates and depth."""
