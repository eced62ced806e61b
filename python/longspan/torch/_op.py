"""The operators ``torch.ops.longspan.attention``, ``dilated_attention`` and their backward passes.

An operator takes tensors, numbers and text, never objects. The text of a pattern, and the branches
of dilated attention, are part of a compiled graph, so they stay the same from call to call; what
changes are tensors.

| registered | what for |
|---|---|
| CPU | the computation |
| fake | shapes and strides, for ``torch.compile`` and ``FakeTensor`` |
| autograd | gradients, also through the log-sum-exp; a second derivative is an error |

They are defined with a ``Library`` and not with ``torch.library.custom_op``, whose wrapper costs
several times what the dispatcher does: decoding a token takes tens of microseconds in all.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from longspan.torch import _run
from longspan.torch._run import Found, Places, Scores

_LIBRARY = torch.library.Library("longspan", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)


def _define(name: str, how: str, read: Callable[..., tuple[Any, Scores, Places]]) -> Any:
    """An operator and its backward pass. ``how`` are its arguments beside queries, keys and values;
    ``read`` puts them in the words of ``_run``. Sink logits, the last of them, are the only ones that
    have a gradient."""

    def forward(q, k, v, *how):
        return tuple(_run.forward(_run.empty_found(q, v), q, k, v, *read(*how)))

    def forward_fake(q, k, v, *how):
        return tuple(_run.empty_found(q, v))

    def backward(q, k, v, out, lse, rest, dout, dlse, *how):
        return _run.backward(q, k, v, Found(out, lse, rest), dout, dlse, *read(*how))

    def backward_fake(q, k, v, out, lse, rest, dout, dlse, *how):
        return (*(_run.empty(x, x.shape) for x in (q, k, v)), _run.empty_sinks(q, how[-1]))

    def save(ctx, inputs, output):
        q, k, v, *how = inputs
        # Those that are tensors are watched for changes; the others are kept as they are.
        ctx.save_for_backward(q, k, v, *output, *(x for x in how if isinstance(x, Tensor)))
        ctx.how = [None if isinstance(x, Tensor) else (x,) for x in how]
        ctx.mark_non_differentiable(output[2])
        # A gradient that doesn't exist is None then, and not zeros to be read.
        ctx.set_materialize_grads(False)

    def gradients(ctx, dout, dlse, _):
        nothing = (None,) * len(ctx.how)
        if dout is None and dlse is None:
            return (None, None, None, *nothing)
        q, k, v, out, lse, rest, *tensors = ctx.saved_tensors
        tensors = iter(tensors)
        how = [next(tensors) if x is None else x[0] for x in ctx.how]
        operator = getattr(torch.ops.longspan, f"{name}_backward")
        dq, dk, dv, dsink_logits = operator(q, k, v, out, lse, rest, dout, dlse, *how)
        return (dq, dk, dv, *nothing[:-1], None if how[-1] is None else dsink_logits)

    _LIBRARY.define(
        f"{name}(Tensor q, Tensor k, Tensor v, {how})"
        " -> (Tensor out, Tensor lse, Tensor lse_lo)",
        tags=_TAGS,
    )
    _LIBRARY.define(
        f"{name}_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor lse_lo, "
        f"Tensor? dout, Tensor? dlse, {how}) "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink_logits)",
        tags=_TAGS,
    )
    _LIBRARY.impl(name, forward, "CPU")
    _LIBRARY.impl(f"{name}_backward", backward, "CPU")
    register_fake, register_autograd = torch.library.register_fake, torch.library.register_autograd
    register_fake(f"longspan::{name}", forward_fake, lib=_LIBRARY)
    register_fake(f"longspan::{name}_backward", backward_fake, lib=_LIBRARY)
    register_autograd(f"longspan::{name}", gradients, setup_context=save, lib=_LIBRARY)
    register_autograd(f"longspan::{name}_backward", no_second_derivative, lib=_LIBRARY)
    return getattr(torch.ops.longspan, name).default


def no_second_derivative(ctx, *_: Tensor):
    """The backward pass of backward passes."""
    raise RuntimeError(
        "longspan.torch.attention has no second derivative: leave out create_graph=True, or use "
        "torch's scaled_dot_product_attention with its math backend where one is needed"
    )


attention = _define(
    "attention",
    "str pattern, float? scale, float? softcap, Tensor? key_padding, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? query_offset, Tensor? key_offset, Tensor? sink_logits",
    lambda pattern, scale, softcap, *places_and_sinks: (
        pattern,
        Scores(scale, softcap, places_and_sinks[-1]),
        Places(*places_and_sinks[:-1]),
    ),
)

dilated_attention = _define(
    "dilated_attention",
    "int[] segment_lengths, int[] dilation_rates, str within, str? also, str overlap, "
    "float? scale, float? softcap, Tensor? query_offset, Tensor? sink_logits",
    lambda segments, rates, within, also, overlap, scale, softcap, query_offset, sink_logits: (
        _run.dilated(tuple(segments), tuple(rates), within, also, overlap),
        Scores(scale, softcap, sink_logits),
        Places(query_offset=query_offset),
    ),
)
