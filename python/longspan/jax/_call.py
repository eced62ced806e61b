"""Calls of the handlers: what is static as attributes, arrays as operands, with rules for ``grad`` and ``vmap``."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy

from longspan import Pattern
from longspan._longspan import jax_handlers

for _name, _address in jax_handlers():
    jax.ffi.register_ffi_target(_name, jax.ffi.pycapsule(_address), platform="cpu")

Array = jax.Array


@functools.lru_cache(maxsize=256)
def read(text: str) -> Pattern:
    """The pattern of a text."""
    return Pattern(text)


class Static(NamedTuple):
    """What is constant in a compiled program. ``None`` isn't given."""

    pattern: str | None = None
    branches: tuple[tuple[int, ...], tuple[int, ...], str, str | None, str] | None = None
    """Segment lengths, dilation rates, within, also, overlap."""
    scale: float | None = None
    softcap: float | None = None
    bias_right: int | None = None
    dropout_p: float | None = None
    query_offset: int | None = None
    key_offset: int | None = None
    threads: int | None = None
    precision: str | None = None

    def attributes(self, names: tuple[str, ...]) -> dict[str, Any]:
        """As XLA takes them."""
        given: dict[str, Any] = {"operands": ",".join(names)}
        if self.branches is not None:
            lengths, rates, within, also, overlap = self.branches
            given |= {
                "segment_lengths": numpy.array(lengths, numpy.int64),
                "dilation_rates": numpy.array(rates, numpy.int64),
                "within": within,
                "also": also,
                "overlap": overlap,
            }
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            given[name] = None if value is None else kind(value)
        return {name: value for name, value in given.items() if value is not None}


_KINDS = {
    "pattern": str,
    "scale": numpy.float32,
    "softcap": numpy.float32,
    "bias_right": numpy.int64,
    "dropout_p": numpy.float64,
    "query_offset": numpy.int64,
    "key_offset": numpy.int64,
    "threads": numpy.int64,
    "precision": str,
}

#: Operands with gradients, in the order in which a handler returns those.
LEARNED = ("sink_logits", "bias_table", "alibi_slopes")

#: Operands with an element, or a row, per batch entry.
_PER_ENTRY = ("key_padding", "query_lengths")


class Saved(NamedTuple):
    """Output, log-sum-exp and what its rounding left out."""

    out: Array
    lse: Array
    lse_lo: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def call(static: Static, q: Array, k: Array, v: Array, operands: dict[str, Array]) -> tuple[Array, Array]:
    """Output, and log-sum-exp ``(batch, head, token)``."""
    saved = _forward(static)(q, k, v, operands)
    return saved.out, saved.lse


def _call_forward(static: Static, q: Array, k: Array, v: Array, operands: dict[str, Array]) -> Any:
    saved = _forward(static)(q, k, v, operands)
    return (saved.out, saved.lse), (q, k, v, operands, saved)


def _call_backward(static: Static, residuals: Any, cotangents: tuple[Array, Array]) -> Any:
    q, k, v, operands, saved = residuals
    dout, dlse = cotangents
    gradients = _backward(static)(q, k, v, operands, saved, dout, dlse)
    dq, dk, dv, *learned = gradients
    names = [name for name in LEARNED if name in operands]
    found = dict(zip(names, learned))
    of_operands = {
        # What is no parameter has the gradient of integers and bools.
        name: found[name] if name in found else numpy.zeros(x.shape, jax.dtypes.float0)
        for name, x in operands.items()
    }
    return dq, dk, dv, of_operands


call.defvjp(_call_forward, _call_backward)


@functools.lru_cache(maxsize=1024)
def _forward(static: Static) -> Any:
    """The forward pass, of which a batch of calls is one call."""

    @jax.custom_batching.custom_vmap
    def forward(q: Array, k: Array, v: Array, operands: dict[str, Array]) -> Saved:
        batch, tokens, heads, _ = q.shape
        rows = jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32)
        results = (jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype), rows, rows)
        function = jax.ffi.ffi_call("longspan_forward", results)
        return Saved(*function(q, k, v, *operands.values(), **static.attributes(tuple(operands))))

    @forward.def_vmap
    def batched(size: int, in_batched: Any, *arguments: Any) -> Any:
        q, k, v, operands = arguments
        fold = _Fold(size, q.shape[1 if in_batched[0] else 0])
        if fold.is_possible(static, operands, in_batched[3]):
            entries = [fold.entries(x, known) for x, known in zip((q, k, v), in_batched)]
            saved = forward(*entries, fold.operands(operands, in_batched[3]))
            saved = Saved(*map(fold.apart, saved))
        else:
            saved = _one_by_one(forward, in_batched, arguments)
        return saved, Saved(True, True, True)

    return forward


