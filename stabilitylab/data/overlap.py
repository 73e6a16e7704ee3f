"""The tokens of a running text that also stand in another running text, at any offset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from .corpus import EOS, mix

# Tokens that are equal in a row in both texts: some twenty words, which clean texts hardly share by chance.
WINDOW = 32
# Tokens of an equal line, EOS not counted: shorter lines, such as "Yes, sir.", are in many texts.
LINE = 8
PIECE = 1 << 22  # tokens that are hashed at a time: a few hundred MB of memory
FACTOR = 0x9E3779B97F4A7C15  # odd, as any factor of a polynomial hash modulo 2^64
TOP = np.uint64(64 - 24)  # the highest 24 bits of a hash choose its place in a table


def shared(text: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return True for each token of ``text`` (N,) that also stands in ``other``.

    The token stands in ``WINDOW`` equal tokens in a row, or in an equal line of at least ``LINE`` tokens. EOS ends each
    line.
    """
    change = np.zeros(len(text) + 1, np.int64)  # of the number of equal windows and lines in which a token stands
    windows = _windows(text)
    begins = np.flatnonzero(_occur(windows, (_windows(piece) for piece in _pieces(other, WINDOW - 1))))
    change[begins] += 1
    change[begins + WINDOW] -= 1
    starts, stops, lines = _lines(text)
    equal = _occur(lines, (_lines(piece)[2] for piece in _pieces(other)))
    change[starts[equal]] += 1
    change[stops[equal]] -= 1
    return change[:-1].cumsum() > 0


def _windows(ids: np.ndarray) -> np.ndarray:
    """Hash the ``WINDOW`` tokens from each token on, by a polynomial whose span doubles until it is ``WINDOW``."""
    if len(ids) < WINDOW:
        return np.empty(0, np.uint64)
    hashes, factor, span = mix(ids.astype(np.uint64)), FACTOR, 1
    while span < WINDOW:
        hashes = hashes[:-span] * np.uint64(factor) + hashes[span:]
        factor, span = factor * factor % (1 << 64), 2 * span
    return hashes


def _lines(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return starts, stops and hashes of the lines of at least ``LINE`` tokens."""
    stops = np.flatnonzero(ids == EOS) + 1
    if len(ids) and (not len(stops) or stops[-1] < len(ids)):
        stops = np.append(stops, len(ids))
    starts = np.concatenate([stops[:0], [0], stops[:-1]])[: len(stops)]
    place = np.arange(len(ids)) - np.repeat(starts, stops - starts)
    hashes = mix(ids.astype(np.uint64) | (place + 1).astype(np.uint64) << np.uint64(32))
    lines = np.add.reduceat(hashes, starts) if len(starts) else hashes
    long = stops - starts > LINE
    return starts[long], stops[long], lines[long]


def _pieces(ids: np.ndarray, beyond: int = 0) -> Iterator[np.ndarray]:
    """Cut a text at ends of lines into pieces of about ``PIECE`` tokens; each has ``beyond`` tokens of the next too."""
    ends, start = np.flatnonzero(ids == EOS) + 1, 0
    while start < len(ids):
        place = np.searchsorted(ends, start + PIECE)
        stop = int(ends[place]) if place < len(ends) else len(ids)
        yield ids[start : stop + beyond]
        start = stop


def _occur(wanted: np.ndarray, pieces: Iterable[np.ndarray]) -> np.ndarray:
    """Return True for each hash of ``wanted`` that occurs in a piece."""
    likely = np.zeros(1 << 24, bool)  # most hashes of a long text are looked up here alone, not sorted
    likely[wanted >> TOP] = True
    met = np.sort(np.concatenate([wanted[:0], *(piece[likely[piece >> TOP]] for piece in pieces)]))
    found = np.zeros(len(wanted), bool)
    if len(met):
        order = np.argsort(wanted)  # a search in ascending order is several times faster than one in any order
        place = np.minimum(np.searchsorted(met, wanted[order]), len(met) - 1)
        found[order] = met[place] == wanted[order]
    return found
