"""What a function computes with besides its arguments.

A layout made from a mask function stays right as long as the function computes the same. Its code is constant;
what it captures (cells of a closure, defaults, globals that it names) may be written to or replaced. ``read``
lists all of that: two readings that are equal, with tensors of equal versions, are of the same function.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch._ops import OperatorBase

#: Values that are equal where they are the same.
_PLAIN = (
    int, float, complex, bool, str, bytes, type(None), type(...), numpy.number, numpy.bool_,
    torch.dtype, torch.device, torch.Size,
)

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
        self._seen: dict[Hashable, tuple[int, Any]] = {}
        """When an object was met; kept, since another one may get the address of one that is gone."""
        self._names: tuple[str, ...] = ()
        """Names of globals and attributes in the function that is read."""

    def read(self, x: Any) -> None:
        if isinstance(x, _PLAIN):
            self.values.append((type(x), x))
            return
        is_namespace = isinstance(x, (type, types.ModuleType))
        # Of modules and classes those attributes are read that a function names.
        key = (id(x), self._names) if is_namespace else id(x)
        if key in self._seen:
            self.values.append(("again", self._seen[key][0]))
            return
        self._seen[key] = (len(self._seen), x)
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
        elif type(x) is list or (isinstance(x, tuple) and not hasattr(x, "__dict__")):
            self.values.append((type(x), len(x)))
            self._all(*x)
        elif type(x) in (dict, OrderedDict):
            self.values.append((type(x), len(x)))
            self._all(*x.keys(), *x.values())
        elif type(x) in (set, frozenset) and all(isinstance(each, _PLAIN) for each in x):
            self.values.append((type(x), frozenset(x)))
        elif is_namespace:
            self._identity(x)
            # torch's own don't change.
            if _is_own(x):
                self._all(*(getattr(x, name, None) for name in self._names))
        elif isinstance(x, OperatorBase):
            self._identity(x)
        elif _is_builtin(x):
            self._identity(x)
            # A method of an object depends on that: `table.get`.
            self.read(getattr(x, "__self__", None))
        elif isinstance(x, (property, staticmethod, classmethod)):
            self._all(getattr(x, "fget", None), getattr(x, "__func__", None))
        elif _is_of_python(type(x)):
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
        outer, self._names = self._names, _names(function.__code__)
        self._all(function.__defaults__, function.__kwdefaults__, vars(function))
        for cell in function.__closure__ or ():
            try:
                self.read(cell.cell_contents)
            except ValueError:  # not assigned yet
                self.values.append("empty")
        self._all(*(function.__globals__.get(name) for name in self._names))
        self._names = outer

    def _object(self, x: Any) -> None:
        """An object: its attributes, those of its class, and methods."""
        self.values.append(("of", id(type(x))))
        self.sources.append(type(x))
        self.read(vars(x))
        for kind in type(x).__mro__:
            if _is_own(kind):
                # What else Python itself has there is no state: `__module__`, `__weakref__`.
                self._all(*(
                    value for name, value in vars(kind).items()
                    if isinstance(value, _METHODS) or not name.startswith("__")
                ))


_METHODS = (types.FunctionType, property, staticmethod, classmethod)


def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names of globals and attributes in a function and in those that it defines."""
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return code.co_names + tuple(name for each in inner for name in _names(each))


def _is_own(x: Any) -> bool:
    """Whether a module or class is the program's, and not torch's or Python's."""
    name = x.__module__ if isinstance(x, type) else x.__name__
    return name.partition(".")[0] not in ("torch", "builtins")


def _is_of_python(kind: type) -> bool:
    """Whether objects of a class have all of their state in their ``__dict__``: no slots, and no base class
    written in C, of which objects are larger than two pointers, to the dict and to weak references."""
    if kind.__dictoffset__ == 0 or any(vars(base).get("__slots__") for base in kind.__mro__):
        return False
    return kind.__itemsize__ == 0 and kind.__basicsize__ <= 2 * object.__basicsize__


def _is_builtin(x: Any) -> bool:
    """Whether it is a function written in C: of a type that is not written in Python, and without attributes."""
    heap = type(x).__flags__ & (1 << 9)
    return callable(x) and not heap and not hasattr(x, "__dict__")
