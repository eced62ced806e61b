"""The primitives and operators of patterns as expressions over tensors.

Expressions are Python text, made of ``q_idx`` and ``kv_idx``, positions ``q`` and ``k``, numbers ``n0``,
``n1``, … and earlier statements ``x0``, ``x1``, …; ``table`` has all tables. The text depends on the
structure of a pattern alone: the number of operands, levels or axes, whether positions may be negative, the
kind of a table. Divisions and lookups are of queries or of keys, not of pairs; bit words are the exception.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import numpy

from longspan._mask_axis import Axis, Tables
from longspan._mask_block_rows import BlockRows
from longspan._mask_text import Integers, Node


class Side(NamedTuple):
    """The queries or the keys, at the positions that a part of a pattern uses."""

    index: str
    """Index of a token."""
    at: str
    """Its position."""
    may_be_negative: bool
    axis: Axis
    key: object
    """Equal for equal positions."""


@dataclass(frozen=True)
class Sides:
    q: Side
    k: Side

    @property
    def distance(self) -> str:
        return f"{self.q.at} - {self.k.at}"


class Formula:
    """Statements that evaluate a pattern, and their numbers."""

    def __init__(self, node: Node, sides: Sides, tables: Tables, largest: int):
        self.tables, self.largest = tables, largest
        self.lines: list[tuple[str, str]] = []
        self.numbers: list[Any] = []
        self._names: dict[str, str] = {}
        self._lookups: dict[tuple[str, str], str] = {}
        self.mask = self.read(node, sides)
        #: Query position minus key position as score additions use it; None where parts of the pattern
        #: use different positions.
        self.distance: str | None = None
        positioned = positioning(node)
        if positioned == ():
            self.distance = sides.distance
        elif positioned is not None:
            self.distance = self.within(positioned, sides).distance

    @property
    def text(self) -> tuple[Any, ...]:
        """What formulas of equal structure have in common."""
        return (tuple(self.lines), self.mask, self.distance, len(self.numbers))

    @property
    def differs_by_entry(self) -> bool:
        """Whether numbers do, of tables that each entry has its own of."""
        return any(isinstance(number, numpy.ndarray) for number in self.numbers)

    def read(self, node: Node, sides: Sides) -> str:
        name, *arguments = node
        return PRIMITIVES[name](self, sides, *arguments)

    def number(self, value: Any) -> str:
        """A number. An argument beyond all positions is cut to the largest integer, which has the same
        meaning."""
        if isinstance(value, int):
            value = max(min(value, self.largest), -self.largest)
        self.numbers.append(value)
        return f"n{len(self.numbers) - 1}"

    def let(self, expression: str) -> str:
        """A statement. Returns the name of its value."""
        if expression not in self._names:
            self._names[expression] = name = f"x{len(self.lines)}"
            self.lines.append((name, expression))
        return self._names[expression]

    def lookup(self, offset: Any, index: str) -> str:
        """An element of a table of one per token. Equal tables are looked up once."""
        key = (index, str(offset))
        if key not in self._lookups:
            self._lookups[key] = self.let(f"at(table, {self.number(offset)} + {index})")
        return self._lookups[key]

    def within(self, packed: Node, sides: Sides) -> Sides:
        """Positions within the sequences of ``packed``."""
        return _packed_sides(self, packed, sides)[0]


# --- Positions alone.


def full(f: Formula, sides: Sides) -> str:
    return f"({sides.q.index} >= 0)"


def causal(f: Formula, sides: Sides) -> str:
    return f"({sides.k.at} <= {sides.q.at})"


def window(f: Formula, sides: Sides, left: int, right: int) -> str:
    distance = f.let(sides.distance)
    most, least = f.number(left), f.number(-right)
    return f"(({distance} <= {most}) & ({distance} >= {least}))"


def below(f: Formula, side: Side, tokens: int) -> str:
    """Whether a position is in ``0..tokens``."""
    inside = f"({side.at} < {f.number(tokens)})"
    return f"({inside} & ({side.at} >= 0))" if side.may_be_negative else inside


def sinks(f: Formula, sides: Sides, tokens: int) -> str:
    return below(f, sides.k, tokens)


def global_tokens(f: Formula, sides: Sides, tokens: int) -> str:
    return f"({below(f, sides.q, tokens)} | {below(f, sides.k, tokens)})"


def between(f: Formula, side: Side, first: int, end: int) -> str:
    return f"(({side.at} >= {f.number(first)}) & ({side.at} < {f.number(end)}))"


def keys(f: Formula, sides: Sides, first: int, end: int) -> str:
    return between(f, sides.k, first, end)


def queries(f: Formula, sides: Sides, first: int, end: int) -> str:
    return between(f, sides.q, first, end)


def neighborhood(f: Formula, sides: Sides, sizes: Integers, radii: Integers) -> str:
    conditions, stride = [], 1
    for size, radius in zip(sizes.array.tolist()[::-1], radii.array.tolist()[::-1], strict=True):
        stride_name, size_name = f.number(stride), f.number(size)
        q, k = (f.let(f"{side.at} // {stride_name} % {size_name}") for side in (sides.q, sides.k))
        conditions.append(f"(torch.abs({q} - {k}) <= {f.number(radius)})")
        stride *= size
    conditions += [below(f, side, stride) for side in (sides.q, sides.k)]
    return f"({' & '.join(conditions)})"


def strided(f: Formula, sides: Sides, stride: int) -> str:
    name = f.number(stride)
    q, k = (f.let(f"{side.at} % {name}") for side in (sides.q, sides.k))
    return f"({q} == {k})"


def hierarchical(f: Formula, sides: Sides, levels: tuple[tuple[int, int, int], ...]) -> str:
    distance = f.let(f"torch.abs({sides.distance})")
    conditions = []
    for reach, stride, grain in levels:
        group = f.let(f"{sides.k.at} // {f.number(grain)} % {f.number(stride)}")
        conditions.append(f"(({distance} <= {f.number(reach)}) & ({group} == 0))")
    return f"({' | '.join(conditions)})"


def not_negative(sides: Sides, condition: str) -> str:
    """A condition about segments or blocks, which negative positions aren't in."""
    signs = [f"({side.at} >= 0)" for side in (sides.q, sides.k) if side.may_be_negative]
    return f"({' & '.join([*signs, condition])})" if signs else condition


