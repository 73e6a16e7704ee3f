"""The places of two fingerprints that belong together: by name, by a map of names, else by structure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..inputs import expression
from .prints import DIRECTIONS, PASSES, Fingerprint, PlacePrint, Places
from .structure import Structure


@dataclass(frozen=True)
class Pair:
    """A place of both fingerprints."""

    phase: str  # one of PASSES
    a: PlacePrint
    b: PlacePrint


@dataclass(frozen=True)
class Matched:
    """The pairs, each pass in a's order; how they were found; the places that only one side has, by pass; and the
    rules of ``maps`` that match no name of b."""

    pairs: tuple[Pair, ...]
    by: str  # "name" | "map" | "structure"
    only_a: Mapping[str, Sequence[str]]
    only_b: Mapping[str, Sequence[str]]
    useless: Sequence[str] = ()


def parsed(maps: Iterable[str]) -> list[tuple[re.Pattern[str], str]]:
    r"""Return the rules of ``--map``: REGEX=REPLACEMENT, applied to b's names. Raises UsageError for any other text."""
    rules = []
    for text in maps:
        pattern, sign, to = text.partition("=")
        if not sign or not pattern:
            raise UsageError(f"--map '{text}' must be 'REGEX=REPLACEMENT', from names of the second to the first.")
        compiled = expression(pattern, f"--map '{text}':", "one that names of the second match")
        try:
            compiled.sub(to, "")
        except (re.error, IndexError) as error:
            raise UsageError(f"--map '{text}': '{to}' cannot replace it ({error}): correct the replacement.") from error
        rules.append((compiled, to))
    return rules


def renamed(name: str, rules: Sequence[tuple[re.Pattern[str], str]]) -> str:
    for pattern, to in rules:
        name = pattern.sub(to, name)
    return name


def matched(a: Fingerprint, b: Fingerprint, maps: Sequence[str] = ()) -> Matched:
    """Pair the places of two fingerprints. Raises UsageError if they have none in common.

    Names decide, after the rules of ``maps`` on b's; :class:`Structure` pairs what they leave over.
    """
    rules = parsed(maps)
    named = {phase: _by_name(a.passes.get(phase, {}), b.passes.get(phase, {}), rules) for phase in PASSES}
    structure = Structure(a, b, named)
    pairs: list[Pair] = []
    only_a: dict[str, list[str]] = {}
    only_b: dict[str, list[str]] = {}
    structural = False
    for phase in PASSES:  # the weights first, since equal weights show which modules belong together
        ours, theirs = a.passes.get(phase, {}), b.passes.get(phase, {})
        found = named[phase]
        rest_a = [p for p in ours.values() if p.name not in found]
        taken = {p.name for p in found.values()}
        rest_b = [p for p in theirs.values() if p.name not in taken]
        if rest_a and rest_b:
            pairing = {"weights": structure.parameters, "forward": structure.values, "backward": structure.values}
            more = pairing.get(phase, structure.gradients)(rest_a, rest_b)
            structural |= bool(more)
            found = found | more
        taken = {p.name for p in found.values()}
        pairs += [Pair(phase, p, found[p.name]) for p in ours.values() if p.name in found]
        if phase == DIRECTIONS:  # evidence about the parameters that "gradients" names; no places of their own
            continue
        only_a[phase] = [p.name for p in ours.values() if p.name not in found]
        only_b[phase] = [p.name for p in theirs.values() if p.name not in taken]
    if not pairs:
        raise UsageError(
            f"{a.label} and {b.label} have no place in common: pair them with --map 'REGEX=REPLACEMENT', "
            "from the names of the second to those of the first (stabilitylab.sites lists them)."
        )
    names = [name for places in b.passes.values() for name in places]
    useless = [text for text, (rule, _) in zip(maps, rules, strict=True) if not any(map(rule.search, names))]
    kept_a, kept_b = ({name: rest for name, rest in only.items() if rest} for only in (only_a, only_b))
    return Matched(tuple(pairs), "structure" if structural else "map" if rules else "name", kept_a, kept_b, useless)


def _by_name(ours: Places, theirs: Places, rules: Sequence[tuple[re.Pattern[str], str]]) -> dict[str, PlacePrint]:
    found: dict[str, PlacePrint] = {}
    for place in theirs.values():
        name = renamed(place.name, rules)
        if name in ours and name not in found:
            found[name] = place
    return found
