"""Longspan in torch's registry of flash attention implementations, for tensors on the CPU.

``torch.nn.attention.activate_flash_attention_impl("longspan")`` puts the functions below in the place of torch's
kernels, ``restore_flash_attention_impl()`` puts those back:

| operator of aten | Longspan computes | the rest |
|---|---|---|
| ``_scaled_dot_product_flash_attention_for_cpu``, ``…_backward`` | f32, bf16, f16, causal or not | the kernel that was there |
| ``scaled_dot_product_attention`` | boolean masks, as layouts | what was there, which calls the operator above |
| ``_flash_attention_forward``, ``…_backward``, ``…_no_dropout_inplace`` | ``varlen_attn``, windows, ALiBi | an error by name: torch has no kernel |

torch looks kernels up when they run: a graph of ``torch.compile`` uses those that are active then. Boolean masks
alone are an operator of Longspan's in a graph that was compiled while it was active.

aten's backward pass has no argument for what rounding the log-sum-exp to f32 left out, which is 0 here
(``longspan::OutputRef::lse_lo``).
"""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from longspan import Layout
from longspan.torch import _op, _run
from longspan.torch._compat import within_window
from longspan.torch._mask_layouts import layout_of_mask
from longspan.torch._run import Found, Places, Scores
from longspan.torch._views import dense_like

NAME = "longspan"

_SDPA = "_scaled_dot_product_flash_attention_for_cpu"

#: The largest head dim of Longspan's kernels.
_MAX_HEAD_DIM = 256

#: Scores from which a boolean mask is read: below, the calls themselves take longer than the attention.
_LEAST_SCORES = 1 << 16


class ImplCalls(NamedTuple):
    """Calls of SDPA's and ``varlen_attn``'s kernels, forward and backward, while Longspan was active."""

    longspan: int
    """Computed by Longspan."""
    stock: int
    """Handed to the kernel that was there."""


class _Counter(threading.local):
    """What a call of SDPA has reached, on this thread."""

    reached = False


_counts = [0, 0]
_call = _Counter()


def impl_calls() -> ImplCalls:
    """How many calls Longspan computed since it was first activated, and how many went to torch's kernels.

    >>> import torch, longspan.torch
    >>> from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
    >>> activate_flash_attention_impl("longspan")
    >>> before, q = longspan.torch.impl_calls(), torch.randn(1, 2, 300, 32)
    >>> out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> out = torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    >>> after = longspan.torch.impl_calls()
    >>> after.longspan - before.longspan, after.stock - before.stock
    (1, 1)
    >>> restore_flash_attention_impl()
    """
    return ImplCalls(*_counts)


def _count(is_own: bool) -> None:
    _counts[0 if is_own else 1] += 1
    _call.reached = True


def _read_mask(mask: Tensor) -> tuple[Layout, Places]:
    _count(True)
    return layout_of_mask(mask, tuple(mask.shape)), Places()


#: Over the pairs that are true in a mask ``(batch, head, query, key)``, with 1 batch entry or head where it is
#: the same for all.
masked_attention = _op.define("masked_attention", "Tensor mask", _read_mask)


def register() -> bool:
    """Registers Longspan with torch; false where torch has no registry yet."""
    try:
        from torch.library import get_kernel  # noqa: F401
        from torch.nn.attention import register_flash_attention_impl, restore_flash_attention_impl  # noqa: F401
    except ImportError:
        return False
    register_flash_attention_impl(NAME, register_fn=Active)
    return True


