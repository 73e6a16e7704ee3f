"""Lists runs that decide claims of several figures, and which no figure draws."""
