"""Tables of the papers, a module a table."""