@functools.lru_cache(maxsize=1024)
def _backward(static: Static) -> Any:
    """The backward pass, likewise."""

    @jax.custom_batching.custom_vmap
    def backward(
        q: Array, k: Array, v: Array, operands: dict[str, Array], saved: Saved, dout: Array, dlse: Array
    ) -> tuple[Array, ...]:
        learned = [jax.ShapeDtypeStruct(operands[n].shape, jnp.float32) for n in LEARNED if n in operands]
        results = (*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)), *learned)
        function = jax.ffi.ffi_call("longspan_backward", results)
        tensors = (q, k, v, *saved, dout, dlse, *operands.values())
        return tuple(function(*tensors, **static.attributes(tuple(operands))))

    @backward.def_vmap
    def batched(size: int, in_batched: Any, *arguments: Any) -> Any:
        *tensors, operands, saved, dout, dlse = arguments
        fold = _Fold(size, tensors[0].shape[1 if in_batched[0] else 0])
        # Learned operands have a gradient per call, which is a sum over all of its batch entries.
        if fold.is_possible(static, operands, in_batched[3]) and not any(n in operands for n in LEARNED):
            entries = [fold.entries(x, known) for x, known in zip(tensors, in_batched)]
            rows = [fold.entries(x, known) for x, known in zip(saved, in_batched[4])]
            cotangents = [fold.entries(x, known) for x, known in zip((dout, dlse), in_batched[5:])]
            operands = fold.operands(operands, in_batched[3])
            gradients = backward(*entries, operands, Saved(*rows), *cotangents)
            gradients = tuple(map(fold.apart, gradients))
        else:
            gradients = _one_by_one(backward, in_batched, arguments)
        return gradients, (True,) * len(gradients)

    return backward


def _one_by_one(function: Any, in_batched: Any, arguments: Any) -> Any:
    """The calls of a batch, one after the other."""
    leaves, structure = jax.tree.flatten(arguments)
    batched = jax.tree.leaves(in_batched)

    def one(own: list[Array]) -> Any:
        rest = iter(own)
        of_call = [next(rest) if known else x for x, known in zip(leaves, batched)]
        return function(*jax.tree.unflatten(structure, of_call))

    return jax.lax.map(one, [x for x, known in zip(leaves, batched) if known])


class _Fold:
    """A batch of calls as batch entries of one, where each entry is computed as in a call of its own."""

    def __init__(self, size: int, batch: int):
        self.size, self.batch = size, batch

    def is_possible(self, static: Static, operands: dict[str, Array], batched: dict[str, bool]) -> bool:
        # Which pairs are dropped depends on the number of the entry, and so may patterns.
        if "seed" in operands or (static.pattern is not None and read(static.pattern).batch is not None):
            return False
        return all(
            not batched[name] or name in _PER_ENTRY or (name == "mask" and x.shape[1] == self.batch)
            for name, x in operands.items()
        )

    def entries(self, x: Array, batched: bool) -> Array:
        if not batched:
            x = jnp.broadcast_to(x, (self.size, *x.shape))
        return x.reshape((self.size * x.shape[1], *x.shape[2:]))

    def apart(self, x: Array) -> Array:
        return x.reshape((self.size, self.batch, *x.shape[1:]))

    def operands(self, operands: dict[str, Array], batched: dict[str, bool]) -> dict[str, Array]:
        # A mask of one entry that is the same for all calls is one of all entries.
        return {
            name: self.entries(x, batched[name])
            if name in _PER_ENTRY or (name == "mask" and (batched[name] or x.shape[0] > 1))
            else x
            for name, x in operands.items()
        }
