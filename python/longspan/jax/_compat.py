"""The same attention under the names and rules of ``jax.nn`` and flax."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from longspan import Dilated, Pattern
from longspan.jax._attention import _checked, _integers, _number, attention, computed
from longspan.jax._call import Array, Static

#: Further than any key: the longest side of a window.
_FAR = 1 << 60


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any | None = None,
    mask: Any | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any | None = None,
    key_value_seq_lengths: Any | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    pattern: Pattern | str | Dilated | None = None,
) -> Any:
    """``jax.nn``'s function of that name, and a pattern, whose positions count from the first query and the first
    key as those of ``is_causal`` and ``local_window_size`` do.

    ``mask`` holds the pairs, ``(batch or 1, head or 1, query, key)``; it is read in every call, and stands in
    the place of a pattern. A query that sees no key gives zeros, where ``jax.nn`` gives an average of all values.

    >>> import jax, longspan.jax
    >>> q = jax.random.normal(jax.random.key(0), (1, 200, 4, 32))
    >>> ours = longspan.jax.dot_product_attention(q, q, q, is_causal=True, local_window_size=(16, 0))
    >>> theirs = jax.nn.dot_product_attention(q, q, q, is_causal=True, local_window_size=(16, 0))
    >>> bool(abs(ours - theirs).max() < 1e-5)
    True
    """
    if bias is not None:
        raise NotImplementedError(
            "bias: expected none, longspan adds no numbers of every pair: a bias by distance is bias_table or "
            "alibi_slopes of longspan.jax.attention, a mask of pairs is mask"
        )
    if implementation is not None:
        raise ValueError(f"implementation is {implementation!r}, expected None: longspan is the implementation")
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    axes = query.ndim
    if axes == 3:
        query, key, value = query[None], key[None], value[None]
    query, key, value = _checked(query, key, value)
    terms = [] if pattern is None or isinstance(pattern, Dilated) else [str(pattern)]
    if is_causal:
        terms.append("causal")
    if local_window_size is not None:
        left, right = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
        terms.append(f"window({left}, {right})")
    operands: dict[str, Array] = {}
    if key_value_seq_lengths is not None:
        ends = _lengths("key_value_seq_lengths", key_value_seq_lengths, query.shape[0], key.shape[1])
        operands["key_padding"] = jnp.stack([jnp.zeros_like(ends), ends], 1)
    if query_seq_lengths is not None:
        operands["query_lengths"] = _lengths("query_seq_lengths", query_seq_lengths, query.shape[0], query.shape[1])
    if isinstance(pattern, Dilated):
        if terms or operands or mask is not None:
            raise ValueError(
                "a Dilated beside is_causal, local_window_size, lengths or a mask, expected it alone: a pattern that cuts "
                "branches is its `within`"
            )
        found = attention(query, key, value, pattern, scale=scale, query_offset=0, return_lse=True)
    elif mask is not None:
        if pattern is not None:
            raise ValueError("mask and pattern, expected one of both: put the rule of the mask into the pattern")
        static = Static(scale=_number("scale", scale), query_offset=0)
        pairs = _pairs(mask, query, key, is_causal, local_window_size, operands)
        found = computed(static, query, key, value, {"mask": pairs}, return_lse=True)
    else:
        # `heads([…])` stands alone.
        text = terms[0] if len(terms) == 1 else " & ".join(f"({term})" for term in terms) or "full"
        static = Static(pattern=str(Pattern(text)), scale=_number("scale", scale), query_offset=0)
        found = computed(static, query, key, value, operands, return_lse=True)
    out, lse = found
    residual = lse.transpose(0, 2, 1)
    if axes == 3:
        out, residual = out[0], residual[0]
    return (out, residual) if return_residual else out


def _lengths(name: str, x: Any, batch: int, tokens: int) -> Array:
    x = _integers(name, x, 1)
    if x.shape != (batch,):
        raise ValueError(f"{name} has shape {x.shape}, expected ({batch},): a length per batch entry")
    return jnp.clip(x, 0, tokens)


def _pairs(
    mask: Any, query: Array, key: Array, is_causal: bool, window: Any, operands: dict[str, Array]
) -> Array:
    """A mask and what else says which pairs there are, as one mask."""
    mask = jnp.asarray(mask)
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    if mask.dtype != bool or mask.ndim > 4 or any(a not in (1, b) for a, b in zip(mask.shape[::-1], shape[::-1])):
        raise ValueError(f"mask is {mask.dtype} of shape {mask.shape}, expected bool that broadcasts to {shape}")
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    mask = jnp.broadcast_to(mask, (*mask.shape[:2], *shape[2:]))
    at_q, at_k = jnp.arange(shape[2])[:, None], jnp.arange(shape[3])
    if is_causal:
        mask = mask & (at_k <= at_q)
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        mask = mask & (at_q - at_k <= left) & (at_k - at_q <= right)
    if "key_padding" in operands:
        mask = mask & (at_k < operands["key_padding"][:, 1, None, None, None])
    if "query_lengths" in operands:
        mask = mask & (at_q < operands["query_lengths"][:, None, None, None])
    return mask


def attention_fn(
    query: Any,
    key: Any,
    value: Any,
    bias: Any | None = None,
    mask: Any | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any | None = None,
    precision: Any | None = None,
    *,
    pattern: Pattern | str | Dilated | None = None,
    is_causal: bool = False,
    **options: Any,
) -> Array:
    """What flax's attention layers take as ``attention_fn``, in linen and nnx.

    ``pattern`` (by ``functools.partial``) says which positions attend to which; positions are those of the
    sequence, the queries the *last* ones. Without one the layer's ``mask`` does.

    >>> import functools, jax, longspan.jax
    >>> from flax import nnx
    >>> window = functools.partial(longspan.jax.attention_fn, pattern="causal & window(64, 0)")
    >>> layer = nnx.MultiHeadAttention(
    ...     num_heads=4, in_features=32, qkv_features=32, decode=False, rngs=nnx.Rngs(0), attention_fn=window
    ... )
    >>> layer(jax.numpy.ones((2, 300, 32))).shape
    (2, 300, 32)
    """
    given = {name: value for name, value in options.items() if value not in (None, False)}
    if given:
        name, value = next(iter(given.items()))
        raise NotImplementedError(f"{name} is {value!r}, expected it left out: longspan.jax.attention_fn has no such option")
    if precision is not None:
        raise NotImplementedError(
            f"precision is {precision}, expected None: products are those of the tensors' type; precision=\"high\" of "
            "longspan.jax.attention is another one"
        )
    if bias is not None:
        raise NotImplementedError(
            "bias: expected none, longspan adds no numbers of every pair: a bias by distance is bias_table or "
            "alibi_slopes of longspan.jax.attention"
        )
    if dtype is not None:
        query, key, value = (jnp.asarray(x).astype(dtype) for x in (query, key, value))
    drops = dropout_rate > 0 and not deterministic
    if drops and broadcast_dropout:
        raise NotImplementedError(
            "broadcast_dropout is true, expected false: longspan drops pairs of each batch entry and head on their own"
        )
    if mask is not None:
        if pattern is not None or drops:
            other = "pattern" if pattern is not None else "dropout"
            raise ValueError(f"mask and {other}, expected one of both: put the rule of the mask into the pattern")
        return dot_product_attention(query, key, value, mask=mask, is_causal=is_causal)
    given_pattern: Any = "full" if pattern is None else pattern
    if is_causal:
        if isinstance(given_pattern, Dilated):
            raise ValueError("is_causal beside a Dilated, expected within=\"causal\" of it")
        given_pattern = f"causal & ({given_pattern})"
    return attention(
        query,
        key,
        value,
        given_pattern,
        dropout_p=dropout_rate if drops else 0,
        dropout_key=dropout_rng if drops else None,
    )
