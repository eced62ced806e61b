"""The operators ``torch.ops.longspan.attention`` and its backward pass.

An operator takes tensors, numbers and text, never objects. The text of a pattern is part of a
compiled graph, so it stays the same from call to call; what changes are tensors.

| registered | what for |
|---|---|
| CPU | the computation |
| fake | shapes and strides, for ``torch.compile`` and ``FakeTensor`` |
| autograd | gradients, also through the log-sum-exp; a second derivative is an error |

They are defined with a ``Library`` and not with ``torch.library.custom_op``, whose wrapper costs
several times what the dispatcher does: decoding a token takes tens of microseconds in all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.torch import _run
from longspan.torch._run import Found, Places, Scores

_LIBRARY = torch.library.Library("longspan", "DEF")

_PLACES = (
    "Tensor? key_padding, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? query_offset, "
    "Tensor? key_offset"
)
_TAGS = (torch.Tag.pt2_compliant_tag,)
_LIBRARY.define(
    f"attention(Tensor q, Tensor k, Tensor v, str pattern, float? scale, float? softcap, {_PLACES})"
    " -> (Tensor out, Tensor lse, Tensor lse_rest)",
    tags=_TAGS,
)
_LIBRARY.define(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor lse_rest, "
    f"Tensor? dout, Tensor? dlse, str pattern, float? scale, float? softcap, {_PLACES})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=_TAGS,
)


def _forward(q, k, v, pattern, scale, softcap, *places):
    found, scores = _run.empty_found(q, v), Scores(scale, softcap)
    return tuple(_run.forward(found, q, k, v, pattern, scores, Places(*places)))


def _forward_fake(q, k, v, pattern, scale, softcap, *places):
    return tuple(_run.empty_found(q, v))


def _backward(q, k, v, out, lse, rest, dout, dlse, pattern, scale, softcap, *places):
    found, scores = Found(out, lse, rest), Scores(scale, softcap)
    return _run.backward(q, k, v, found, dout, dlse, pattern, scores, Places(*places))


def _backward_fake(q, k, v, out, lse, rest, dout, dlse, pattern, scale, softcap, *places):
    return tuple(_run.empty(x, x.shape) for x in (q, k, v))


def _save(ctx, inputs, output):
    q, k, v, pattern, scale, softcap, *places = inputs
    ctx.save_for_backward(q, k, v, *output, *places)
    ctx.how = pattern, scale, softcap
    ctx.mark_non_differentiable(output[2])
    # A gradient that nobody has is None then, and not zeros to be read.
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse, _):
    q, k, v, out, lse, rest, *places = ctx.saved_tensors
    nothing = (None,) * (3 + len(places))
    if dout is None and dlse is None:
        return (None, None, None, *nothing)
    gradients = torch.ops.longspan.attention_backward(
        q, k, v, out, lse, rest, dout, dlse, *ctx.how, *places
    )
    return (*gradients, *nothing)


def no_second_derivative(ctx, *_: Tensor):
    """The backward pass of backward passes."""
    raise RuntimeError(
        "longspan.torch.attention has no second derivative: leave out create_graph=True, or use "
        "torch's scaled_dot_product_attention with its math backend where one is needed"
    )


_LIBRARY.impl("attention", _forward, "CPU")
_LIBRARY.impl("attention_backward", _backward, "CPU")
torch.library.register_fake("longspan::attention", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("longspan::attention_backward", _backward_fake, lib=_LIBRARY)
torch.library.register_autograd(
    "longspan::attention", _gradients, setup_context=_save, lib=_LIBRARY
)
torch.library.register_autograd(
    "longspan::attention_backward", no_second_derivative, lib=_LIBRARY
)

attention = torch.ops.longspan.attention.default
