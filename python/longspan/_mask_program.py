"""Programs: the masks of a call as Python source, numbers and tables.

The source has the structure alone, so that calls of equal structure share what torch compiles for it. It
is two functions over tensors, straight-line code:

    def mask(b, h, q_idx, kv_idx, numbers, table):
        q = numbers.select(0, 0) + q_idx
        k = numbers.select(0, 1) + kv_idx
        n0 = at(table, numbers.select(0, 2) + h * 2 + 0)
        n1 = at(table, numbers.select(0, 2) + h * 2 + 1)
        x0 = q - k
        return ((x0 <= n0) & (x0 >= n1))

- ``select`` becomes a scalar load in torch's kernels. Indexing by an integer doesn't everywhere: it makes a
  tensor of the index. ``at`` is ``_mask_mod.at``, a lookup.
- What differs by entry or head is a row of numbers in ``table``: a scalar load too, since ``b`` and ``h`` are
  scalars there. The numbers of rows are offsets of further tables also: patterns with documents of
  different lengths share their statements.
- Patterns of different structure are alternatives, of which an element of ``table`` chooses one.
- There is one table at most, which has all tables one behind the other: torch assumes sizes that
  are equal by chance to stay equal.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Sequence

import numpy

from longspan._mask_axis import NARROW, Axis, Progression, Tables, Tokens
from longspan._mask_primitives import Formula, Side, Sides
from longspan._mask_text import Node

_WORD = re.compile(r"[a-z]\w*")
_LOCAL = re.compile(r"\b([nx])(\d+)\b")


class Program(NamedTuple):
    """Masks of a call. Equal structure is equal source."""

    source: str
    """Of ``mask`` and ``distance``, functions of ``(b, h, q_idx, kv_idx, numbers, *tables)``."""
    numbers: numpy.ndarray
    tables: tuple[numpy.ndarray, ...]
    """None or one, of the dtype of the numbers: int32, or int64 where positions need it."""


def build(
    patterns: Sequence[Node],
    choice: numpy.ndarray,
    positions: tuple[Sequence[Sequence[Progression]], Sequence[Sequence[Progression]]],
    valid: Sequence[tuple[int, int] | None] | None = None,
    tokens: tuple[Tokens, Tokens] = (None, None),
) -> Program:
    """The program of patterns, of which ``choice`` (entries × heads) has indices. Positions and valid key
    positions are for all entries, or of each."""
    axes = [Axis.of(each, some) for each, some in zip(positions, tokens, strict=True)]
    narrow = all(axis.is_narrow for axis in axes)
    builder = _Builder(max(len(choice), *map(len, positions), len(valid or ())), narrow)
    sides = Sides(builder.side("q", "q_idx", axes[0]), builder.side("k", "kv_idx", axes[1]))
    if valid is not None and any(valid):
        builder.only_valid(valid)
    builder.add_patterns(patterns, choice, sides)
    return builder.program()


class _Builder:
    def __init__(self, entries: int, narrow: bool) -> None:
        self.entries, self.narrow = entries, narrow
        self.largest = (1 << 31) - 1 if narrow else (1 << 63) - 1
        self.tables = Tables("int32" if narrow else "int64")
        self.numbers: list[int] = []
        #: Numbers that differ by entry, per entry.
        self.columns: list[numpy.ndarray] = []
        self.lines: list[tuple[str, str]] = []
        if entries > 1:
            self.lines.append(("e", f"b % {self.number(entries)}"))
            self.columns_at = len(self.numbers)
            self.lines.append(("ce", f"{self.number(0)} + e * columns"))
        self.conditions: list[str] = []
        self.distance: str | None = None

    def number(self, value: int) -> str:
        self.numbers.append(max(min(value, self.largest), -self.largest))
        return f"numbers.select(0, {len(self.numbers) - 1})"

    def per_entry(self, values: Any) -> str:
        """A number that differs by entry, or one for all."""
        values = numpy.asarray(values).reshape(-1)
        if len(values) == 1:
            return self.number(int(values[0]))
        self.columns.append(values)
        return f"at(table, ce + {len(self.columns) - 1})"

    def side(self, name: str, index: str, axis: Axis) -> Side:
        at = index if self.narrow else f"{index}.to(torch.int64)"
        if axis.is_table:
            offset = self.tables.per_token(axis.positions)
            at = f"at(table, {self.per_entry(offset)} + {index})"
        else:
            starts, steps, _ = zip(*axis.entries, strict=True)
            if any(step != 1 for step in steps):
                at = f"{self.per_entry(steps)} * {at}"
            at = f"{self.per_entry(starts)} + {at}"
        self.lines.append((name, at))
        return Side(index, name, axis.range[0] < 0, axis, name)

    def only_valid(self, valid: Sequence[tuple[int, int] | None]) -> None:
        """Key padding."""
        all_keys = (-self.largest, self.largest)
        ranges = numpy.array([all_keys if each is None else each for each in valid], dtype="int64")
        first, end = (self.per_entry(each) for each in ranges.T)
        self.conditions.append(f"(k >= {first}) & (k < {end})")

    def add_patterns(self, patterns: Sequence[Node], choice: numpy.ndarray, sides: Sides) -> None:
        chosen, inverse = numpy.unique(choice, return_inverse=True)
        numbers = {patterns[i]: number for number, i in enumerate(chosen)}
        choice = numpy.array([numbers[patterns[i]] for i in chosen])[inverse.reshape(choice.shape)]
        formulas = {
            number: Formula(node, sides, self.tables, self.largest)
            for node, number in numbers.items()
        }
        by_entry = (choice != choice[:1]).any() or any(f.differs_by_entry for f in formulas.values())
        by_head = (choice != choice[:, :1]).any()
        heads = choice.shape[1] if by_head else 1
        choice = numpy.broadcast_to(choice[:, :heads], (self.entries, heads))
        choice = choice if by_entry else choice[:1]
        row = {
            (False, False): None,
            (True, False): "e",
            (False, True): "h",
            (True, True): f"(e * {self.number(heads)} + h)",
        }[bool(by_entry), bool(by_head)]

        # Sorted: sources are equal whichever pattern is that of the first head.
        kinds = sorted({formula.text for formula in formulas.values()}, key=repr)
        members = [[n for n, f in formulas.items() if f.text == kind] for kind in kinds]
        if len(kinds) > 1:
            kind_of = {n: kind for kind, ns in enumerate(members) for n in ns}
            of_rows = numpy.array([kind_of[n] for n in sorted(kind_of)])[choice]
            of_row = self.number(self.tables.add(of_rows))
            self.lines.append(("kind", f"at(table, {of_row} + {row})"))
        masks, distances = [], []
        for kind, ns in enumerate(members):
            own = f"{kind}_" if len(kinds) > 1 else ""
            mask, distance = self.add_kind([formulas[n] for n in ns], ns, choice, row, own)
            masks.append(mask)
            distances.append(distance)
        self.choose(masks, distances)

    def add_kind(
        self,
        formulas: list[Formula],
        members: list[int],
        choice: numpy.ndarray,
        row: str | None,
        own: str,
    ) -> tuple[str, str | None]:
        """The statements of patterns of equal structure. Returns their mask and their distance."""
        first = formulas[0]
        count = len(first.numbers)
        if row is None:
            for i, value in enumerate(first.numbers):
                self.lines.append((f"n{own}{i}", self.number(value)))
        elif count:
            # Rows of other kinds have the numbers of the first: they are evaluated too, and not chosen.
            which = numpy.zeros(max(int(choice.max()), max(members)) + 1, dtype="int64")
            which[members] = numpy.arange(len(members))
            which = which[choice]
            rows = numpy.empty((*choice.shape, count), dtype="int64")
            for i in range(count):
                values = [formula.numbers[i] for formula in formulas]
                if all(isinstance(value, int) for value in values):
                    rows[..., i] = numpy.array(values, dtype="int64")[which]
                else:
                    each = numpy.stack([numpy.broadcast_to(v, len(choice)) for v in values])
                    rows[..., i] = each[which, numpy.arange(len(choice))[:, None]]
            offset = self.number(self.tables.add(rows))
            self.lines.append((f"r{own}", f"{offset} + {row} * {count}"))
            for i in range(count):
                self.lines.append((f"n{own}{i}", f"at(table, r{own} + {i})"))

        def named(expression: str) -> str:
            return _LOCAL.sub(rf"\g<1>{own}\g<2>", expression)

        self.lines += [(named(name), named(expression)) for name, expression in first.lines]
        return named(first.mask), None if first.distance is None else named(first.distance)

    def choose(self, masks: list[str], distances: list[str | None]) -> None:
        """Of alternatives, one."""
        if len(masks) == 1:
            self.conditions.append(masks[0])
        else:
            each = [f"((kind == {kind}) & {mask})" for kind, mask in enumerate(masks)]
            self.conditions.append(f"({' | '.join(each)})")
        known = [each for each in distances if each is not None]
        if len(known) < len(distances):
            return
        self.distance = known[-1]
        if len(set(known)) > 1:
            for kind, distance in reversed(list(enumerate(known[:-1]))):
                self.distance = f"torch.where(kind == {kind}, {distance}, {self.distance})"

    def program(self) -> Program:
        if self.columns:
            self.numbers[self.columns_at] = self.tables.add(numpy.stack(self.columns, axis=1))
        columns = len(self.columns)
        lines = [(name, line.replace("columns", str(columns))) for name, line in self.lines]
        names = "b, h, q_idx, kv_idx, numbers" + (", table" if self.tables.arrays else "")
        source = _function("mask", names, lines, " & ".join(self.conditions))
        if self.distance is not None:
            source += _function("distance", names, lines, self.distance)
        dtype = self.tables.dtype
        # Sizes 0 and 1 would be a structure of their own to torch.
        numbers = numpy.zeros(max(len(self.numbers), 2), dtype)
        numbers[: len(self.numbers)] = self.numbers
        if not self.tables.arrays:
            return Program(source, numbers, ())
        # Bit words are as wide as other elements, with a sign or without.
        arrays = [
            array.view("int32") if array.dtype == "uint32" and self.narrow else array
            for array in self.tables.arrays
        ]
        table = numpy.concatenate([*arrays, numpy.zeros(1, dtype)], dtype=dtype, casting="unsafe")
        return Program(source, numbers, (table,))


def _function(name: str, arguments: str, lines: list[tuple[str, str]], result: str) -> str:
    """The source of a function of statements, without those that the result doesn't need."""
    needed, kept = set(_WORD.findall(result)), []
    for variable, expression in reversed(lines):
        if variable in needed:
            needed |= set(_WORD.findall(expression))
            kept.append(f"    {variable} = {expression}\n")
    return f"def {name}({arguments}):\n{''.join(reversed(kept))}    return {result}\n"
