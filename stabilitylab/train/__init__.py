"""The trainer of the reference Transformer: the first user of the probes."""

from .run import Plan, Result, plan, resume, start

__all__ = ["Plan", "Result", "plan", "resume", "start"]
