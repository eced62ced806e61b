"""The operators ``torch.ops.longspan.attention``, ``dilated_attention`` and their backward passes.

An operator takes tensors, numbers and text, never objects. The text of a pattern, and the branches
of dilated attention, are part of a compiled graph, so they stay the same from call to call; what
changes are tensors.

| registered | what for |
|---|---|
| CPU, CUDA | the computation, by the engine of the device |
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
from longspan.torch._engine import engine_of
from longspan.torch._run import Found, Places, Scores

_LIBRARY = torch.library.Library("longspan", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)


#: The last arguments of every operator: what is done to scores and probabilities.
_SCORES = (
    "float? scale, float? softcap, Tensor? sink_logits, Tensor? bias_table, Tensor? alibi_slopes, "
    "int bias_right, float? dropout_p, Tensor? dropout_seed"
)


def define(name: str, how: str, read: Callable[..., tuple[Any, Places]]) -> Any:
    """An operator and its backward pass. ``how`` are its arguments between queries, keys and values
    and those of ``_SCORES``; ``read`` puts them in the words of ``_run``."""
    count = len(Scores._fields)

    def split(how):
        pattern, places = read(*how[:-count])
        return pattern, Scores(*how[-count:]), places

    def forward(q, k, v, *how):
        return tuple(engine_of(q.device).forward(q, k, v, *split(how), saves=True))

    def forward_fake(q, k, v, *how):
        return tuple(engine_of(q.device).empty(q, v, saves=True))

    def backward(q, k, v, out, lse, rest, dout, dlse, wanted, *how):
        found, engine = Found(out, lse, rest), engine_of(q.device)
        return engine.backward(q, k, v, found, dout, dlse, *split(how), wanted)

    def backward_fake(q, k, v, out, lse, rest, dout, dlse, wanted, *how):
        learned = Scores(*how[-count:]).learned
        tensors = map(engine_of(q.device).empty_gradient, (q, k, v))
        return (*tensors, *_run.empty_learned(learned, wanted, q.device))

    def save(ctx, inputs, output):
        q, k, v, *how = inputs
        # Those that are tensors are watched for changes; the others are kept as they are.
        ctx.save_for_backward(q, k, v, *output, *(x for x in how if isinstance(x, Tensor)))
        ctx.how = [None if isinstance(x, Tensor) else (x,) for x in how]
        first = 3 + len(how) - count + Scores._fields.index("sink_logits")
        ctx.wanted = list(ctx.needs_input_grad[first : first + 3])
        ctx.mark_non_differentiable(output[2])
        # A gradient that doesn't exist is None then, and not zeros to be read.
        ctx.set_materialize_grads(False)

    def gradients(ctx, dout, dlse, _):
        nothing = [None] * len(ctx.how)
        if dout is None and dlse is None:
            return (None, None, None, *nothing)
        q, k, v, out, lse, rest, *tensors = ctx.saved_tensors
        tensors = iter(tensors)
        how = [next(tensors) if x is None else x[0] for x in ctx.how]
        operator = getattr(torch.ops.longspan, f"{name}_backward")
        dq, dk, dv, *learned = operator(q, k, v, out, lse, rest, dout, dlse, ctx.wanted, *how)
        first = len(how) - count + Scores._fields.index("sink_logits")
        nothing[first : first + 3] = (
            x if want else None for x, want in zip(learned, ctx.wanted)
        )
        return (dq, dk, dv, *nothing)

    _LIBRARY.define(
        f"{name}(Tensor q, Tensor k, Tensor v, {how}, {_SCORES})"
        " -> (Tensor out, Tensor lse, Tensor lse_lo)",
        tags=_TAGS,
    )
    _LIBRARY.define(
        f"{name}_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor lse_lo, "
        f"Tensor? dout, Tensor? dlse, bool[] wanted, {how}, {_SCORES}) -> (Tensor dq, Tensor dk, "
        "Tensor dv, Tensor dsink_logits, Tensor dbias_table, Tensor dalibi_slopes)",
        tags=_TAGS,
    )
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, forward, key)
        _LIBRARY.impl(f"{name}_backward", backward, key)
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


attention = define(
    "attention",
    "str pattern, Tensor? key_padding, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? query_offset, Tensor? key_offset, Tensor? global_tokens, Tensor? prefix",
    lambda pattern, *places: (pattern, Places(*places)),
)

dilated_attention = define(
    "dilated_attention",
    "int[] segment_lengths, int[] dilation_rates, str within, str? also, str overlap, "
    "Tensor? key_padding, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? query_offset",
    lambda segments, rates, within, also, overlap, *places: (
        _run.dilated(tuple(segments), tuple(rates), within, also, overlap),
        Places(*places),
    ),
)
