"""The signals of the alarm, by what they look at."""
