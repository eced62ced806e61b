"""Positions of the tokens of a call, and tables of one element per token.

Positions are a progression ``start + step * index`` where they are one, else a table that is looked up by
the token's index. Either is the same for all entries of a call or differs between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Callable, Sequence, TypeAlias

import numpy

#: Tokens of the largest block. A kernel may evaluate indices up to the end of a block.
PADDING = 256
#: Positions below it, and their differences, are held in 32 bits.
NARROW = 1 << 30

#: ``(start, step, len)``.
Progression: TypeAlias = tuple[int, int, int]
#: Tokens of an axis: all, ``(first, count)``, or their indices.
Tokens: TypeAlias = "tuple[int, int] | numpy.ndarray | None"


@dataclass
class Axis:
    """The queries or the keys of a call."""

    entries: list[Progression | numpy.ndarray]
    """Positions of the tokens: one for all entries of the call, or one per entry."""

    @staticmethod
    def of(positions: Sequence[Sequence[Progression]], tokens: Tokens = None) -> Axis:
        if all(each == positions[0] for each in positions[1:]):
            positions = positions[:1]
        entries = [_positions(progressions, tokens) for progressions in positions]
        if all(_equal(each, entries[0]) for each in entries[1:]):
            entries = entries[:1]
        if not all(isinstance(each, tuple) for each in entries):
            entries = [_array(each) for each in entries]
        return Axis(entries)

    @property
    def is_table(self) -> bool:
        return not isinstance(self.entries[0], tuple)

    @cached_property
    def positions(self) -> list[numpy.ndarray]:
        """Those of each entry."""
        return [_array(each) for each in self.entries]

    @cached_property
    def range(self) -> tuple[int, int]:
        """The lowest and the highest position; zeros without tokens."""
        ends: list[int] = []
        for entry in self.entries:
            if isinstance(entry, tuple):
                start, step, count = entry
                ends += (start, start + step * (count - 1)) if count else ()
            elif len(entry):
                ends += int(entry.min()), int(entry.max())
        return min(ends, default=0), max(ends, default=0)

    def moved(self, by: int) -> Axis:
        """At other positions."""
        return Axis(
            [(e[0] + by, *e[1:]) if isinstance(e, tuple) else e + by for e in self.entries]
        )

    def spread(self, ends: numpy.ndarray, values: numpy.ndarray) -> list[numpy.ndarray]:
        """Values of the pieces that lie end to end from position 0, for the tokens of each entry. The first
        value is for negative positions and the last for those beyond all pieces."""
        edges = numpy.concatenate([[0], ends])
        return [_spread(edges, values, entry) for entry in self.entries]

    @property
    def is_narrow(self) -> bool:
        """Whether 32 bits hold the positions, also those that follow the last token in its block."""
        low, high = self.range
        beyond = 0 if self.is_table else PADDING * max(abs(step) for _, step, _ in self.entries)
        return -NARROW < low - beyond and high + beyond < NARROW


def _positions(
    progressions: Sequence[Progression], tokens: Tokens
) -> Progression | numpy.ndarray:
    progressions = [each for each in progressions if each[2] > 0]
    if len(progressions) <= 1 and not isinstance(tokens, numpy.ndarray):
        start, step, count = progressions[0] if progressions else (0, 1, 0)
        if tokens is not None:
            start, count = start + step * tokens[0], tokens[1]
        return start, step if count > 1 else 1, count
    starts, steps, counts = numpy.array(progressions, dtype="int64").reshape(-1, 3).T
    ends = numpy.cumsum(counts)
    index = numpy.arange(ends[-1] if len(ends) else 0)
    piece = numpy.repeat(numpy.arange(len(counts)), counts)
    array = starts[piece] + steps[piece] * (index - (ends - counts)[piece])
    if isinstance(tokens, numpy.ndarray):
        array = array[tokens]
    elif tokens is not None:
        array = array[tokens[0] : tokens[0] + tokens[1]]
    if len(array) <= 1:
        return (int(array[0]) if len(array) else 0), 1, len(array)
    steps = numpy.diff(array)
    if (steps == steps[0]).all():
        return int(array[0]), int(steps[0]), len(array)
    return array


def _equal(a: Progression | numpy.ndarray, b: Progression | numpy.ndarray) -> bool:
    if isinstance(a, tuple) or isinstance(b, tuple):
        return isinstance(a, tuple) and isinstance(b, tuple) and a == b
    return numpy.array_equal(a, b)


def _array(entry: Progression | numpy.ndarray) -> numpy.ndarray:
    if isinstance(entry, tuple):
        start, step, count = entry
        return numpy.arange(start, start + step * count, step, dtype="int64")
    return entry


def _spread(
    edges: numpy.ndarray, values: numpy.ndarray, entry: Progression | numpy.ndarray
) -> numpy.ndarray:
    if isinstance(entry, tuple):
        start, step, count = entry
        ascends = step > 0
    else:
        count = len(entry)
        ascends = len(edges) <= count and not (entry[1:] < entry[:-1]).any()
    if len(edges) > count or not ascends:
        return values[numpy.searchsorted(edges, _array(entry), side="right")]
    # Few edges: where they lie among the tokens.
    if isinstance(entry, tuple):
        bounds = numpy.clip(-((start - edges) // step), 0, count)
    else:
        bounds = numpy.searchsorted(entry, edges, side="left")
    return numpy.repeat(values, numpy.diff(bounds, prepend=0, append=count))


class Tables:
    """Tables of integers, one behind the other in one array, so that a program has one tensor for all of
    them and one size that differs between programs of the same source."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.arrays: list[numpy.ndarray] = []
        self.size = 0
        #: What has been made of equal parts of patterns.
        self._made: dict[object, Any] = {}

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """What is made of a part of a pattern, the same for equal keys."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def add(self, array: numpy.ndarray) -> int:
        """Appends a table. Returns its offset."""
        offset = self.size
        self.arrays.append(array.reshape(-1))
        self.size += array.size
        if self.size >= 1 << 31:
            raise ValueError(
                f"tables of {self.size} elements, expected fewer than 2^31: use a pattern of fewer "
                "blocks or tokens, or larger blocks"
            )
        return offset

    def per_token(self, values: list[numpy.ndarray]) -> int | numpy.ndarray:
        """Appends values of the tokens of each entry. Returns the offset of each entry's, or of the only
        one's."""
        tokens = len(values[0])
        padded = numpy.empty((len(values), tokens + PADDING), dtype=self.dtype)
        for row, each in zip(padded, values, strict=True):
            row[:tokens] = each
            row[tokens:] = each[-1] if tokens else 0
        offset = self.add(padded)
        if len(values) == 1:
            return offset
        return offset + (tokens + PADDING) * numpy.arange(len(values))
