"""Holds what several figures measure: numbers of a run, and how runs are compared in them."""
