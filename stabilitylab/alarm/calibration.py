"""A calibrated alarm: thresholds from healthy runs of one recipe, and the file that holds them."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from ..errors import InputError, StabilityLabError, UsageError, bounded, listed, own_words
from ..inputs import contents
from ..schema import Table
from ..store.files import replace_file
from ..store.layout import is_name
from .cadence import Ranges, count, is_in, rises, step_of
from .recipe import differences, in_lines, one_line, recipe_of
from .rules import AlarmRule, RuleSet
from .signal import signal_of

FORMAT = "stabilitylab calibrated alarm"
VERSION = 1
SUFFIX = ".json"
LARGEST = 50_000_000  # bytes of such a file
MAKE = "stabilitylab alarm --calibrate RUN... --out FILE.json"


def _printable(text: str) -> str:
    if not is_name(text):
        raise ValueError("it cannot be printed on one line")
    return text


def _rising(steps: Ranges) -> Ranges:
    if not rises(steps):
        raise ValueError("steps do not rise")
    return steps


Text = Annotated[str, AfterValidator(_printable)]
Name = Annotated[Text, Field(min_length=1, max_length=1000)]
Count = Annotated[int, Field(ge=0, lt=2**62)]
Steps = Annotated[tuple[tuple[Count, Count, Annotated[int, Field(ge=1)]], ...], AfterValidator(_rising)]


class FilePart(BaseModel):
    """A frozen part of the file; unknown entries are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class HealthyRun(FilePart):
    """A run that calibrated an alarm: its name, its id, and for each rule its largest score over all rows (None: the
    rule had no number in it)."""

    name: Name
    run_id: Text
    scores: dict[Name, FiniteFloat | None]


class CalibratedRule(FilePart):
    """A rule of an alarm as :class:`~stabilitylab.alarm.AlarmRule` has it. ``own_threshold``: the threshold that came
    with the rule; ``threshold``: the calibrated one, above which it speaks."""

    name: Name
    title: Text
    weights: dict[Name, FiniteFloat]
    centres: dict[Name, FiniteFloat]
    lowest: dict[Name, FiniteFloat] = {}
    own_threshold: FiniteFloat
    threshold: FiniteFloat

    @property
    def rule(self) -> AlarmRule:
        return AlarmRule(self.name, self.weights, self.threshold, self.title, self.centres, lowest=self.lowest)


class RecordedTable(FilePart):
    """A table of the calibrated runs: the number of its places, and the steps of its rows."""

    places: Count
    steps: Steps


