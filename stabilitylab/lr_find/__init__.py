"""The search for the best and the largest safe learning rate of a model, by trials. Calling the package calls
:func:`.find.lr_find`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..callable_package import make_callable
from ..late_names import late_names
from .result import Bracket, RateAnswer
from .search import Choice, RateResult, RateTrial, RateTrials, Rungs, choose

if TYPE_CHECKING:
    from .find import search_rates
    from .halving import RatePlan
    from .reference import reference_subject
    from .scale import ScaledRates
    from .subject import RateSubject, model_subject

_HOME = {  # need torch, but for the plan
    "RatePlan": "halving",
    "RateSubject": "subject",
    "ScaledRates": "scale",
    "model_subject": "subject",
    "reference_subject": "reference",
    "search_rates": "find",
}

__all__ = [
    "Bracket",
    "Choice",
    "RateAnswer",
    "RatePlan",
    "RateResult",
    "RateSubject",
    "RateTrial",
    "RateTrials",
    "Rungs",
    "ScaledRates",
    "choose",
    "model_subject",
    "reference_subject",
    "search_rates",
]


__getattr__ = late_names(__name__, _HOME)
make_callable(__name__, "find")
