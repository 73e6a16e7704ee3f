"""The places of two fingerprints that belong together: by name, by a map of names, else by structure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from .prints import PASSES, Fingerprint, PlacePrint, Places


@dataclass(frozen=True)
class Pair:
    """A place of both fingerprints."""

    phase: str  # one of PASSES
    a: PlacePrint
    b: PlacePrint


@dataclass(frozen=True)
class Matched:
    """The pairs, each pass in a's order; how they were found; and the places that only one side has, by pass."""

    pairs: tuple[Pair, ...]
    by: str  # "name" | "map" | "structure"
    only_a: Mapping[str, Sequence[str]]
    only_b: Mapping[str, Sequence[str]]


def parsed(maps: Iterable[str]) -> list[tuple[re.Pattern[str], str]]:
    r"""Return the rules of ``--map``: REGEX=REPLACEMENT, applied to b's names. Raises UsageError for any other text."""
    rules = []
    for text in maps:
        pattern, sign, to = text.partition("=")
        try:
            rules.append((re.compile(pattern), to))
        except re.error as error:
            raise UsageError(f"--map {text!r}: {pattern!r} is no regular expression ({error}).") from error
        if not sign or not pattern:
            raise UsageError(f"--map {text!r} must be 'REGEX=REPLACEMENT', from names of the second to the first.")
    return rules


def renamed(name: str, rules: Sequence[tuple[re.Pattern[str], str]]) -> str:
    for pattern, to in rules:
        name = pattern.sub(to, name)
    return name


def matched(a: Fingerprint, b: Fingerprint, maps: Sequence[str] = ()) -> Matched:
    """Pair the places of two fingerprints. Raises UsageError if they have none in common.

    Names decide, after the rules of ``maps`` on b's. A pass with no name in common, and a layer (or the rest outside
    the layers) with none, is paired by structure if both sides have equally many places there: in the order of their
    calls, inputs with inputs, outputs with outputs. Parameters are paired in the order of registration.
    """
    rules, pairs = parsed(maps), []
    only_a: dict[str, list[str]] = {}
    only_b: dict[str, list[str]] = {}
    structural = False
    for phase in PASSES:
        ours, theirs = a.passes.get(phase, {}), b.passes.get(phase, {})
        found = _by_name(ours, theirs, rules)
        rest_a = [p for p in ours.values() if p.name not in found]
        taken = {p.name for p in found.values()}
        rest_b = [p for p in theirs.values() if p.name not in taken]
        if rest_a and rest_b:
            more = _by_structure(rest_a, rest_b)
            structural |= bool(more)
            found |= more
        taken = {p.name for p in found.values()}
        pairs += [Pair(phase, p, found[p.name]) for p in ours.values() if p.name in found]
        only_a[phase] = [p.name for p in ours.values() if p.name not in found]
        only_b[phase] = [p.name for p in theirs.values() if p.name not in taken]
    if not pairs:
        raise UsageError(
            f"{a.label} and {b.label} have no place in common: pair them with --map 'REGEX=REPLACEMENT', "
            "from the names of the second to those of the first (stabilitylab.sites lists them)."
        )
    kept_a, kept_b = ({name: rest for name, rest in only.items() if rest} for only in (only_a, only_b))
    return Matched(tuple(pairs), "structure" if structural else "map" if rules else "name", kept_a, kept_b)


def _by_name(ours: Places, theirs: Places, rules: Sequence[tuple[re.Pattern[str], str]]) -> dict[str, PlacePrint]:
    found: dict[str, PlacePrint] = {}
    for place in theirs.values():
        name = renamed(place.name, rules)
        if name in ours and name not in found:
            found[name] = place
    return found


def _by_structure(ours: Sequence[PlacePrint], theirs: Sequence[PlacePrint]) -> dict[str, PlacePrint]:
    """Pair what names leave over: within each layer, in the order of the calls."""
    groups: list[dict[tuple[object, ...], list[PlacePrint]]] = []
    for places in (ours, theirs):
        stacks = {stack: number for number, stack in enumerate(dict.fromkeys(p.stack for p in places if p.layer))}
        firsts = _edges(places)
        held: dict[tuple[object, ...], list[PlacePrint]] = {}
        for place in places:
            where = (stacks.get(place.stack, -1), place.layer) if place.layer else (-1, place.order > firsts)
            held.setdefault((*where, _side(place.name), place.absent), []).append(place)
        groups.append(held)
    first, second = groups
    return {
        one.name: other
        for key, some in first.items()
        if len(some) == len(second.get(key, ()))
        for one, other in zip(some, second[key], strict=True)
    }


def _edges(places: Sequence[PlacePrint]) -> float:
    """Return the order of the first place inside a layer: what comes before it is an embedding, after it a head."""
    return min((place.order for place in places if place.layer), default=0.0)


def _side(name: str) -> str:
    return name.rpartition(":")[2] if ":" in name else ""
