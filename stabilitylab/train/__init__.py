"""The trainer of the reference Transformer: the first user of the probes."""

from .run import Plan, Result, automatic_name, join, plan, resume, start

__all__ = ["Plan", "Result", "automatic_name", "join", "plan", "resume", "start"]
