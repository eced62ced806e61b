"""The operators under ``torch.func``: ``grad``, ``vjp``, ``jacrev`` and ``vmap``.

Torch's transforms of functions take neither operators with gradients of their own nor batches of
their calls. So there is a function of each pass here, with a rule for ``vmap``: batch entries of
different calls are batch entries of one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.torch import _op
from longspan.torch._run import Learned, Scores

#: Places whose first axis is that of batch entries.
_PER_ENTRY = ("key_padding", "global_tokens", "prefix")


class How(NamedTuple):
    """A call of an operator, but for its tensors."""

    operator: str
    constants: tuple[Any, ...]
    places: tuple[str, ...]
    """Which places the operator takes."""
    scores: Scores
    """Those that are numbers."""

    def scores_with(self, learned: Learned, seed: Tensor | None) -> Scores:
        return self.scores._replace(**learned._asdict(), dropout_seed=seed)


def is_transformed() -> bool:
    """Whether a transform of functions is at work."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is not None
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operator: str,
    constants: tuple[Any, ...],
    places: dict[str, Tensor | None],
    scores: Scores,
) -> tuple[Tensor, ...]:
    """An operator's results, whatever transforms are at work."""
    numbers = scores._replace(**Learned()._asdict(), dropout_seed=None)
    how = How(operator, constants, tuple(places), numbers)
    tensors = (*scores.learned, scores.dropout_seed, *places.values())
    return _Forward.apply(how, q, k, v, *tensors)


def _split(tensors: tuple[Tensor | None, ...]) -> tuple[Learned, Tensor | None, tuple[Any, ...]]:
    sinks, table, slopes, seed, *places = tensors
    return Learned(sinks, table, slopes), seed, tuple(places)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(how, q, k, v, *tensors):
        learned, seed, places = _split(tensors)
        operator = getattr(torch.ops.longspan, how.operator).default
        return operator(q, k, v, *how.constants, *places, *how.scores_with(learned, seed))

    @staticmethod
    def setup_context(ctx, inputs, output):
        how, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.how = how
        ctx.wanted = list(ctx.needs_input_grad[4:7])
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse, _):
        *tensors, out, lse, lse_lo = ctx.saved_tensors
        others = (None,) * (len(tensors) - 6)
        if dout is None and dlse is None:
            return (None,) * 7 + others
        q, k, v, *rest = tensors
        found = (out, lse, lse_lo, dout, dlse)
        gradients = _Backward.apply(ctx.how, ctx.wanted, q, k, v, *found, *rest)
        wanted = (True, True, True, *ctx.wanted)
        return None, *(x if want else None for x, want in zip(gradients, wanted)), *others

    @staticmethod
    def vmap(info, in_dims, how, q, k, v, *tensors):
        fold = _Fold(info.batch_size, q.ndim - (in_dims[1] is not None), how)
        qkv = [fold.entries(x, dim) for x, dim in zip((q, k, v), in_dims[1:4])]
        found = _Forward.apply(how, *qkv, *fold.others(tensors, in_dims[4:]))
        return fold.apart(found)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(how, wanted, q, k, v, out, lse, lse_lo, dout, dlse, *tensors):
        learned, seed, places = _split(tensors)
        operator = getattr(torch.ops.longspan, f"{how.operator}_backward").default
        found = (out, lse, lse_lo, dout, dlse)
        scores = how.scores_with(learned, seed)
        return operator(q, k, v, *found, wanted, *how.constants, *places, *scores)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(_op.no_second_derivative)

    @staticmethod
    def vmap(info, in_dims, how, wanted, q, k, v, *tensors):
        fold = _Fold(info.batch_size, 4, how)
        qkv = [fold.entries(x, dim) for x, dim in zip((q, k, v), in_dims[2:5])]
        found = [fold.entries(x, dim) for x, dim in zip(tensors[:5], in_dims[5:10])]
        if any(wanted):
            raise NotImplementedError(
                "vmap over gradients of sink logits, bias tables or slopes: they are sums over all "
                "batch entries; call torch.func.grad once per sample"
            )
        others = fold.others(tensors[5:], in_dims[10:])
        dq, dk, dv, *rest = _Backward.apply(how, wanted, *qkv, *found, *others)
        tensors, dims = fold.apart((dq, dk, dv))
        return (*tensors, *rest), (*dims, *(None for _ in rest))


class _Fold:
    """Batches of calls as batch entries of one."""

    def __init__(self, batch_size: int, axes: int, how: How):
        if axes != 4:
            raise ValueError(f"q has {axes} axes inside vmap, expected 4: (batch, head, token, dim)")
        self.batch_size, self.how = batch_size, how

    def entries(self, x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None:
            return None
        if dim is None:
            x = x.unsqueeze(0).expand(self.batch_size, *x.shape)
        return x.movedim(dim or 0, 0).flatten(0, 1)

    def others(self, tensors: tuple[Any, ...], dims: tuple[int | None, ...]) -> list[Tensor | None]:
        names = (*Learned._fields, "dropout_seed", *self.how.places)
        folded = []
        for name, x, dim in zip(names, tensors, dims):
            if name in _PER_ENTRY:
                x = self.entries(x, dim)
            elif x is not None and dim is not None:
                raise NotImplementedError(
                    f"vmap over {name}, expected it the same for all samples: vmap over q, k, v, "
                    "key_padding, global_tokens and prefix, and loop over the others"
                )
            folded.append(x)
        return folded

    def apart(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        unfolded = tuple(x.unflatten(0, (self.batch_size, -1)) for x in tensors)
        return unfolded, (0,) * len(unfolded)
