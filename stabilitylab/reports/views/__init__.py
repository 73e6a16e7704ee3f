"""Views of one run for notebooks: matplotlib Axes, and HTML."""
