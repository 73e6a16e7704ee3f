"""The first NaN or inf of a run: its place, in order of execution, and the report about it."""
