"""Runs that decide claims of several figures, and that no figure draws."""
