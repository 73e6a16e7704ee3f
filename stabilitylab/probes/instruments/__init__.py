"""What a watcher is made of: instruments, one concern a file, each with its own cadence and its own state."""
