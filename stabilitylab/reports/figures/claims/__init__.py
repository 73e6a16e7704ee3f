"""Runs by which claims of several figures are decided, and which no figure draws."""
