"""What a watcher is made of: its parts, what goes into a row, the way of a row to the sink."""
