"""``attention``: what a caller gives, checked while it is traced."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy

from longspan import Dilated, Pattern
from longspan.jax._call import Array, Static, call, read

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

#: The largest head dim of the kernels.
_MAX_HEAD_DIM = 256


@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: Pattern | str | Dilated,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: Literal[False] = False,
    cu_seqlens: Any | tuple[Any, Any] | None = None,
    key_padding: Any | None = None,
    query_offset: int | None = None,
    key_offset: int | None = None,
    sink_logits: Any | None = None,
    bias_table: Any | None = None,
    bias_right: int = 0,
    alibi_slopes: Any | None = None,
    dropout_p: float = 0,
    dropout_key: Any | None = None,
    threads: int | None = None,
    precision: str | None = None,
) -> Array: ...
@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: Pattern | str | Dilated,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: Literal[True],
    cu_seqlens: Any | tuple[Any, Any] | None = None,
    key_padding: Any | None = None,
    query_offset: int | None = None,
    key_offset: int | None = None,
    sink_logits: Any | None = None,
    bias_table: Any | None = None,
    bias_right: int = 0,
    alibi_slopes: Any | None = None,
    dropout_p: float = 0,
    dropout_key: Any | None = None,
    threads: int | None = None,
    precision: str | None = None,
) -> tuple[Array, Array]: ...
def attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: Pattern | str | Dilated,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    cu_seqlens: Any | tuple[Any, Any] | None = None,
    key_padding: Any | None = None,
    query_offset: int | None = None,
    key_offset: int | None = None,
    sink_logits: Any | None = None,
    bias_table: Any | None = None,
    bias_right: int = 0,
    alibi_slopes: Any | None = None,
    dropout_p: float = 0,
    dropout_key: Any | None = None,
    threads: int | None = None,
    precision: str | None = None,
) -> Array | tuple[Array, Array]:
    """Attention over the pairs that ``pattern`` allows, with gradients.

    Tensors are ``(batch, token, head, dim)``, f32, bf16 or f16. There may be fewer key heads than query heads,
    fewer queries than keys (the queries are the *last* positions), and values may have another head dim. A query
    that sees nothing gives zeros.

    >>> import jax, longspan.jax
    >>> q = jax.random.normal(jax.random.key(0), (2, 300, 8, 32))
    >>> k = v = q[:, :, :2]
    >>> out, lse = longspan.jax.attention(q, k, v, "causal & (window(64, 0) | sinks(4))", return_lse=True)
    >>> out.shape, lse.shape
    ((2, 300, 8, 32), (2, 8, 300))

    The pattern (or ``longspan.Dilated``, LongNet's branches), scale, softcap and offsets are static: constants
    of a compiled program. Arrays may be traced: ``cu_seqlens`` (bounds of packed sequences; a pair for queries and
    keys), ``key_padding`` ``(batch, 2)``, the first and the end of the keys that are tokens, and, with gradients,
    ``sink_logits`` and ``alibi_slopes`` ``(head,)`` and ``bias_table`` ``(head, distance)``. What they mean is in
    ``longspan.torch.attention``.

    ``dropout_p`` drops probabilities; which ones depends on ``dropout_key``, a key of ``jax.random``, and on
    positions.

    ``jit``, ``grad``, ``vjp``, ``vmap``, ``checkpoint`` and ``scan`` work. Forward mode (``jvp``, ``jacfwd``,
    ``linearize``) is an error, and so is a second derivative.
    """
    q, k, v = _checked(q, k, v)
    operands: dict[str, Array] = {}
    if cu_seqlens is not None:
        bounds = cu_seqlens if isinstance(cu_seqlens, (tuple, list)) and len(cu_seqlens) == 2 else (cu_seqlens, cu_seqlens)
        for name, x in zip(("cu_seqlens_q", "cu_seqlens_k"), bounds):
            operands[name] = _integers(name, x, 1)
        if query_offset is not None or key_offset is not None:
            raise ValueError("cu_seqlens and an offset: expected one of both, packed sequences count their own positions")
    if key_padding is not None:
        operands["key_padding"] = _integers("key_padding", key_padding, 2)
        if operands["key_padding"].shape != (q.shape[0], 2):
            shape = operands["key_padding"].shape
            raise ValueError(f"key_padding has shape {shape}, expected ({q.shape[0]}, 2): a range of keys per batch entry")
    heads = q.shape[2]
    for name, x, axes in (("sink_logits", sink_logits, 1), ("bias_table", bias_table, 2), ("alibi_slopes", alibi_slopes, 1)):
        if x is not None:
            operands[name] = _learned(name, x, axes, heads)
    if bias_table is None and bias_right:
        raise ValueError(f"bias_right is {bias_right} without a bias_table: leave it out")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p is {dropout_p}, expected a number from 0 to below 1")
    if (dropout_key is not None) != bool(dropout_p):
        raise ValueError("dropout_p and dropout_key: expected both, a share and a key of jax.random, or none")
    if dropout_key is not None:
        operands["seed"] = jax.random.bits(dropout_key, (2,), jnp.uint32)
    static = Static(
        scale=_number("scale", scale),
        softcap=_number("softcap", softcap),
        bias_right=bias_right if bias_table is not None else None,
        dropout_p=float(dropout_p) if dropout_p else None,
        query_offset=_integer("query_offset", query_offset),
        key_offset=_integer("key_offset", key_offset),
        threads=threads,
        precision=precision,
    )
    return computed(_selected(static, pattern, q.shape[0], heads), q, k, v, operands, return_lse)


def computed(
    static: Static, q: Array, k: Array, v: Array, operands: dict[str, Array], return_lse: bool
) -> Any:
    """A call that was checked."""
    try:
        out, lse = call(static, q, k, v, operands)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise NotImplementedError(
            "longspan.jax has no forward mode (jvp, jacfwd, linearize, hessian): use reverse mode (grad, vjp, "
            "jacrev), or jax.nn.dot_product_attention"
        ) from error
    return (out, lse) if return_lse else out


def _selected(static: Static, pattern: Any, batch: int, heads: int) -> Static:
    """With the pattern, or an error that would come from a compiled program later."""
    if isinstance(pattern, Dilated):
        if static.key_offset is not None:
            raise ValueError("key_offset: expected None, segments of dilated attention begin at the first key")
        if pattern.key_padding is not None or pattern.cu_seqlens is not None:
            raise ValueError("a Dilated that is padded or packed, expected one that isn't: give key_padding or cu_seqlens")
        also = None if pattern.also is None else str(pattern.also)
        lengths, rates = tuple(pattern.segment_lengths), tuple(pattern.dilation_rates)
        return static._replace(branches=(lengths, rates, str(pattern.within), also, pattern.overlap))
    if not isinstance(pattern, (str, Pattern)):
        raise TypeError(
            f"pattern is a {type(pattern).__name__}, expected a longspan.Pattern, its text or a longspan.Dilated: it is "
            "a constant of a compiled program"
        )
    own = read(pattern) if isinstance(pattern, str) else pattern
    if own.heads not in (None, heads):
        raise ValueError(f"pattern has {own.heads} heads, expected {heads}, as q")
    if own.batch not in (None, batch):
        raise ValueError(f"pattern has {own.batch} batch entries, expected {batch}, as q")
    return static._replace(pattern=str(own))


def _checked(q: Any, k: Any, v: Any) -> tuple[Array, Array, Array]:
    tensors = []
    for name, x in (("q", q), ("k", k), ("v", v)):
        x = jnp.asarray(x)
        if x.ndim != 4:
            raise ValueError(f"{name} has {x.ndim} axes, expected 4: (batch, token, head, dim); x[None] adds one")
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name} holds {x.dtype}, expected float32, bfloat16 or float16: convert it")
        tensors.append(x)
    q, k, v = tensors
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v hold {q.dtype}, {k.dtype} and {v.dtype}, expected one type: convert them")
    for name, x, axes, like in (("k", k, (0, 3), q), ("v", v, (0, 1, 2), k)):
        for axis in axes:
            if x.shape[axis] != like.shape[axis]:
                other = "q" if like is q else "k"
                raise ValueError(
                    f"{name} has shape {x.shape} and {other} {like.shape}, expected as many elements along axis {axis}"
                )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads and k has {k.shape[2]}, expected a multiple of the key heads")
    for name, x in (("q", q), ("v", v)):
        if not 1 <= x.shape[3] <= _MAX_HEAD_DIM:
            raise ValueError(f"{name} has head dim {x.shape[3]}, expected 1 to {_MAX_HEAD_DIM}")
    return q, k, v


def _integers(name: str, x: Any, axes: int) -> Array:
    x = jnp.asarray(x)
    if x.ndim != axes or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} is {x.dtype} of shape {x.shape}, expected integers with {axes} axes")
    return x.astype(jnp.int32)


def _learned(name: str, x: Any, axes: int, heads: int) -> Array:
    x = jnp.asarray(x)
    if x.ndim != axes or x.shape[0] != heads or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} is {x.dtype} of shape {x.shape}, expected floating-point for {heads} heads, with {axes} axes")
    return x.astype(jnp.float32)


def _number(name: str, x: Any) -> float | None:
    """A constant, or an error."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{name} is traced, expected a number: it is a constant of a compiled program; scale q instead")
    return None if x is None else float(x)


def _integer(name: str, x: Any) -> int | None:
    if x is not None and not isinstance(x, (int, numpy.integer)):
        raise TypeError(f"{name} is a {type(x).__name__}, expected an integer: it is a constant of a compiled program")
    return None if x is None else int(x)
