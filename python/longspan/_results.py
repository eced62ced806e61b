"""What calls return: tuples with names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy


class Output(NamedTuple):
    """What ``forward`` found, and ``backward`` needs."""

    out: Any
    """One weighted sum of values a query: axes as the queries, head dim of the values."""
    lse: numpy.ndarray
    """The log-sum-exp of each row, f32, ``(batch, heads, tokens)``; -inf where nothing is seen."""
    lse_rest: numpy.ndarray
    """What rounding ``lse`` to f32 left out."""


class Gradients(NamedTuple):
    """What ``backward`` found: axes as their tensors."""

    dq: Any
    dk: Any
    dv: Any
