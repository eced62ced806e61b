"""A causal window with sinks, forward and backward, on torch tensors."""

import json

import longspan
import longspan.torch
import torch

TOKENS = 301
HEAD_DIM = 16


def tensor(seed: int, heads: int) -> torch.Tensor:
    """The same numbers in every program of this folder."""
    i = torch.arange(heads * TOKENS * HEAD_DIM)
    values = (7 * i + 13 * seed) % 31 / 16 - 0.9375
    return values.float().view(1, heads, TOKENS, HEAD_DIM)


def squares(values: torch.Tensor) -> float:
    return float(values.detach().double().square().sum())


torch.set_num_threads(2)
pattern = longspan.Pattern("causal & (window(64, 0) | sinks(4))")
layout = pattern.compile(TOKENS)

q, k, v = (tensor(seed, heads).requires_grad_() for seed, heads in ((0, 4), (1, 2), (2, 2)))
out, lse = longspan.torch.attention(
    q, k, v, pattern, scale=0.3, softcap=5.0, enable_gqa=True, return_lse=True
)
dq, dk, dv = torch.autograd.grad(out, (q, k, v), tensor(3, 4))

results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
sums = {name: squares(values) for name, values in results.items()}
print(json.dumps({"active_pairs": layout.active_pairs, **sums}))
