"""Pairs the places of two fingerprints whose names differ: by equal parameters, by equal values, by position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import numpy as np

from .differences import gap
from .prints import Fingerprint, PlacePrint, module_of

SAME = 0.05  # relative difference below which two values are taken for one: far above rounding, far below other layers
LIKE = 2.0  # ratio of norms within which values that differ may stand at one place
Pairs = dict[str, PlacePrint]  # name in the first -> place of the second
Places = Sequence[PlacePrint]
Key = Callable[[PlacePrint], Hashable]


class Structure:
    """Pairs what two fingerprints have in common beside names. The two must be of one model in two forms, with the same
    parameters: these tell which module of the second is which of the first.

    ``named``: the pairs of each pass that names or maps give.
    """

    def __init__(self, a: Fingerprint, b: Fingerprint, named: Mapping[str, Pairs]) -> None:
        self._first, self._second = _Layers(a), _Layers(b)
        pairs = [pair for found in named.values() for pair in found.items()]
        self._modules = {module_of(name): module_of(place.name) for name, place in pairs}
        self._parameters: dict[str, str] = {}
        weights = a.passes.get("weights", {})
        # layers of which some parameter is paired by its name, or is equal
        self._known: set[Hashable] = {self._first.layer(weights[name]) for name in named.get("weights", {})}

    def gradients(self, ours: Places, theirs: Places) -> Pairs:
        """Pair the gradients, or the updates, of paired parameters."""
        at = {place.name: place for place in theirs}
        named = ((one.name, self._parameters.get(one.name, "")) for one in ours)
        found = {name: at[other] for name, other in named if other in at}
        return found or self.parameters(ours, theirs)

    def parameters(self, ours: Places, theirs: Places) -> Pairs:
        """Pair parameters, layer by layer: those that equal one other alone; then equal ones within modules that are
        paired by these; then equal ones in the order of the calls; what is left, by position."""
        found: Pairs = {}
        for layer, some, others in _shared_groups(ours, self._first.layer, theirs, self._second.layer):
            equal = _equal(some, others)
            own = _unique(some, others, equal)
            self._learn(own)
            within = [
                (at, to)
                for at, to in sorted(equal)
                if self._modules.get(module_of(some[at].name)) == module_of(others[to].name)
            ]
            _take(own, some, others, within)
            first, second = self._first.calls(some), self._second.calls(others)
            calls = sorted(equal, key=lambda pair: (first[pair[0]], second[pair[1]]))
            _take(own, some, others, calls)
            if own:
                self._known.add(layer)
            self._learn(own)
            found |= own
        found |= self._by_position(_left(ours, found), _left_of(theirs, found))
        self._parameters = {name: other.name for name, other in found.items()}
        self._learn_parents()
        return found

    def values(self, ours: Places, theirs: Places) -> Pairs:
        """Pair inputs with inputs and outputs with outputs: those of paired modules, those of the layers themselves,
        then equal values in the order of the calls; by position where no parameter of the layer is equal."""
        at = {place.name: place for place in theirs}
        named = ((one, f"{self._modules.get(module_of(one.name))}:{_side(one.name)}") for one in ours)
        found = {one.name: at[name] for one, name in named if name in at}
        found |= self._layers(_left(ours, found), _left_of(theirs, found))
        rest, others = _left(ours, found), _left_of(theirs, found)
        for _, mine, yours in _shared_groups(rest, self._first.layer_and_side, others, self._second.layer_and_side):
            found |= {mine[i].name: yours[j] for i, j in _aligned(mine, yours)}
        rest = [one for one in _left(ours, found) if self._first.layer(one) not in self._known]
        others = [one for one in _left_of(theirs, found) if self._second.layer(one) not in self._known]
        return found | self._by_position(rest, others)

    def _layers(self, ours: Places, theirs: Places) -> Pairs:
        """Pair what enters and leaves whole layers."""
        whole = {self._second.layer_and_side(one): one for one in theirs if one.layer and not one.sublayer}
        keys = ((one, self._first.layer_and_side(one)) for one in ours if one.layer and not one.sublayer)
        return {one.name: whole[key] for one, key in keys if key in whole}

    def _learn(self, pairs: Pairs) -> None:
        """Take modules for one if most of their parameters are."""
        votes: dict[str, Counter[str]] = {}
        for name, other in pairs.items():
            votes.setdefault(module_of(name), Counter())[module_of(other.name)] += 1
        for module, count in votes.items():
            other = count.most_common(1)[0][0]
            if other not in self._modules.values():
                self._modules.setdefault(module, other)

    def _learn_parents(self) -> None:
        """Take two modules for one if the paired modules inside of one are those inside of the other."""
        while True:
            inside = {(_parent(one), _parent(other)) for one, other in self._modules.items()}
            first, second = Counter(one for one, _ in inside), Counter(other for _, other in inside)
            new = {a: b for a, b in inside if a and b and first[a] == second[b] == 1 and a not in self._modules}
            new = {a: b for a, b in new.items() if b not in self._modules.values()}
            if not new:
                return
            self._modules |= new

    def _by_position(self, ours: Places, theirs: Places) -> Pairs:
        """Pair what is left in a layer one by one, if both sides have equally many there, and of like norms."""
        groups = _shared_groups(ours, self._first.position(ours), theirs, self._second.position(theirs))
        even = (zip(some, others, strict=True) for _, some, others in groups if len(some) == len(others))
        return {one.name: other for pairs in even for one, other in pairs if _alike(one, other)}


class _Layers:
    """Finds where the places of one fingerprint lie. Stacks are numbered in order, since their names may differ."""

    def __init__(self, print_: Fingerprint) -> None:
        every = [place for places in print_.passes.values() for place in places.values()]
        self._stacks = {name: number for number, name in enumerate(dict.fromkeys(p.stack for p in every if p.layer))}
        calls = print_.passes.get("forward", {}).values()
        self._calls = {module_of(place.name): place.order for place in reversed([*calls])}

    def layer(self, place: PlacePrint) -> tuple[int, int]:
        return (self._stacks[place.stack], place.layer) if place.layer else (-1, 0)

    def layer_and_side(self, place: PlacePrint) -> Hashable:
        return self.layer(place), _side(place.name)

    def position(self, places: Places) -> Key:
        """Return the key of a place among ``places``: layer (outside of the layers: before or behind them), side and
        absence."""
        start = min((place.order for place in places if place.layer), default=0.0)

        def key(place: PlacePrint) -> Hashable:
            where = self.layer(place) if place.layer else (-1, place.order > start)
            return *where, _side(place.name), place.absent

        return key

    def calls(self, parameters: Places) -> list[tuple[float, float]]:
        """Return the sort keys of parameters: the first call of the module, then the registration."""
        return [(self._calls.get(module_of(own.name), np.inf), own.order) for own in parameters]


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _side(name: str) -> str:
    return name.rpartition(":")[2] if ":" in name else ""


def _grouped(places: Places, key: Key) -> dict[Hashable, list[PlacePrint]]:
    groups: dict[Hashable, list[PlacePrint]] = {}
    for place in places:
        groups.setdefault(key(place), []).append(place)
    return groups


def _shared_groups(
    ours: Places, our_key: Key, theirs: Places, their_key: Key
) -> list[tuple[Hashable, list[PlacePrint], list[PlacePrint]]]:
    """Group the places of each side by its key. Return (key, places of the first, places of the second) for each key
    that both sides have."""
    first, second = _grouped(ours, our_key), _grouped(theirs, their_key)
    return [(key, some, second[key]) for key, some in first.items() if key in second]


def _alike(one: PlacePrint, other: PlacePrint) -> bool:
    low, high = sorted((one.norm, other.norm))
    return high <= LIKE * low


def _is_same(one: PlacePrint, other: PlacePrint) -> bool:
    return not one.absent and not other.absent and gap(one, other).relative < SAME


def _equal(ours: Places, theirs: Places) -> set[tuple[int, int]]:
    return {(i, j) for i, one in enumerate(ours) for j, other in enumerate(theirs) if _is_same(one, other)}


def _unique(ours: Places, theirs: Places, equal: set[tuple[int, int]]) -> Pairs:
    """Return the pairs in which each is equal to the other alone."""
    first, second = Counter(i for i, _ in equal), Counter(j for _, j in equal)
    return {ours[i].name: theirs[j] for i, j in equal if first[i] == second[j] == 1}


def _take(found: Pairs, ours: Places, theirs: Places, pairs: Iterable[tuple[int, int]]) -> None:
    """Add pairs of which neither is taken yet, in their order."""
    taken = {other.name for other in found.values()}
    for i, j in pairs:
        if ours[i].name not in found and theirs[j].name not in taken:
            found[ours[i].name] = theirs[j]
            taken.add(theirs[j].name)


def _aligned(ours: Places, theirs: Places) -> list[tuple[int, int]]:
    """Return the longest list of pairs of equal values that keeps the order of the calls in both."""
    same = _equal(ours, theirs)
    longest = np.zeros((len(ours) + 1, len(theirs) + 1), int)
    for i in reversed(range(len(ours))):
        for j in reversed(range(len(theirs))):
            longest[i, j] = max(longest[i + 1, j], longest[i, j + 1], longest[i + 1, j + 1] + ((i, j) in same))
    found, i, j = [], 0, 0
    while i < len(ours) and j < len(theirs):
        if (i, j) in same and longest[i, j] == longest[i + 1, j + 1] + 1:
            found.append((i, j))
            i, j = i + 1, j + 1
        elif longest[i + 1, j] >= longest[i, j + 1]:
            i += 1
        else:
            j += 1
    return found


def _left(places: Places, found: Mapping[str, object]) -> list[PlacePrint]:
    return [place for place in places if place.name not in found]


def _left_of(places: Places, found: Pairs) -> list[PlacePrint]:
    taken = {other.name for other in found.values()}
    return [place for place in places if place.name not in taken]
