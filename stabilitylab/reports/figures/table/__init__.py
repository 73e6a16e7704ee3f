"""Holds tables of the papers, a module a table."""