def dilated(f: Formula, sides: Sides, segment: int, rate: int, offset: int = 0) -> str:
    length, rate_name, offset_name = f.number(segment), f.number(rate), f.number(offset)
    q, k = (f.let(f"{side.at} // {length}") for side in (sides.q, sides.k))
    inside = [
        f"({f.let(f'{side.at} % {length} % {rate_name}')} == {offset_name})"
        for side in (sides.q, sides.k)
    ]
    return not_negative(sides, f"(({q} == {k}) & {' & '.join(inside)})")


def _blocks(f: Formula, sides: Sides, block: int) -> tuple[str, str]:
    size = f.number(block)
    return f.let(f"{sides.q.at} // {size}"), f.let(f"{sides.k.at} // {size}")


def blocks_dilated(f: Formula, sides: Sides, block: int, rates: Integers) -> str:
    q, k = _blocks(f, sides, block)
    distance = f.let(f"torch.abs({q} - {k})")
    near = [f"({distance} == {f.number(rate)})" for rate in [0, *rates.array.tolist()]]
    return not_negative(sides, f"({' | '.join(near)})")


def butterfly(f: Formula, sides: Sides, block: int) -> str:
    q, k = _blocks(f, sides, block)
    differ = f.let(f"{q} ^ {k}")
    return not_negative(sides, f"(({differ} & ({differ} - 1)) == 0)")


# --- Tables with an element per token.


def documents(f: Formula, sides: Sides, lengths: Integers) -> str:
    q, k = (
        f.lookup(_number_of_piece(f, side, lengths, outside), side.index)
        for side, outside in ((sides.q, -1), (sides.k, -2))
    )
    return f"({q} == {k})"


def _number_of_piece(f: Formula, side: Side, lengths: Integers, outside: int) -> Any:
    def make() -> Any:
        ends = numpy.cumsum(lengths.array)
        numbers = numpy.arange(-1, len(ends) + 1, dtype=f.tables.dtype)
        numbers[[0, -1]] = outside
        return f.tables.per_token(side.axis.spread(ends, numbers))

    return f.tables.once(("document", side.key, lengths), make)


def packed(f: Formula, sides: Sides, queries: Integers, keys: Integers, inner: Node) -> str:
    within, same = _packed_sides(f, ("packed", queries, keys), sides)
    return f"({same} & {f.read(inner, within)})"


class _Sequences(NamedTuple):
    """Sequences of tokens and positions within them: offsets of tables, and the positions."""

    numbers: Any
    offsets: Any
    axis: Axis


def _packed_sides(f: Formula, node: Node, sides: Sides) -> tuple[Sides, str]:
    """Positions within sequences, and whether those of a pair are in the same one."""
    _, queries, keys = node
    of_queries, of_keys = queries.array, keys.array
    # Queries are aligned to the last keys: over all sequences, and again within each.
    shift = int(of_keys.sum() - of_queries.sum())
    made, numbers = [], []
    for side, lengths, first, within, outside in (
        (sides.q, of_queries, shift, of_keys - of_queries, -1),
        (sides.k, of_keys, 0, 0, -2),
    ):
        key = ("packed", side.key, queries, keys)
        make = functools.partial(_sequences, f.tables, side, lengths, first, within, outside)
        sequences = f.tables.once(key, make)
        numbers.append(f.lookup(sequences.numbers, side.index))
        at = f.lookup(sequences.offsets, side.index)
        # Queries of a sequence with more queries than keys begin below 0.
        made.append(Side(side.index, at, side is sides.q, sequences.axis, key))
    return Sides(*made), f"({numbers[0]} == {numbers[1]})"


