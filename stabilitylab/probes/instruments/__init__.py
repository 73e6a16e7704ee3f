"""The instruments of a watcher, one concern a file, each with its own cadence and its own state."""
