"""Dashboards: the numbers that ``watch(..., tracker=...)`` sends to TensorBoard, W&B, ..., through Accelerate."""

from .sink import Tee, TrackerSink, aggregates

__all__ = ["Tee", "TrackerSink", "aggregates"]
