"""What a function computes with besides its arguments.

A layout made from a mask function stays right as long as the function computes the same. Its code is constant;
what it captures (cells of a closure, defaults, globals that it names) may be written to or replaced. ``read``
lists all of that: two readings that are equal, with tensors of equal versions, are of the same function.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OperatorBase

#: Values that are equal where they are the same.
_PLAIN = (int, float, complex, bool, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size)

#: Objects that a reading looks at; a function that captures more is not read.
_MOST = 1_000


class Captured(NamedTuple):
    """A reading."""

    values: tuple[Hashable, ...]
    sources: list[Any]
    """Tensors, which are compared by version, and objects whose identity is among the values."""


class _Unknown(Exception):
    """An object whose state can't be read."""


def read(function: Any) -> Captured | None:
    """What a function captures; None where some of it can't be read."""
    reader = _Reader()
    try:
        reader.read(function)
    except _Unknown:
        return None
    return Captured(tuple(reader.values), reader.sources)


class _Reader:
    def __init__(self) -> None:
        self.values: list[Hashable] = []
        self.sources: list[Any] = []
        self._seen: dict[int, int] = {}

    def read(self, x: Any) -> None:
        if isinstance(x, _PLAIN):
            self.values.append((type(x), x))
            return
        if id(x) in self._seen:
            self.values.append(("again", self._seen[id(x)]))
            return
        self._seen[id(x)] = len(self._seen)
        if len(self._seen) > _MOST:
            raise _Unknown
        if isinstance(x, Tensor):
            self.sources.append(x)
        elif isinstance(x, types.FunctionType):
            self._function(x)
        elif isinstance(x, types.MethodType):
            self._all(x.__func__, x.__self__)
        elif isinstance(x, functools.partial):
            self._all(x.func, x.args, x.keywords)
        elif isinstance(x, (tuple, list)):
            self.values.append((type(x), len(x)))
            self._all(*x)
        elif isinstance(x, dict):
            self.values.append((dict, len(x)))
            self._all(*x.keys(), *x.values())
        elif isinstance(x, (type, types.ModuleType, OperatorBase)) or _is_builtin(x):
            self._identity(x)
        elif isinstance(x, (property, staticmethod, classmethod)):
            self._all(getattr(x, "fget", None), getattr(x, "__func__", None))
        elif hasattr(x, "__dict__"):
            self._object(x)
        else:
            raise _Unknown

    def _all(self, *objects: Any) -> None:
        for x in objects:
            self.read(x)

    def _identity(self, x: Any) -> None:
        self.values.append(("is", id(x)))
        self.sources.append(x)

    def _function(self, function: types.FunctionType) -> None:
        self._identity(function.__code__)
        self._all(function.__defaults__, function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                self.read(cell.cell_contents)
            except ValueError:  # not assigned yet
                self.values.append("empty")
        names = _names(function.__code__)
        for name in names:
            value = function.__globals__.get(name)
            self.read(value)
            # Attributes of the program's own modules and classes are variables, too.
            if isinstance(value, (type, types.ModuleType)) and _is_own(value):
                self._all(*(getattr(value, attribute, None) for attribute in names))

    def _object(self, x: Any) -> None:
        """An object: its attributes, and the methods of its class."""
        self._identity(type(x))
        own = [kind for kind in type(x).__mro__ if _is_own(kind)]
        if any(getattr(kind, "__slots__", None) for kind in own):
            raise _Unknown
        methods = (function for kind in own for function in vars(kind).values())
        self._all(vars(x), *(x for x in methods if isinstance(x, _METHODS)))


_METHODS = (types.FunctionType, property, staticmethod, classmethod)


def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names of globals and attributes in a function and in those that it defines."""
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return code.co_names + tuple(name for each in inner for name in _names(each))


def _is_own(x: Any) -> bool:
    """Whether a module or class is the program's, and not torch's or Python's."""
    name = x.__module__ if isinstance(x, type) else x.__name__
    return name.partition(".")[0] not in ("torch", "builtins")


def _is_builtin(x: Any) -> bool:
    """Whether it is a function without state: of a type that is not written in Python, and without attributes."""
    heap = type(x).__flags__ & (1 << 9)
    return callable(x) and not heap and not hasattr(x, "__dict__")