class Calibration(FilePart):
    r"""Thresholds of an alarm from k healthy runs of one recipe and one length, with a bound on false alarms.

    A run's score is one number, U = max over rules r and rows t of (s_r(t) - c_r). s_r is the score of a rule, and c_r
    the threshold that came with the rule: a constant that depends on no run, which makes rules comparable. The alarm of
    a new run speaks if its U is larger than the largest of the k runs, so each rule speaks above c_r + max U_i. All
    rules together hold the bound, whatever their number:

        P(any alarm in a new healthy run) <= 1 / (k + 1)

    Proof: if the k runs and the new run are exchangeable, so are their k + 1 scores, and each of them is as likely as
    any other to be the largest. At most one score is larger than all others, so the new one is with probability
    1 / (k + 1) at most (Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005, Sec. 2.1).

    The probability is over the k runs and the new run together, so it is an average over files like this one: of one
    given file the rate of false alarms is random, with the distribution Beta(1, k) where scores have no ties. A number
    that is not finite is always an alarm, and stands outside the bound.

    - ``rule_set``: the name of the rules; ``left_out``: a signal or rule -> the table or metric that the runs lack.
    - ``steps``: the steps of the rows as ranges (first, last, distance); ``tables``: the recorded tables.
    - ``recipe``: settings that the runs have in common; ``differing``: those in which they differ, in words.
    - ``file``: the name of the file, for messages.
    """

    stabilitylab: Text
    rule_set: Text
    runs: Annotated[tuple[HealthyRun, ...], Field(min_length=1)]
    rules: Annotated[tuple[CalibratedRule, ...], Field(min_length=1)]
    left_out: dict[Name, Text]
    steps: Annotated[Steps, Field(min_length=1)]
    tables: dict[Name, RecordedTable]
    recipe: dict[Name, Any]
    differing: dict[Name, Text]
    file: str = Field(default="", exclude=True)

    @model_validator(mode="after")
    def _consistent(self) -> Calibration:
        own = {rule.name: rule.own_threshold for rule in self.rules}
        if len(own) < len(self.rules):
            raise ValueError("two of its rules have one name")
        if any({*run.scores} != {*own} or not any(v is not None for v in run.scores.values()) for run in self.runs):
            raise ValueError("a run has scores of other rules, or none")
        expected = thresholds(own, [run.scores for run in self.runs])
        if any(rule.threshold != expected[rule.name] for rule in self.rules):
            raise ValueError("its thresholds do not follow from the scores of its runs")
        return self

    @property
    def k(self) -> int:
        """Return the number of healthy runs."""
        return len(self.runs)

    @property
    def bound(self) -> float:
        """Return the bound on the probability of any alarm in a new healthy run, 1 / (k + 1)."""
        return 1 / (self.k + 1)

    @cached_property
    def rows(self) -> int:
        """Return the number of rows of each run."""
        return count(self.steps)

    @property
    def alarm_rules(self) -> RuleSet:
        """Return the rules with their calibrated thresholds."""
        return RuleSet(tuple(own.rule for own in self.rules), name=self.file or self.rule_set)

    @property
    def sure(self) -> str:
        """Return the bound as it stands in an alert."""
        return (
            f"at most 1 in {self.k + 1} healthy runs of this recipe has an alarm, calibrated with {self.k} of them"
            if self.k > 1
            else "at most 1 in 2 healthy runs of this recipe has an alarm, calibrated with one of them"
        )

    @property
    def sentence(self) -> str:
        """Return the bound in plain words, with its conditions."""
        of = "1 healthy run" if self.k == 1 else f"{self.k} healthy runs"
        return (
            f"{of} of {self.rows} rows: at most 1 in {self.k + 1} new healthy runs of this recipe and length has a "
            f"false alarm (1 in k + 1; k = {self.k})"
        )

    @cached_property
    def _read(self) -> dict[str, RecordedTable]:
        """The tables that the rules read."""
        read = {signal_of(signal).table for rule in self.rules for signal in rule.weights} - {""}
        return {name: table for name, table in self.tables.items() if name in read}

    def unlike_tables(self, tables: Sequence[Table]) -> str:
        """Return why a run with these tables is not like the calibrated runs; "" if it is. Only tables count that the
        rules read."""
        places = {table.name: len(table.rows) for table in tables}
        if lacking := sorted({*self._read} - {*places}):
            return f"this run does not record {listed(lacking)}, which the calibrated runs did"
        for name, known in self._read.items():
            if places[name] != known.places:
                return f"table {name} has {places[name]} places, and {known.places} in the calibrated runs"
        return ""

    def unlike_row(self, number: int, step: int, tables: Collection[str]) -> str:
        """Return why row ``number`` (from 1 on) at ``step``, which holds ``tables``, is not a row of the calibrated
        runs; "" if it is."""
        if number > self.rows:
            return f"this run is longer than the {self.rows} rows of the calibrated runs"
        if step != (expected := step_of(number, self.steps)):
            return f"row {number} of this run is step {step}, and step {expected} in the calibrated runs"
        for name, known in self._read.items():
            if (name in tables) != is_in(step, known.steps):
                here, there = ("a row", "none") if name in tables else ("no row", "one")
                return f"table {name} has {here} at step {step}, and {there} in the calibrated runs"
        return ""

    def other_settings(self, manifest: Mapping[str, Any]) -> list[str]:
        """Return in a few lines the settings in which a run is not like the calibrated runs, from its run.json."""
        recipe = recipe_of(manifest)
        known = {key: value for key, value in self.recipe.items() if key not in self.differing}
        new = {key: value for key, value in recipe.items() if key not in self.differing}
        found = differences({self.file or "the calibrated runs": known, "this run": new})
        return in_lines(found)

    def save(self, path: str | Path) -> None:
        """Write the file. Raises UsageError for a file that exists, or a name that does not end in ``.json``, and
        ResourceError if it cannot be written."""
        path = Path(path)
        refuse_file(path)
        replace_file(path, (json.dumps(self.document(), indent=2, allow_nan=False) + "\n").encode())

    def document(self) -> dict[str, Any]:
        """Return the content of the file."""
        head = {"format": FORMAT, "version": VERSION, "sentence": self.sentence}
        return {**head, "k": self.k, "bound": self.bound, "rows": self.rows, **self.model_dump(mode="json")}

    @classmethod
    def read(cls, path: str | Path) -> Calibration:
        """Read a file that :meth:`save` wrote. Raises InputError for another or a changed file, in one sentence."""
        path = Path(path)
        content = contents(path, LARGEST, "no option")
        try:
            document = json.loads(content.decode())
            if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
                raise ValueError("it is no such file")
            version = document.pop("version", None)
            if type(version) is int and version > VERSION:
                raise InputError(
                    f"{path} was written by a newer stabilitylab (version {version}, this one reads {VERSION}): "
                    "upgrade with `pip install --upgrade stabilitylab`."
                )
            if version != VERSION or type(version) is not int:
                raise ValueError("its version is unknown")
            told = {name: document.pop(name, None) for name in ("sentence", "k", "bound", "rows")}
            found = cls.model_validate_json(json.dumps(document, allow_nan=False)).model_copy(
                update={"file": path.name}
            )
            if (told["k"], told["bound"], told["rows"]) != (found.k, found.bound, found.rows):
                raise ValueError("its k, bound or rows are not those of its runs")
            found.alarm_rules  # noqa: B018  # a signal that this version does not know raises here
        except InputError:
            raise
        except (RecursionError, UsageError, ValueError) as error:  # covers broken JSON, UTF-8 and pydantic's errors
            why = bounded(first_of(error), 300).rstrip(".")
            raise InputError(f"{path} is not a calibrated alarm ({why}): make it with `{MAKE}`.") from error
        return found


