"""The proof that watching changes nothing in a user's loop: two unwatched runs and a watched one."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..api import watch
from ..errors import InputError, StabilityLabError, UsageError, listed
from ..probes import random_states_kept
from ..probes.state import seed_all
from ..silence import silenced
from .fingerprint import Print, fingerprint, kinds
from .updates import Steps, optimizers_of, stepping

Verdict = Literal["neutral", "not neutral", "not decidable here"]
Make = Callable[[], tuple[Any, ...]]
EXIT_CODES: Mapping[Verdict, int] = {"neutral": 0, "not neutral": 1, "not decidable here": 5}
GIVES = "(model, update) or (model, update, a dict of watch's arguments)"
OWN = ("out", "resume", "tracker")  # options of watch() that a verification sets itself
WORDS = {"value": "plain attribute", "optimizer": "entry of an optimizer", "random-state": "random state"}


@dataclass(frozen=True)
class Neutrality:
    """The result of :func:`verify_neutral`.

    - ``where``: the first difference, with its update (from 1) and its tensor; "" for "neutral". For "not neutral", the
      watched run differs from the other two. For "not decidable here", the two unwatched runs differ.
    - ``compared``: the number of entries of each kind after an update.
    - ``ended``: the tables that ended in the watched run, each with the reason.
    - ``warned``: the warnings about the loop in the watched run.
    - ``left_out``: the entries that were not compared, each with the reason.
    """

    verdict: Verdict
    updates: int
    where: str = ""
    update: int | None = None
    tensor: str = ""
    compared: Mapping[str, int] = field(default_factory=dict)
    ended: Mapping[str, str] = field(default_factory=dict)
    warned: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def neutral(self) -> bool:
        return self.verdict == "neutral"

    @property
    def exit_code(self) -> int:
        """The exit code: 0 for neutral, 1 for not neutral, 5 for not decidable here, since this machine does not repeat
        a run."""
        return EXIT_CODES[self.verdict]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        counts = ", ".join(
            f"{number} {_plural(WORDS.get(kind, kind), number)}" for kind, number in self.compared.items()
        )
        updates = f"{self.updates} {_plural('update', self.updates)}"
        first = {
            "neutral": f"neutral: {updates}, watched and unwatched, left the same bits behind ({counts}).",
            "not neutral": f"not neutral: {self.where}.",
            "not decidable here": f"not decidable here: two runs that nobody watched differ; {self.where}. Seed what "
            "draws at random in make(), or call torch.use_deterministic_algorithms(True).",
        }[self.verdict]
        reasons: dict[str, list[str]] = {}
        for table, why in self.ended.items():
            reasons.setdefault(why, []).append(table)
        lines = [f"ended in the watched run: {listed(tables)}; {why}." for why, tables in reasons.items()]
        lines += [f"warned in the watched run: {warning}." for warning in self.warned]
        lines += [f"not compared: {each}." for each in self.left_out]
        return "\n".join([first, *lines])


@dataclass
class _Course:
    """One run: the fingerprints after each update, the optimizers that stepped, and its end."""

    prints: list[Print] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    failed: str = ""  # with what it ended early
    ended: Mapping[str, str] = field(default_factory=dict)
    warned: tuple[str, ...] = ()


def verify_neutral(make: Make, updates: int = 3, *, seed: int = 0, **watching: Any) -> Neutrality:
    """Verify that :func:`stabilitylab.watch` changes nothing in a loop: run the loop twice unwatched and once watched.

    ``make()`` returns a new model and a function that makes one update: forward, backward, the optimizer's step. The
    function gets the watcher as its argument, and calls the watcher's ``step(loss=loss)`` where a loop would. A
    function without parameters is watched at the optimizer's step. The result of the function is compared too, as a
    loss. ``make()`` may return a dict as a third item, with arguments of :func:`watch` (``reference``, ``mask``,
    ``optimizer``, ...); ``watching`` are such arguments as well. By default every row is recorded with all default
    probes, the first batch is the reference, and the watcher gets the optimizers that the function refers to.

    Each run begins with ``seed`` in Python's, numpy's and torch's generators. After each update, and after the last
    reference pass, these are compared bit by bit: losses, parameters, buffers and attributes of modules, gradients,
    state and settings of every ``torch.optim.Optimizer`` that stepped, random states. The random states of the caller
    are restored.

    Returns a :class:`Neutrality`: "neutral", "not neutral" with the first tensor and update that differ, or "not
    decidable here" if the two unwatched runs differ. It holds for this model, loop, machine and number of updates.
    Raises UsageError for a wrong ``make``, InputError if an unwatched update raises an error.

    >>> def make():  # doctest: +SKIP
    ...     model = Net()
    ...     optimizer = torch.optim.AdamW(model.parameters())
    ...
    ...     def update(watcher):
    ...         loss = model(batch).loss
    ...         loss.backward()
    ...         watcher.step(loss=loss)
    ...         optimizer.step(), optimizer.zero_grad()
    ...
    ...     return model, update
    >>> print(sl.verify_neutral(make))  # doctest: +SKIP
    """
    if not callable(make):
        raise UsageError(f"make = {make!r} must be a function that returns {GIVES}.")
    if type(updates) is not int or updates < 1:
        raise UsageError(f"updates = {updates!r} must be a whole number of at least 1.")
    _check_options(watching)
    with random_states_kept():
        first, second = (_unwatched(make, updates, seed) for _ in range(2))
        left_out = _unsteady(first, second)
        if difference := _difference(first, second, left_out):
            return Neutrality("not decidable here", updates, *difference, compared=kinds(first.prints[0]))
        watched = _watched(make, updates, seed, watching)
    said = [f"{name.partition(' ')[2]}, which differs between unwatched runs" for name in sorted(left_out)]
    if not first.optimizers:
        said.append("the optimizer's state, since no torch.optim.Optimizer stepped")
    difference = _difference(first, watched, left_out)
    where, update, tensor = difference or ("", None, "")
    return Neutrality(
        "not neutral" if difference else "neutral",
        updates,
        where,
        update,
        tensor,
        compared=kinds(first.prints[0]),
        ended=watched.ended,
        warned=watched.warned,
        left_out=tuple(said),
    )


def _unwatched(make: Make, updates: int, seed: int) -> _Course:
    model, update, _ = _made(make, seed)
    course = _Course()
    with stepping(update, Steps(), course.optimizers) as once:
        for number in range(1, updates + 1):
            try:
                course.prints.append(fingerprint(model, course.optimizers, once()))
            except StabilityLabError:
                raise
            except Exception as error:
                raise InputError(
                    f"update {number} failed unwatched: {type(error).__name__}: {error} (-v shows where)."
                ) from error
    course.prints.append(fingerprint(model, course.optimizers, ()))
    return course


def _watched(make: Make, updates: int, seed: int, watching: Mapping[str, Any]) -> _Course:
    model, update, options = _made(make, seed)
    options: dict[str, Any] = {"every": 1, "update_every": 1, "curvature_every": 1} | options | dict(watching)
    options.setdefault("optimizer", optimizers_of(update, model) or None)
    course = _Course()
    with tempfile.TemporaryDirectory() as folder, silenced():
        watcher = watch(model, out=Path(folder) / "run", **options)
        try:
            with watcher, stepping(update, Steps(watcher), course.optimizers) as once:
                for _ in range(updates):
                    course.prints.append(fingerprint(model, course.optimizers, once()))
        except StabilityLabError:
            raise
        except Exception as error:
            course.failed = f"{type(error).__name__}: {error}"
        course.ended, course.warned = dict(watcher.ended), tuple(watcher.loop_warnings)
    course.prints.append(fingerprint(model, course.optimizers, ()))
    return course


def _made(make: Make, seed: int) -> tuple[nn.Module, Callable[..., Any], dict[str, Any]]:
    seed_all(seed)
    try:
        given = make()
    except StabilityLabError:
        raise
    except Exception as error:
        raise InputError(f"make() failed: {type(error).__name__}: {error} (-v shows where).") from error
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):
        raise UsageError(f"make() returned {type(given).__name__}: it must return {GIVES}.")
    model, update, options = (*given, {})[:3]
    if not isinstance(model, nn.Module) or not callable(update) or not isinstance(options, Mapping):
        kinds_given = ", ".join(type(each).__name__ for each in given)
        raise UsageError(f"make() returned ({kinds_given}): it must return {GIVES}.")
    _check_options(options)
    return model, update, dict(options)


def _check_options(options: Mapping[str, Any]) -> None:
    known = [name for name in list(inspect.signature(watch).parameters)[1:] if name not in OWN]
    for name in options:
        if name in OWN:
            raise UsageError(f"{name!r} is set by the verification itself: leave it out.")
        if name not in known:
            raise UsageError(f"{name!r} is no argument of watch: it takes {', '.join(known)}.")


def _unsteady(one: _Course, other: _Course) -> set[str]:
    """Return the plain attributes that differ between two unwatched runs, such as a time or a random name: they do not
    concern training, and are not compared."""
    pairs = zip(one.prints, other.prints, strict=True)
    return {
        name for a, b in pairs for name in a.keys() | b.keys() if a.get(name) != b.get(name) and name[:6] == "value "
    }


def _difference(one: _Course, other: _Course, left_out: set[str]) -> tuple[str, int, str] | None:
    """Return the first difference in words, its update and its name."""
    for number, (a, b) in enumerate(zip(one.prints[:-1], other.prints[:-1], strict=False), start=1):
        if (name := _first(a, b, left_out)) is not None:
            return f"update {number}: {name} differs", number, name
    done = len(other.prints) - 1
    if other.failed:
        return f"update {done + 1}: the watched run raised {other.failed}, the unwatched did not", done + 1, ""
    if (name := _first(one.prints[-1], other.prints[-1], left_out)) is not None:
        return f"after update {done}, when the watch had ended: {name} differs", done, name
    return None


def _first(one: Print, other: Print, left_out: set[str]) -> str | None:
    names = dict.fromkeys([*one, *other])
    found = next((n for n in names if n not in left_out and one.get(n) != other.get(n)), None)
    if found is None:
        return None
    kind, _, rest = found.partition(" ")
    return f"{WORDS.get(kind, kind)} {rest}".strip()


def _plural(word: str, number: int) -> str:
    if number == 1:
        return word
    if word.startswith("entry"):
        return word.replace("entry", "entries", 1)
    return f"{word}es" if word.endswith("s") else f"{word}s"
