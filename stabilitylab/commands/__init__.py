"""One module a command: its options, and what it does once they are parsed. Heavy imports wait until then."""
