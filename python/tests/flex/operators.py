"""FlexAttention's operators, compiled as an engine has to compile them, for tests of the harness itself.

Dynamo takes seven arguments of the forward operator and fourteen of the backward one; numbers of a mask
are tensors that its function closes over. The log-sum-exp of the operators is to base 2.
"""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple

import torch

LN2 = math.log(2)
FORWARD = torch.ops.higher_order.flex_attention
BACKWARD = torch.ops.higher_order.flex_attention_backward

#: What FlexAttention's front end passes for a call that needs gradients and a log-sum-exp.
OPTIONS = {
    "BACKEND": "TRITON",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}
TILES = ("fwd_BLOCK_M", "fwd_BLOCK_N", "bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2")
#: The default tiles of f32 backward passes are 16: a minute in the interpreter.
OPTIONS_64 = {**OPTIONS, **dict.fromkeys(TILES, 64)}

#: ``(q_idx, kv_idx, *numbers) -> bool``.
Mask = Callable[..., torch.Tensor]


class Blocks(NamedTuple):
    """Block lists as ``BlockMask.as_tuple`` has them, and the length of a block."""

    lists: tuple[torch.Tensor | None, ...]
    block: int


def keep(score, batch, head, query, key):
    return score


class Operators:
    """Both passes over natural log-sum-exps."""

    def __init__(self, mask: Mask, backend: Any, dynamic: bool = False, options: dict = OPTIONS_64):
        def block_mask(q, k, blocks, numbers):
            predicate = lambda b, h, i, j: mask(i, j, *numbers)
            return (q.shape[2], k.shape[2], *blocks.lists, blocks.block, blocks.block, predicate)

        def forward(q, k, v, blocks, numbers, scale):
            return FORWARD(q, k, v, keep, block_mask(q, k, blocks, numbers), scale, options)[:2]

        def backward(q, k, v, out, lse, dout, dlse, blocks, numbers, scale):
            mask = block_mask(q, k, blocks, numbers)
            return BACKWARD(
                q, k, v, out, lse, dout, dlse, keep, None, mask, scale, options, (), ()
            )[:3]

        compiled = lambda function: torch.compile(
            function, backend=backend, fullgraph=True, dynamic=dynamic
        )
        self._forward, self._backward = compiled(forward), compiled(backward)

    def forward(self, q, k, v, blocks: Blocks, numbers=()):
        out, lse = self._forward(q, k, v, blocks, numbers, q.shape[3] ** -0.5)
        return out, lse * LN2

    def backward(self, q, k, v, out, lse, dout, dlse, blocks: Blocks, numbers=()):
        scale = q.shape[3] ** -0.5
        return self._backward(q, k, v, out, lse / LN2, dout, dlse * LN2, blocks, numbers, scale)
