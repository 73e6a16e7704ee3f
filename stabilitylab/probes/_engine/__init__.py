"""The way of a number from a hook to the sink: passes, boards, records, replays. Nothing here is for users."""
