"""Patterns as trees, read from their text: ``("and", ("causal",), ("window", 256, 0))``.

The text has everything that a pattern consists of, and is an expression in Python's grammar too once
``!`` is written ``~``. Lists of integers stay text until their values are needed: those of ``packed``
and ``documents`` may have millions.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy

#: ``("causal",)``, ``("window", 256, 0)``, ``("or", left, right)``, …
Node = tuple[Any, ...]

_BLOCK_ROWS = re.compile(r"blocks\(([0-9]+), (\[[0-9\[\], .]*\])\)")
_INTEGERS = re.compile(r"\[[0-9, ]*\]")


@dataclass(frozen=True)
class Integers:
    """A list of integers, or the rows of ``blocks``, as text. Equal if the text is."""

    text: str

    @cached_property
    def array(self) -> numpy.ndarray:
        inner = self.text.strip("[]")
        if not inner:
            return numpy.zeros(0, "int64")
        return numpy.fromstring(inner, dtype="int64", sep=",")


def tree(text: str, known: dict[str, Integers] | None = None) -> Node:
    """A pattern's text as nested tuples. Equal patterns have equal, hashable trees. Those with the same
    ``known`` share lists."""
    lists: list[Integers] = []
    known = {} if known is None else known

    def placeholder(match: re.Match[str]) -> str:
        text = match[match.lastindex or 0]
        lists.append(known.setdefault(text, Integers(text)))
        return f"_{len(lists) - 1}"

    text = _BLOCK_ROWS.sub(lambda match: f"blocks({match[1]}, {placeholder(match)})", text)
    text = _INTEGERS.sub(placeholder, text)
    return _node(ast.parse(text.replace("!", "~"), mode="eval").body, lists)


def _node(node: ast.expr, lists: list[Integers]) -> Any:
    match node:
        case ast.Constant(value=number):
            return number
        case ast.Name(id=name):
            return lists[int(name[1:])] if name[0] == "_" else (name,)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return tuple(_node(item, lists) for item in items)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return (name, *(_node(argument, lists) for argument in arguments))
        case ast.UnaryOp(op=ast.Invert(), operand=inner):
            return ("not", _node(inner, lists))
        case ast.BinOp(op=op):
            return ("and" if isinstance(op, ast.BitAnd) else "or", *_operands(node, lists))
    raise AssertionError(f"the text of a pattern has {ast.dump(node)}")


def _operands(node: ast.BinOp, lists: list[Integers]) -> list[Any]:
    """Those of a chain of the same operator, which nests to the left."""
    operands: list[Any] = []
    first: ast.expr = node
    while isinstance(first, ast.BinOp) and type(first.op) is type(node.op):
        operands.append(_node(first.right, lists))
        first = first.left
    return [_node(first, lists), *reversed(operands)]
