"""The answers to the questions of a check, by name: each is asked once, and one that cannot be answered says why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from ..errors import UsageError, first_line, meant
from .bounds import not_checked
from .result import Check

SKIPPED = "skip= leaves it out"


class Answers:
    """Asks questions and keeps their answers. ``names``: all questions, in their order; ``skip``: those to leave out.

    Raises UsageError for a name in ``skip`` that is no question.
    """

    def __init__(self, names: Sequence[str], skip: Collection[str]) -> None:
        for name in skip:
            if name not in names:
                hint = meant(name, names)
                known = ", ".join(names)
                raise UsageError(f"skip names {name!r}, which is no question.{hint} The questions are {known}.")
        self._names, self.skip = names, frozenset(skip)
        self._found: dict[str, Check] = {}

    @property
    def checks(self) -> list[Check]:
        """Return the answers in the order of the questions; an answer that goes with another follows it."""
        order = {name: place for place, name in enumerate(self._names)}
        return sorted(self._found.values(), key=lambda check: order.get(check.name, len(order)))

    def ask(self, names: Sequence[str], answer: Callable[[], Iterable[Check]]) -> None:
        """Keep what ``answer`` returns on the questions ``names``. An error of :meth:`why_not` is a reason, and what
        ``skip`` names is left out."""
        if set(names) <= self.skip:
            self.leave(names, SKIPPED)
            return
        try:
            answered = list(answer())
        except Exception as error:
            if not (why := self.why_not(error)):
                raise
            answered = [not_checked(name, why) for name in names]
        for check in answered:
            self._found[check.name] = not_checked(check.name, SKIPPED) if check.name in self.skip else check

    def leave(self, names: Sequence[str], why: str) -> None:
        """Keep that these questions were not asked, with the reason."""
        self._found |= {name: not_checked(name, why) for name in names}

    def why_not(self, error: Exception) -> str:
        """Return why a question that raised this error has no answer; "" for an error that ends the check."""
        said = first_line(error, 200, otherwise="without a message").rstrip(".")
        return f"it raised {type(error).__name__} ({said})"
