"""What calls return: tuples with names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy
    from numpy.typing import NDArray
    from typing_extensions import Self

    from longspan._longspan import Dilated, Layout, Pattern


class _Output(NamedTuple):
    out: Any
    """One weighted sum of values per query: axes as the queries, head dim of the values."""
    lse: NDArray[numpy.float32]
    """The log-sum-exp of each row, f32, ``(batch, heads, tokens)``; -inf where nothing is seen.
    It includes the sink logit of the row's head, if there is one."""
    lse_lo: NDArray[numpy.float32]
    """The low part of the log-sum-exp: ``lse + lse_lo`` is a double-f32."""


class Output(_Output):
    """The results of a forward pass, and what its backward pass needs besides the inputs.

    A tuple ``(out, lse, lse_lo)`` that also holds the pattern and the options it was computed
    with, so that ``backward`` uses the same.
    """

    pattern: Pattern | str | Layout | Dilated | None
    """The pattern of the forward pass."""
    options: Mapping[str, Any] | None
    """The options that the forward pass was given; None of a tuple that was made by hand."""

    def __new__(
        cls,
        out: Any,
        lse: Any,
        lse_lo: Any,
        pattern: Pattern | str | Layout | Dilated | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Self:
        self = super().__new__(cls, out, lse, lse_lo)
        self.pattern, self.options = pattern, options
        return self

    def _replace(self, **fields: Any) -> Self:
        """A copy with other fields, of the same pattern and options."""
        parts: dict[str, Any] = {**self._asdict(), **fields}
        return type(self)(**parts, pattern=self.pattern, options=self.options)


class _Gradients(NamedTuple):
    dq: Any
    dk: Any
    dv: Any


class Gradients(_Gradients):
    """What ``backward`` returns: a tuple ``(dq, dk, dv)``, axes as their tensors, and the gradients of
    options beside it."""

    dsink_logits: NDArray[numpy.float32] | None
    """The gradient of the sink logits, f32, ``(heads,)``; None without them."""
    dbias_table: NDArray[numpy.float32] | None
    """The gradient of the bias table, f32, ``(heads, distances)``; None without one."""
    dalibi_slopes: NDArray[numpy.float32] | None
    """The gradient of the slopes, f32, ``(heads,)``; None without them."""

    def __new__(
        cls,
        dq: Any,
        dk: Any,
        dv: Any,
        dsink_logits: NDArray[numpy.float32] | None = None,
        dbias_table: NDArray[numpy.float32] | None = None,
        dalibi_slopes: NDArray[numpy.float32] | None = None,
    ) -> Self:
        self = super().__new__(cls, dq, dk, dv)
        self.dsink_logits = dsink_logits
        self.dbias_table = dbias_table
        self.dalibi_slopes = dalibi_slopes
        return self

    def _replace(self, **fields: Any) -> Self:
        """A copy with other fields, and the same gradients of options."""
        return type(self)(**{**self._asdict(), **vars(self), **fields})
