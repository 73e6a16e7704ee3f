"""Explain what went wrong in a training by replaying it: a flight recorder, an audit, and interventions."""

from .recorder import FlightRecorder, UpdateRecorder

Recorder = FlightRecorder

__all__ = ["FlightRecorder", "Recorder", "UpdateRecorder"]