def _sequences(
    tables: Tables, side: Side, lengths: numpy.ndarray, first: int, within: Any, outside: int
) -> _Sequences:
    axis = side.axis.moved(-first)
    ends = numpy.cumsum(lengths)
    numbers = numpy.arange(-1, len(ends) + 1, dtype=tables.dtype)
    numbers[[0, -1]] = outside
    offsets = numpy.zeros(len(ends) + 2, dtype=tables.dtype)
    offsets[1:-1] = within - (ends - lengths)
    of_tokens, local = axis.spread(ends, numbers), axis.spread(ends, offsets)
    for number, position, at in zip(of_tokens, local, axis.positions, strict=True):
        numpy.add(position, at, out=position, casting="unsafe")
        # Tokens outside of all sequences have position 0.
        position *= number >= 0
    return _Sequences(tables.per_token(of_tokens), tables.per_token(local), Axis(local))


# --- Tables with rows of blocks.


def random(f: Formula, sides: Sides, block: int, per_row: int, blocks: int, seed: int) -> str:
    # The blocks that a row has drawn don't depend on their size.
    return block_rows(f, sides, block, f"random(16, {per_row}, {blocks}, {seed})")


def blocks(f: Formula, sides: Sides, block: int, rows: Integers) -> str:
    return block_rows(f, sides, block, f"blocks(16, {rows.text})")


def block_rows(f: Formula, sides: Sides, block: int, text: str) -> str:
    """Key blocks per row of blocks, by a pattern of the same ones with blocks of 16 tokens."""
    (low, high), (first, last) = sides.q.axis.range, sides.k.axis.range
    first_row, last_row, first, last = low // block, high // block, first // block, last // block
    key = ("rows", text, first_row, last_row, first, last)
    rows = f.tables.once(
        key, lambda: BlockRows(text, (first_row, last_row + 1), (first, last + 1), f.tables)
    )
    q, k = _blocks(f, sides, block)
    # A block of queries or keys may end beyond the last ones.
    row = f.let(
        f"torch.minimum(torch.clamp({q} - {f.number(first_row)}, min=0), "
        f"{f.number(last_row - first_row)})"
    )
    column = f.let(f"{k} - {f.number(first)}")
    offset = f.number(rows.offset)
    if rows.ranges:
        at = f.let(f"{offset} + {row} * {2 * rows.ranges}")
        edges = [f.let(f"at(table, {at} + {i})") for i in range(2 * rows.ranges)]
        inside = [
            f"(({column} >= {low}) & ({column} < {high}))"
            for low, high in zip(edges[::2], edges[1::2], strict=True)
        ]
        return f"({' | '.join(inside)})"
    column = f.let(f"torch.minimum(torch.clamp({column}, min=0), {f.number(last - first)})")
    word = f.let(f"at(table, {offset} + {row} * {f.number(rows.words)} + {column} // 32)")
    return f"((({word} >> ({column} % 32)) & 1) == 1)"


# --- The algebra.


def both(f: Formula, sides: Sides, *parts: Node) -> str:
    return f"({' & '.join(f.read(part, sides) for part in parts)})"


def either(f: Formula, sides: Sides, *parts: Node) -> str:
    return f"({' | '.join(f.read(part, sides) for part in parts)})"


def negated(f: Formula, sides: Sides, inner: Node) -> str:
    return f"~{f.read(inner, sides)}"


PRIMITIVES: dict[str, Callable[..., str]] = {
    "and": both,
    "or": either,
    "not": negated,
    "full": full,
    "causal": causal,
    "window": window,
    "sinks": sinks,
    "global_tokens": global_tokens,
    "keys": keys,
    "queries": queries,
    "neighborhood": neighborhood,
    "dilated": dilated,
    "strided": strided,
    "hierarchical": hierarchical,
    "documents": documents,
    "packed": packed,
    "blocks_dilated": blocks_dilated,
    "butterfly": butterfly,
    "random": random,
    "blocks": blocks,
}


def positioning(node: Node) -> Node | None:
    """The positions that the innermost primitives use, as the CPU kernels have it: ``()`` for global ones,
    ``("packed", queries, keys)`` for those within its sequences, None for different ones in different
    parts."""
    name, *arguments = node
    match name:
        case "packed":
            return (name, *arguments[:2]) if positioning(arguments[2]) == () else None
        case "and":
            # Active pairs of an intersection lie in the sequences of any operand.
            parts = {positioning(part) for part in arguments} - {()}
            return parts.pop() if len(parts) == 1 else None if parts else ()
        case "or":
            parts = {positioning(part) for part in arguments}
            return parts.pop() if len(parts) == 1 else None
        case "not":
            return () if positioning(arguments[0]) == () else None
    return ()