def refuse_file(path: Path) -> None:
    """Raise UsageError for a file that exists, or for a name that an alarm would take for the name of a rule set."""
    if path.suffix != SUFFIX:
        raise UsageError(f"{path} must end in {SUFFIX}: without it an alarm takes the name for that of a rule set.")
    if path.exists():
        raise UsageError(f"{path} exists: remove it, or choose another name.")


def first_of(error: Exception) -> str:
    """Return the first finding of a failed validation in words, or the error's own words."""
    if not isinstance(error, ValidationError):
        return str(error) if isinstance(error, StabilityLabError | ValueError) else type(error).__name__
    first = error.errors()[0]
    where = ".".join(one_line(str(part)) for part in first["loc"])
    text = own_words(first["msg"])
    return f"{where}: {text}" if where else text


def thresholds(own: Mapping[str, float], scores: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Return the threshold of each rule, c_r + max_i max_r (s_ir - c_r), from the largest score s_ir of run i.

    r: the rules. ``own``: the thresholds c_r that came with the rules. The alarm of a new run must be above its
    threshold: a score that equals the largest of a healthy run is no alarm.
    """
    known = [(name, value) for run in scores for name, value in run.items() if value is not None]
    excess = max(value - own[name] for name, value in known)
    found = {}
    for name, own_threshold in own.items():
        reached = max((value for rule, value in known if rule == name), default=-math.inf)
        found[name] = max(own_threshold + excess, reached)  # rounded, the sum may be less than what was reached
    return found
