"""A pattern's expression as FlexAttention's ``mask_mod(b, h, q_idx, kv_idx)``.

What is made here is arithmetic on tensors with constants, so that torch compiles it into its
kernels, on any device. The expression is read from the pattern's text, which holds all of it.

Constants depend on the sizes at hand. A query's number and its position differ by an offset; where
``packed`` restarts at 0 in each sequence, they are looked up in a table with one entry per token, and so
is the number of a token's document. The blocks that ``random`` has drawn, or ``blocks`` lists, are a
few ranges per row, or bits where there are many.

Numbers are 32 bits wide, as in FlexAttention's kernels, unless positions need 64; an argument that
is larger than any position can be is cut down to the largest number, which says the same.

Constants are defaults of arguments. As variables of an enclosing function torch would make symbols
of them once a second pattern comes with other numbers, and its CPU kernels can't be compiled then.
"""

from __future__ import annotations

import ast
import re
from typing import Any, Callable, NamedTuple

import numpy
import torch
from torch import Tensor

from longspan import _longspan

#: Positions below it, and their differences, are held in 32 bits.
NARROW = 1 << 30
#: Ranges per row that are compared one by one; bits are looked up where a row has more.
MOST_RANGES = 8
#: Tokens of the largest block. Tables go on for so many: a kernel may look where a block ends.
PADDING = 256