class Active:
    """Longspan's kernels while they are active; ``remove`` puts back what was there."""

    def __init__(self) -> None:
        kernel = torch.library.get_kernel
        self._forward = kernel(f"aten::{_SDPA}", "CPU")
        self._backward = kernel(f"aten::{_SDPA}_backward", "CPU")
        self._sdpa = {
            key: kernel("aten::scaled_dot_product_attention", key) for key in ("CPU", "AutogradCPU")
        }
        self._library = library = torch.library.Library("aten", "IMPL")
        replace = {"with_keyset": True, "allow_override": True}
        library.impl(_SDPA, self._forward_or_stock, "CPU", **replace)
        library.impl(f"{_SDPA}_backward", self._backward_or_stock, "CPU", **replace)
        for key in self._sdpa:
            library.impl("scaled_dot_product_attention", self._masked_or_stock(key), key, **replace)
        library.impl("_flash_attention_forward", varlen_forward, "CPU")
        library.impl("_flash_attention_forward_no_dropout_inplace", varlen_forward_into, "CPU")
        library.impl("_flash_attention_backward", varlen_backward, "CPU")

    def remove(self) -> None:
        self._library._destroy()

    def _forward_or_stock(self, keys, query, key, value, dropout_p=0.0, is_causal=False, *,
                          attn_mask=None, scale=None):
        is_own = _is_computed(query, key, value, dropout_p, attn_mask, scale)
        _count(is_own)
        if not is_own:
            return self._forward.call_boxed(
                keys, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )
        # Strides are those that torch's fake kernel has, which compiled graphs rely on.
        found = Found(torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32), None)
        _run.forward(found, query, key, value, *_dense(is_causal, scale))
        lse = torch.empty_like(found.lse.mT, memory_format=torch.contiguous_format).mT
        return found.out, lse.copy_(found.lse)

    def _backward_or_stock(self, keys, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *,
                           attn_mask=None, scale=None):
        is_own = _is_computed(query, key, value, dropout_p, attn_mask, scale)
        _count(is_own)
        if not is_own:
            return self._backward.call_boxed(
                keys, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal,
                attn_mask=attn_mask, scale=scale,
            )
        found = Found(out, logsumexp, torch.zeros_like(logsumexp))
        return _run.backward(query, key, value, found, grad_out, None, *_dense(is_causal, scale))[:3]

    def _masked_or_stock(self, dispatch_key):
        stock = self._sdpa[dispatch_key]

        def attention(keys, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *,
                      scale=None, enable_gqa=False):
            if attn_mask is not None and _is_boolean(query, key, value, attn_mask, dropout_p, scale):
                if not is_causal and (enable_gqa or query.shape[1] == key.shape[1]):
                    mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
                    mask = mask.expand(-1, -1, query.shape[2], key.shape[2])
                    return masked_attention(query, key, value, mask, *Scores(scale))[0]
            _call.reached = False
            out = stock.call_boxed(
                keys, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            # The math backend calls no kernel that could count. Tensors that are traced compute nothing.
            if not _call.reached and type(out) is Tensor:
                _count(False)
            return out

        return attention


def _dense(is_causal: bool, scale: float | None) -> tuple[str, Scores, Places]:
    """What ``_run`` takes; torch counts causal positions from the first query."""
    if is_causal:
        return "causal", Scores(scale), Places(query_offset=0)
    return "full", Scores(scale), Places()


def _is_computed(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, mask: Tensor | None, scale: float | None
) -> bool:
    """Whether Longspan computes a dense call."""
    return (
        dropout_p == 0
        and mask is None
        and query.dtype in _run.NAMES
        and 0 < query.shape[3] == value.shape[3] <= _MAX_HEAD_DIM
        and (scale is None or math.isfinite(scale))
    )


def _is_boolean(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout_p: float, scale: float | None
) -> bool:
    """Whether Longspan computes a call with a mask of pairs. Shapes that torch refuses are left to torch."""
    if mask.dtype != torch.bool or not (query.ndim == key.ndim == value.ndim == 4) or mask.ndim > 4:
        return False
    pairs = (*query.shape[:3], key.shape[2])
    return (
        mask.device.type == "cpu"
        and not (query.is_nested or key.is_nested or value.is_nested)
        and _is_computed(query, key, value, dropout_p, None, scale)
        and query.dtype == key.dtype == value.dtype
        and query.shape[3] == key.shape[3]
        and query.shape[0] == key.shape[0] == value.shape[0]
        and key.shape[1:3] == value.shape[1:3]
        and key.shape[1] > 0
        and query.shape[1] % key.shape[1] == 0
        and all(size in (1, full) for size, full in zip(mask.shape[::-1], pairs[::-1]))
        and math.prod(pairs) >= _LEAST_SCORES
        and torch._C._functorch.peek_interpreter_stack() is None
        and not (forward_ad._current_level >= 0 and _has_tangent(query, key, value))
    )


def _has_tangent(*tensors: Tensor) -> bool:
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


# --- varlen_attn


class _Sequences(NamedTuple):
    """A call of ``varlen_attn``, as ``_run`` takes it."""

    pattern: str
    scores: Scores
    places: Places

    @staticmethod
    def read(
        query: Tensor,
        key: Tensor,
        bounds: tuple[Tensor | None, Tensor | None],
        longest: tuple[int, int],
        is_causal: bool,
        window: tuple[int | None, int | None],
        scale: float | None,
        alibi_slopes: Tensor | None = None,
        seqused_k: Tensor | None = None,
    ) -> _Sequences:
        cu_seqlens_q, cu_seqlens_k = bounds
        if cu_seqlens_q is None or cu_seqlens_k is None:
            raise NotImplementedError(
                "longspan: varlen_attn without cu_seq_q or cu_seq_k, expected both: sequences side by side "
                "in tensors of shape (tokens, head, dim)"
            )
        for name, cu_seqlens, most in zip(("q", "k"), bounds, longest):
            length = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
            if length > most:
                raise ValueError(f"longspan: max_{name} is {most}, but a sequence has {length} tokens")
        if seqused_k is not None:
            cu_seqlens_q, cu_seqlens_k = _used(cu_seqlens_q, cu_seqlens_k, seqused_k)
        if alibi_slopes is not None and alibi_slopes.shape != query.shape[1:2]:
            raise NotImplementedError(
                f"longspan: alibi_slopes has shape {tuple(alibi_slopes.shape)}, expected ({query.shape[1]},): "
                "slopes that are the same for all sequences"
            )
        left, right = (-1 if side is None else side for side in window)
        return _Sequences(
            within_window(is_causal, (left, right)),
            Scores(scale, alibi_slopes=alibi_slopes),
            Places(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k),
        )


def _used(bounds_q: Tensor, bounds_k: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences of the keys that are used, each followed by one of those that aren't, which has no queries."""
    if used.shape != (len(bounds_k) - 1,) or bool((used > bounds_k.diff()).any()) or bool((used < 0).any()):
        raise ValueError(
            f"longspan: seqused_k is {used.tolist()}, expected a number of keys for each of {len(bounds_k) - 1} "
            "sequences, 0 to their length"
        )
    ends_k = torch.stack([bounds_k[:-1] + used, bounds_k[1:]], 1).flatten()
    ends_q = bounds_q[1:].repeat_interleave(2)
    return torch.cat([bounds_q[:1], ends_q]), torch.cat([bounds_k[:1], ends_k.to(bounds_k.dtype)])


def _refuse(**arguments: Any) -> None:
    """Refuses what differs from its default, which is 0, false or None."""
    for name, value in arguments.items():
        if value:
            raise NotImplementedError(
                f"longspan: {name} is given to flash attention on the CPU, expected none: "
                + _WITHOUT.get(name, "leave it out")
            )


_WITHOUT = {
    "dropout_p": "torch.nn.functional.scaled_dot_product_attention has dropout, one sequence at a time",
    "block_table": "gather the pages of each sequence and give cu_seq_k",
    "num_splits": "Longspan chooses how keys are split over threads",
}


def _heads_first(x: Tensor) -> Tensor:
    """``(token, head, dim)`` as ``(1, head, token, dim)``."""
    return x.transpose(0, 1)[None]


def _tokens_first(x: Tensor, like: Tensor) -> Tensor:
    """``(1, head, token, dim)`` as ``(token, head, dim)`` with the strides of a tensor as ``like``."""
    x = x[0].transpose(0, 1)
    into = torch.empty_like(like)
    return x if x.stride() == into.stride() else into.copy_(x)


def varlen_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                   return_debug_mask, *, scale=None, window_size_left=None, window_size_right=None,
                   seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None):
    """``aten::_flash_attention_forward`` on the CPU."""
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask, num_splits=num_splits)
    _refuse(block_table=block_table is not None)
    for name, x in (("alibi_slopes", alibi_slopes), ("seqused_k", seqused_k)):
        if x is not None and torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            raise NotImplementedError(
                f"longspan: {name} with gradients, which aten's backward pass does not know of: "
                "longspan.torch.flash_attention has them"
            )
    sequences = _Sequences.read(
        query, key, (cum_seq_q, cum_seq_k), (max_q, max_k), is_causal,
        (window_size_left, window_size_right), scale, alibi_slopes, seqused_k,
    )
    q, k, v = map(_heads_first, (query, key, value))
    found = _run.forward(_run.empty_output(q, v), q, k, v, sequences.pattern, sequences.scores, sequences.places)
    _count(True)
    shape = (*query.shape[:2], value.shape[2])
    out = _tokens_first(found.out, query if query.shape == shape else dense_like(query, shape))
    seed, nothing = query.new_zeros((2,), dtype=torch.uint64), query.new_empty((0,))
    return out, found.lse[0], seed, seed.new_zeros(()), nothing


def varlen_forward_into(out, *arguments, **options):
    """``aten::_flash_attention_forward_no_dropout_inplace`` on the CPU."""
    result, lse, *_ = varlen_forward(*arguments, **options)
    out.copy_(result)
    return lse


def varlen_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                    is_causal, rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None):
    """``aten::_flash_attention_backward`` on the CPU."""
    _refuse(dropout_p=dropout_p)
    sequences = _Sequences.read(
        query, key, (cum_seq_q, cum_seq_k), (max_q, max_k), is_causal,
        (window_size_left, window_size_right), scale,
    )
    lse = logsumexp[None]
    found = Found(_heads_first(out), lse, torch.zeros_like(lse))
    gradients = _run.backward(
        *map(_heads_first, (query, key, value)), found, _heads_first(grad_out), None,
        sequences.pattern, sequences.scores, sequences.places,
    )
    _count(True)
    return tuple(map(_tokens_first, gradients[:3], (query, key, value)))
