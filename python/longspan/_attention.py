"""``Attention``: a pattern and its options, for both passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from longspan import _longspan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy
    from numpy.typing import NDArray

    from longspan._longspan import (
        Dilated,
        Layout,
        Pattern,
        _Integers,
        _Isa,
        _Order,
        _Out,
        _Precision,
        _Scalar,
        _Slopes,
        _Table,
        _Tensor,
    )
    from longspan._results import Gradients, Output


class Attention:
    """A pattern and options that both passes share.

    Arguments are those of ``longspan.attention``; they are checked here, once.

    >>> import longspan, numpy
    >>> attention = longspan.Attention("causal & window(64, 0)", scale=0.25)
    >>> attention
    longspan.Attention(longspan.Pattern("causal & window(64, 0)"), scale=0.25)
    >>> x = numpy.random.default_rng(0).standard_normal((1, 2, 300, 16), dtype="float32")
    >>> output = attention.forward(x, x, x)
    >>> gradients = attention.backward(x, x, x, output, numpy.ones_like(output.out))
    >>> gradients.dq.shape
    (1, 2, 300, 16)

    Called, it returns what ``longspan.attention`` returns:

    >>> numpy.array_equal(attention(x, x, x), output.out)
    True
    """

    __slots__ = ("_options", "_pattern")
    _options: dict[str, Any]
    _pattern: Pattern | Layout | Dilated

    def __init__(
        self,
        pattern: Pattern | str | Layout | Dilated,
        *,
        order: _Order | None = None,
        block: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        alibi_slopes: _Slopes | None = None,
        bias_table: _Table | None = None,
        bias_right: int | None = None,
        sink_logits: _Slopes | None = None,
        dropout_p: float | None = None,
        dropout_seed: int | None = None,
        query_offset: int | None = None,
        key_offset: int | None = None,
        key_padding: Sequence[tuple[int, int]] | None = None,
        threads: int | None = None,
        isa: _Isa | None = None,
        precision: _Precision | None = None,
    ) -> None:
        self._pattern, self._options = _longspan.check_options(
            pattern,
            order=order,
            block=block,
            scale=scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            bias_table=bias_table,
            bias_right=bias_right,
            sink_logits=sink_logits,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            query_offset=query_offset,
            key_offset=key_offset,
            key_padding=key_padding,
            threads=threads,
            isa=isa,
            precision=precision,
        )

    @property
    def pattern(self) -> Pattern | Layout | Dilated:
        """The pattern; text has become a ``Pattern``."""
        return self._pattern

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that were given, by name."""
        return dict(self._options)

    @overload
    def __call__(
        self,
        q: NDArray[_Scalar],
        k: _Tensor,
        v: _Tensor,
        *,
        out: None = None,
        return_lse: Literal[False] = False,
    ) -> NDArray[_Scalar]: ...
    @overload
    def __call__(
        self,
        q: NDArray[_Scalar],
        k: _Tensor,
        v: _Tensor,
        *,
        out: None = None,
        return_lse: Literal[True],
    ) -> tuple[NDArray[_Scalar], NDArray[numpy.float32]]: ...
    @overload
    def __call__(
        self, q: _Tensor, k: _Tensor, v: _Tensor, *, out: _Out, return_lse: Literal[False] = False
    ) -> _Out: ...
    @overload
    def __call__(
        self, q: _Tensor, k: _Tensor, v: _Tensor, *, out: _Out, return_lse: Literal[True]
    ) -> tuple[_Out, NDArray[numpy.float32]]: ...
    @overload
    def __call__(
        self,
        q: _Tensor,
        k: _Tensor,
        v: _Tensor,
        *,
        out: None = None,
        return_lse: Literal[False] = False,
    ) -> Any: ...
    @overload
    def __call__(
        self, q: _Tensor, k: _Tensor, v: _Tensor, *, out: None = None, return_lse: Literal[True]
    ) -> tuple[Any, NDArray[numpy.float32]]: ...
    @overload
    def __call__(
        self, q: _Tensor, k: _Tensor, v: _Tensor, *, out: _Tensor | None = None, return_lse: bool
    ) -> Any: ...
    def __call__(
        self,
        q: _Tensor,
        k: _Tensor,
        v: _Tensor,
        *,
        out: _Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """The output alone, or with the log-sum-exp: ``longspan.attention``."""
        return _longspan.attention(
            q, k, v, self._pattern, out=out, return_lse=return_lse, **self._options
        )

    def forward(
        self, q: _Tensor, k: _Tensor, v: _Tensor, *, out: _Tensor | None = None
    ) -> Output:
        """The forward pass, with all that ``backward`` needs: ``longspan.forward``."""
        return _longspan.forward(q, k, v, self._pattern, out=out, **self._options)

    def bytes_needed(
        self, q: _Tensor, k: _Tensor, v: _Tensor, *, backward: bool = False
    ) -> int:
        """Bytes that ``forward`` or ``backward`` allocates: ``longspan.bytes_needed``."""
        return _longspan.bytes_needed(
            q, k, v, self._pattern, backward=backward, **self._options
        )

    def attention_weights(
        self,
        q: _Tensor,
        k: _Tensor,
        rows: _Integers,
        *,
        heads: _Integers | None = None,
        batch: _Integers | None = None,
        max_bytes: int | None = None,
    ) -> NDArray[numpy.float32]:
        """What values are multiplied by, for chosen queries: ``longspan.attention_weights``."""
        return _longspan.attention_weights(
            q,
            k,
            self._pattern,
            rows,
            heads=heads,
            batch=batch,
            max_bytes=max_bytes,
            **self._options,
        )

    def backward(
        self,
        q: _Tensor,
        k: _Tensor,
        v: _Tensor,
        output: Output | tuple[_Tensor, _Tensor] | tuple[_Tensor, _Tensor, _Tensor],
        dout: _Tensor,
        dlse: _Tensor | None = None,
    ) -> Gradients:
        """The gradients: ``longspan.backward``. An ``output`` that was computed with another pattern
        or with other options is a ``ValueError``."""
        for name, value in (getattr(output, "options", None) or {}).items():
            if name not in self._options and name not in _longspan.EXECUTION_OPTIONS:
                raise ValueError(
                    f"{name} is left out of this Attention, but the forward pass had {value!r}: use "
                    f"the Attention that computed output, or make one with {name}={value!r}"
                )
        return _longspan.backward(
            q, k, v, output, dout, self._pattern, dlse=dlse, **self._options
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Attention):
            return NotImplemented
        return (self._pattern, self._options) == (other._pattern, other._options)

    def __hash__(self) -> int:
        return hash((self._pattern, tuple(self._options.items())))

    def __repr__(self) -> str:
        options = [f"{name}={value!r}" for name, value in self._options.items()]
        return f"longspan.Attention({', '.join([repr(self._pattern), *options])})"
