"""The alarm: detectors over a row that is recorded anyway; their thresholds and error rates were measured on runs that
failed.

>>> with sl.watch(model, out="runs/mine", every=1, alarm=True) as w:  # doctest: +SKIP
...     ...  # an alarm is a line of the log: what, where, since when, how sure
"""

from .alarm import Alarm, Alert
from .calibrating import calibrate
from .calibration import CalibratedRule, Calibration, HealthyRun
from .row_signals import Reading, Signals
from .rules import AlarmRule, ErrorRates, RuleSet, fitted
from .signal import SIGNALS, Signal, names, signal

__all__ = [
    "SIGNALS",
    "Alarm",
    "AlarmRule",
    "Alert",
    "CalibratedRule",
    "Calibration",
    "ErrorRates",
    "HealthyRun",
    "Reading",
    "RuleSet",
    "Signal",
    "Signals",
    "calibrate",
    "fitted",
    "names",
    "signal",
]