#: Whether the query with a number sees the key with a number.
Rule = Callable[[Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Axis(NamedTuple):
    """Where queries or keys stand."""

    positions: numpy.ndarray
    at: Callable[[Tensor], Tensor]
    """From number to position."""

    def low(self) -> int:
        return int(self.positions.min()) if len(self.positions) else 0

    def high(self) -> int:
        return int(self.positions.max()) if len(self.positions) else 0


class Places(NamedTuple):
    """What an expression is read for."""

    q: Axis
    k: Axis
    device: torch.device
    largest: int
    """The largest number of the kernels' integers."""

    def cut(self, argument: int) -> int:
        return min(argument, self.largest)

    def table(self, numbers: numpy.ndarray) -> Tensor:
        """Numbers to look up by that of a query or a key."""
        narrow = self.largest < 1 << 31
        last = numbers[-1] if len(numbers) else 0
        padded = numpy.full(len(numbers) + PADDING, last, dtype="int32" if narrow else "int64")
        padded[: len(numbers)] = numbers
        return torch.from_numpy(padded).to(self.device)


def mask_mod(layout: _longspan.Layout, device: torch.device) -> MaskMod:
    """The ``mask_mod`` of a layout: what its pattern says, its offsets and its padding."""
    pattern, (query_offset, key_offset), key_padding = _longspan.layout_source(layout)
    q = query_offset + numpy.arange(layout.tokens_q, dtype="int64")
    k = key_offset + numpy.arange(layout.tokens_k, dtype="int64")
    farthest = max((int(abs(x).max(initial=0)) for x in (q, k)))
    largest = (1 << 31) - 1 if farthest < NARROW else (1 << 63) - 1
    axes = [Axis(x, moved(offset, largest)) for x, offset in ((q, query_offset), (k, key_offset))]
    places = Places(*axes, device, largest)
    seen = by_entry(tree(str(pattern)), places)
    if key_padding is None:
        return seen
    held = in_range(key_padding, places)
    return lambda b, h, q_idx, kv_idx: held(b, kv_idx) & seen(b, h, q_idx, kv_idx)


def moved(offset: int, largest: int) -> Callable[[Tensor], Tensor]:
    if largest > 1 << 31:
        return lambda number, offset=offset: number.to(torch.int64) + offset
    return (lambda number, offset=offset: number + offset) if offset else (lambda number: number)


def in_range(key_padding: list[tuple[int, int]], places: Places) -> Callable[[Tensor, Tensor], Tensor]:
    if len(key_padding) == 1:
        ((first, end),) = key_padding
        return lambda b, kv_idx, first=first, end=end: (kv_idx >= first) & (kv_idx < end)
    firsts, ends = (places.table(numpy.array(x)) for x in zip(*key_padding, strict=True))
    return lambda b, kv_idx: (kv_idx >= firsts[b]) & (kv_idx < ends[b])


def by_entry(node: Any, places: Places) -> MaskMod:
    if node[0] != "batch":
        return by_head(node, places)
    return one_of(node[1], lambda b, h: b, places)


def by_head(node: Any, places: Places) -> MaskMod:
    if node[0] == "heads":
        return one_of(node[1], lambda b, h: h, places)
    rule = read(node, places)
    return lambda b, h, q_idx, kv_idx: rule(q_idx, kv_idx)


def one_of(
    parts: list[Any], index: Callable[[Tensor, Tensor], Tensor], places: Places
) -> MaskMod:
    """One of several parts, by the number of the batch entry or the head."""
    distinct = list({repr(part): part for part in parts}.values())
    rules = [by_head(part, places) for part in distinct]
    if len(rules) == 1:
        return rules[0]
    choice = places.table(numpy.array([distinct.index(part) for part in parts]))

    def chosen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        which = choice[index(b, h)]
        seen = (which == 0) & rules[0](b, h, q_idx, kv_idx)
        for number in range(1, len(rules)):
            seen = seen | ((which == number) & rules[number](b, h, q_idx, kv_idx))
        return seen

    return chosen


def read(node: Any, places: Places) -> Rule:
    """The rule of a node, over the numbers of queries and keys."""
    name, *arguments = node
    return PRIMITIVES[name](places, *arguments)


# --- Numbers alone.


def full(places: Places) -> Rule:
    return lambda q_idx, kv_idx: q_idx.new_ones((), dtype=torch.bool)


def causal(places: Places) -> Rule:
    q, k = places.q.at, places.k.at
    return lambda q_idx, kv_idx: k(kv_idx) <= q(q_idx)


def window(places: Places, left: int, right: int) -> Rule:
    q, k = places.q.at, places.k.at
    most, least = places.cut(left), -places.cut(right)

    def rule(q_idx: Tensor, kv_idx: Tensor, most: int = most, least: int = least) -> Tensor:
        distance = q(q_idx) - k(kv_idx)
        return (distance <= most) & (distance >= least)

    return rule


def below(axis: Axis, tokens: int) -> Callable[[Tensor], Tensor]:
    """Whether a position is in ``0..tokens``."""
    at = axis.at
    if axis.low() >= 0:
        return lambda number, tokens=tokens: at(number) < tokens
    return lambda number, tokens=tokens: (at(number) < tokens) & (at(number) >= 0)


def sinks(places: Places, tokens: int) -> Rule:
    first = below(places.k, places.cut(tokens))
    return lambda q_idx, kv_idx: first(kv_idx)


def global_tokens(places: Places, tokens: int) -> Rule:
    tokens = places.cut(tokens)
    first_q, first_k = below(places.q, tokens), below(places.k, tokens)
    return lambda q_idx, kv_idx: first_q(q_idx) | first_k(kv_idx)


def between(axis: Axis, first: int, end: int) -> Callable[[Tensor], Tensor]:
    """Whether a position is in ``first..end``."""
    at = axis.at
    return lambda number, first=first, end=end: (at(number) >= first) & (at(number) < end)


def keys(places: Places, first: int, end: int) -> Rule:
    inside = between(places.k, places.cut(first), places.cut(end))
    return lambda q_idx, kv_idx: inside(kv_idx)


def queries(places: Places, first: int, end: int) -> Rule:
    inside = between(places.q, places.cut(first), places.cut(end))
    return lambda q_idx, kv_idx: inside(q_idx)


def neighborhood(places: Places, sizes: list[int], radii: list[int]) -> Rule:
    q, k = places.q.at, places.k.at

    def axis(stride: int, size: int, radius: int) -> Rule:
        def rule(
            q_idx: Tensor, kv_idx: Tensor, stride: int = stride, size: int = size, radius: int = radius
        ) -> Tensor:
            return abs(q(q_idx) // stride % size - k(kv_idx) // stride % size) <= radius

        return rule

    rules = []
    stride = 1
    for size, radius in zip(reversed(sizes), reversed(radii), strict=True):
        rules.append(axis(places.cut(stride), places.cut(size), places.cut(radius)))
        stride *= size
    inside_q, inside_k = (between(x, 0, places.cut(stride)) for x in (places.q, places.k))
    rules.append(lambda q_idx, kv_idx: inside_q(q_idx) & inside_k(kv_idx))
    return all_of(rules)


def strided(places: Places, stride: int) -> Rule:
    q, k, stride = places.q.at, places.k.at, places.cut(stride)
    return lambda q_idx, kv_idx, stride=stride: (q(q_idx) - k(kv_idx)) % stride == 0


def hierarchical(places: Places, levels: list[tuple[int, int, int]]) -> Rule:
    def level(reach: int, stride: int, grain: int) -> Rule:
        near = window(places, reach, reach)
        k, stride, grain = places.k.at, places.cut(stride), places.cut(grain)
        tooth = lambda kv_idx, stride=stride, grain=grain: (k(kv_idx) // grain) % stride == 0
        return lambda q_idx, kv_idx: near(q_idx, kv_idx) & tooth(kv_idx)

    return any_of([level(*each) for each in levels])


def not_negative(places: Places, rule: Rule) -> Rule:
    """The rule where it is about segments or blocks, which negative positions have none of."""
    q, k = places.q.at, places.k.at
    if places.q.low() < 0:
        inner_q = rule
        rule = lambda q_idx, kv_idx: (q(q_idx) >= 0) & inner_q(q_idx, kv_idx)
    if places.k.low() < 0:
        inner_k = rule
        rule = lambda q_idx, kv_idx: (k(kv_idx) >= 0) & inner_k(q_idx, kv_idx)
    return rule


def dilated(places: Places, segment: int, rate: int, offset: int = 0) -> Rule:
    q, k = places.q.at, places.k.at
    segment, rate, offset = places.cut(segment), places.cut(rate), places.cut(offset)

    def rule(
        q_idx: Tensor,
        kv_idx: Tensor,
        segment: int = segment,
        rate: int = rate,
        offset: int = offset,
    ) -> Tensor:
        query, key = q(q_idx), k(kv_idx)
        same = query // segment == key // segment
        return same & (query % segment % rate == offset) & (key % segment % rate == offset)

    return not_negative(places, rule)


def blocks_dilated(places: Places, block: int, rates: list[int]) -> Rule:
    q, k, block = places.q.at, places.k.at, places.cut(block)

    def apart(distance: int) -> Rule:
        def rule(
            q_idx: Tensor, kv_idx: Tensor, block: int = block, distance: int = distance
        ) -> Tensor:
            return abs(q(q_idx) // block - k(kv_idx) // block) == distance

        return rule

    distances = sorted({0, *(places.cut(rate) for rate in rates)})
    return not_negative(places, any_of([apart(distance) for distance in distances]))


def butterfly(places: Places, block: int) -> Rule:
    q, k, block = places.q.at, places.k.at, places.cut(block)

    def rule(q_idx: Tensor, kv_idx: Tensor, block: int = block) -> Tensor:
        differ = (q(q_idx) // block) ^ (k(kv_idx) // block)
        return (differ & (differ - 1)) == 0

    return not_negative(places, rule)


# --- Tables.


def documents(places: Places, lengths: list[int]) -> Rule:
    ends = numpy.cumsum(numpy.array(lengths, dtype="int64"))
    ids = []
    for axis, nowhere in ((places.q, -1), (places.k, -2)):
        number, inside = piece(ends, axis.positions)
        ids.append(places.table(numpy.where(inside, number, nowhere)))
    of_query, of_key = ids
    return lambda q_idx, kv_idx: of_query[q_idx] == of_key[kv_idx]


def piece(ends: numpy.ndarray, positions: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Which of the pieces that lie end to end each position is in, and whether it is in one."""
    inside = (positions >= 0) & (positions < (ends[-1] if len(ends) else 0))
    return numpy.searchsorted(ends, positions, side="right"), inside


def packed(places: Places, query_lengths: list[int], key_lengths: list[int], inner: Any) -> Rule:
    lengths = [numpy.array(x, dtype="int64") for x in (query_lengths, key_lengths)]
    of_queries, of_keys = lengths
    # Queries are aligned to the last keys: over all sequences, and again within each.
    first = of_keys.sum() - of_queries.sum()
    numbers, axes = [], []
    for axis, each, shift, within, nowhere in (
        (places.q, of_queries, first, of_keys - of_queries, -1),
        (places.k, of_keys, 0, 0 * of_keys, -2),
    ):
        ends = numpy.cumsum(each)
        position = axis.positions - shift
        number, inside = piece(ends, position)
        begin = numpy.append(ends - each - within, 0)
        numbers.append(places.table(numpy.where(inside, number, nowhere)))
        local = numpy.where(inside, position - begin[numpy.where(inside, number, -1)], 0)
        axes.append(Axis(local, looked_up(places.table(local))))
    rule = read(inner, places._replace(q=axes[0], k=axes[1]))
    of_query, of_key = numbers
    return lambda q_idx, kv_idx: (of_query[q_idx] == of_key[kv_idx]) & rule(q_idx, kv_idx)


def looked_up(table: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda number: table[number]


def random(places: Places, block: int, per_row: int, blocks: int, seed: int) -> Rule:
    # What a row has drawn doesn't depend on the block.
    drawn = _longspan.random(16, per_row, blocks, seed)
    return block_rows(places, block, drawn)


def blocks(places: Places, block: int, rows: list[Any]) -> Rule:
    return block_rows(places, block, _longspan.blocks(16, rows))


def block_rows(places: Places, block: int, pattern: _longspan.Pattern) -> Rule:
    """Rows of key blocks, of a pattern that has the same ones with blocks of 16 tokens."""
    q, k, block = places.q.at, places.k.at, places.cut(block)
    first_row, last_row = places.q.low() // block, (places.q.high() + PADDING) // block
    first, last = places.k.low() // block, (places.k.high() + PADDING) // block
    rows, columns = last_row - first_row + 1, last - first + 1
    layout = pattern.compile(
        rows * 16, columns * 16, block=16, query_offset=first_row * 16, key_offset=first * 16
    )
    _, _, counts, indices, *_ = layout._block_lists("longest")
    ranges = [joined(row[:count]) for row, count in zip(indices[0, 0], counts[0, 0], strict=True)]
    most = max((len(starts) for starts, _ in ranges), default=0)

    def row_and_column(
        q_idx: Tensor,
        kv_idx: Tensor,
        block: int = block,
        first_row: int = first_row,
        first: int = first,
    ) -> tuple[Tensor, Tensor]:
        return q(q_idx) // block - first_row, k(kv_idx) // block - first

    if most == 0:
        return negated(full(places))
    if most <= MOST_RANGES:
        low, high = numpy.zeros((2, rows, most), dtype="int64")
        for row, (starts, ends) in enumerate(ranges):
            low[row, : len(starts)], high[row, : len(ends)] = starts, ends
        lows, highs = places.table(low.ravel()), places.table(high.ravel())

        def in_ranges(q_idx: Tensor, kv_idx: Tensor, most: int = most) -> Tensor:
            row, column = row_and_column(q_idx, kv_idx)
            seen = (column >= lows[row * most]) & (column < highs[row * most])
            for i in range(1, most):
                place = row * most + i
                seen = seen | ((column >= lows[place]) & (column < highs[place]))
            return seen

        return in_ranges

    words = -(-columns // 32)
    if rows * words >= 1 << 31:
        raise ValueError(
            f"{rows} rows of {columns} blocks, expected a table of at most 2^36 of them: "
            f"use larger blocks, or at most {MOST_RANGES} ranges per row in place of {most}"
        )
    bits = numpy.zeros((rows, words * 4), dtype="uint8")
    for row, count in enumerate(counts[0, 0]):
        flags = numpy.zeros(words * 32, dtype=bool)
        flags[indices[0, 0, row, :count]] = True
        bits[row] = numpy.packbits(flags, bitorder="little")
    table = torch.from_numpy(bits.view("<i4").ravel().astype("int32")).to(places.device)

    def in_bits(q_idx: Tensor, kv_idx: Tensor, words: int = words) -> Tensor:
        row, column = row_and_column(q_idx, kv_idx)
        return ((table[row * words + column // 32] >> (column % 32)) & 1) == 1

    return in_bits


def joined(numbers: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Starts and ends of the ranges of ascending numbers."""
    breaks = numpy.flatnonzero(numpy.diff(numbers) != 1) + 1
    starts = numpy.concatenate(([0], breaks))[: len(breaks) + (len(numbers) > 0)]
    ends = numpy.concatenate((breaks, [len(numbers)]))[: len(starts)]
    return numbers[starts], numbers[ends - 1] + 1


# --- The algebra.


def all_of(rules: list[Rule]) -> Rule:
    def rule(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = rules[0](q_idx, kv_idx)
        for each in rules[1:]:
            seen = seen & each(q_idx, kv_idx)
        return seen

    return rule


def any_of(rules: list[Rule]) -> Rule:
    def rule(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = rules[0](q_idx, kv_idx)
        for each in rules[1:]:
            seen = seen | each(q_idx, kv_idx)
        return seen

    return rule


def negated(inner: Rule) -> Rule:
    return lambda q_idx, kv_idx: ~inner(q_idx, kv_idx)


PRIMITIVES: dict[str, Callable[..., Rule]] = {
    "and": lambda places, *parts: all_of([read(part, places) for part in parts]),
    "or": lambda places, *parts: any_of([read(part, places) for part in parts]),
    "not": lambda places, inner: negated(read(inner, places)),
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


# --- Text.


def tree(text: str) -> Any:
    """The text of a pattern as tuples: ``("window", 256, 0)``, ``("and", …, …)``.

    It is an expression as Python has them too, once ``!`` is written ``~`` and a range of blocks
    ``(0, 2)``."""
    text = re.sub(r"(\d+)\.\.(\d+)", r"(\1, \2)", text.replace("!", "~"))
    return nodes(ast.parse(text, mode="eval").body)


def nodes(node: Any) -> Any:
    match node:
        case ast.Constant(value=number):
            return number
        case ast.List(elts=items):
            return [nodes(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(nodes(item) for item in items)
        case ast.Name(id=name):
            return (name,)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return (name, *(nodes(argument) for argument in arguments))
        case ast.UnaryOp(op=ast.Invert(), operand=inner):
            return ("not", nodes(inner))
        case ast.BinOp(left=left, op=op, right=right):
            return ("and" if isinstance(op, ast.BitAnd) else "or", nodes(left), nodes(right))
    raise AssertionError(f"the text of a pattern has {ast.dump(node)}")
