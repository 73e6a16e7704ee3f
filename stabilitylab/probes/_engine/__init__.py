"""How a number gets from a hook to the sink: passes, boards, records, replays. Nothing here is for users."""
