"""Torch's own dense attention in f64 with a materialised mask, and the comparison with it.

How exact a result has to be is the rule of ``oracle``: 12 times what rounding the truth to f32
costs, and for half types the roundings on the way. Truth is torch's, gradients by its autograd; the
sizes of terms, which the rule needs, are the oracle's.
"""

from __future__ import annotations

import numpy
import oracle
import torch
import torch.nn.functional as F

#: Patterns of every kind beside the predicate they stand for, read from its definition.
RULES = {
    "full": lambda q, k: True,
    "causal": lambda q, k: k <= q,
    "window(20, 3)": lambda q, k: q - 20 <= k <= q + 3,
    "causal & (sliding_window(17) | sinks(5))": lambda q, k: k <= q and (q - k <= 16 or 0 <= k < 5),
    "global_tokens(3) | window(7, 7)": lambda q, k: 0 <= q < 3 or 0 <= k < 3 or abs(q - k) <= 7,
    "!strided(3)": lambda q, k: (q - k) % 3 != 0,
    "dilated(40, 4, 1)": lambda q, k: min(q, k) >= 0
    and q // 40 == k // 40
    and (q % 40) % 4 == 1 == (k % 40) % 4,
    "hierarchical([(8, 1, 1), (64, 4, 2)])": lambda q, k: abs(q - k) <= 8
    or (abs(q - k) <= 64 and (k // 2) % 4 == 0),
    "blocks_dilated(16, [2])": lambda q, k: min(q, k) >= 0 and abs(q // 16 - k // 16) in (0, 2),
    "butterfly(16)": lambda q, k: min(q, k) >= 0 and (q // 16 ^ k // 16).bit_count() <= 1,
}

#: batch, query heads, key heads, queries, keys, dim of keys, dim of values: primes, grouped heads,
#: fewer queries than keys, more queries than keys (which leaves rows empty), a single token.
SIZES = [
    (2, 6, 2, 97, 97, 13, 7),
    (1, 4, 1, 31, 131, 32, 32),
    (1, 2, 2, 151, 67, 8, 24),
    (1, 1, 1, 1, 1, 1, 1),
]


def tensors(rng, size, dtype=torch.float32):
    """Queries, keys, values and a gradient of the output."""
    batch, heads, key_heads, queries, keys, dim, value_dim = size
    shapes = [
        (batch, heads, queries, dim),
        (batch, key_heads, keys, dim),
        (batch, key_heads, keys, value_dim),
        (batch, heads, queries, value_dim),
    ]
    made = [torch.from_numpy(rng.standard_normal(shape, dtype="float32")) for shape in shapes]
    q, k, v, dout = (x.to(dtype) for x in made)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def array(x):
    return x.detach().double().numpy()


def truth(q, k, v, mask, dout, dlse=None, scale=None, score=None):
    """Results in f64, and the sizes of their terms."""
    _, gross = oracle.attention(array(q), array(k), array(v), mask, array(dout),
                                None if dlse is None else array(dlse), scale, score and score.numpy)
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    share = q.shape[1] // k.shape[1]
    queries, keys, values = inputs[0], *(x.repeat_interleave(share, 1) for x in inputs[1:])
    mask = torch.from_numpy(numpy.ascontiguousarray(mask))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = scale * (queries @ keys.mT)
    if score is not None:
        scores = score.torch(scores)
    lse = scores.masked_fill(~mask, -torch.inf).logsumexp(-1)
    if score is None:
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    else:
        p = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        out = p.nan_to_num(0.0) @ values
    # Rows that see nothing have no gradient; torch's own are NaN there in places.
    live = mask.any(-1)
    loss = (out * dout.double()).masked_fill(~live[..., None], 0).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(~live, 0) * dlse.double()).sum()
    gradients = torch.autograd.grad(loss, inputs)
    out = out.masked_fill(~live[..., None], 0)
    return oracle.Truth(*(x.detach().numpy() for x in (out, lse, *gradients))), gross


def check(got, expected, dtype=torch.float32):
    """``got`` by name: out, lse, dq, dk, dv; those that are there."""
    true, gross = expected
    for name, value in got.items():
        oracle.check(name, array(value), true, gross, str(dtype)[6:])
