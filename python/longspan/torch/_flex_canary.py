"""One small problem by an engine and by dense attention: whether torch's operators mean what ``_flex`` takes them to
mean (a log-sum-exp to base 2, gradients from final statistics, block lists that are read)."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.torch._device_engine import DeviceEngine
from longspan.torch._run import Places, Scores


def errors(engine: DeviceEngine, device: torch.device) -> dict[str, float]:
    """The largest error of each result, relative to its largest element."""
    queries, keys, dim, left = 200, 300, 32, 150
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    q, k, v = normal(1, 4, queries, dim), normal(1, 2, keys, dim), normal(1, 2, keys, dim)
    dout, dlse = normal(1, 4, queries, dim), normal(1, 4, queries)
    pattern, scores, places = f"window({left}, 0)", Scores(), Places()
    found = engine.forward(q, k, v, pattern, scores, places, saves=True)
    own = engine.backward(q, k, v, found, dout, dlse, pattern, scores, places)[:3]

    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    query, key, value = inputs[0], *(x.repeat_interleave(2, 1) for x in inputs[1:])
    distance = torch.arange(queries, device=device)[:, None] + keys - queries
    distance = distance - torch.arange(keys, device=device)
    hidden = (distance < 0) | (distance > left)
    score = (query @ key.mT * dim**-0.5).masked_fill(hidden, -torch.inf)
    lse = score.logsumexp(-1)
    out = torch.exp(score - lse[..., None]) @ value
    dense = torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), inputs)
    names = ("out", "lse", "dq", "dk", "dv")
    pairs = zip(names, (found.out, found.lse, *own), (out, lse, *dense))
    return {name: ((a - b).abs().max() / b.abs().max()).item() for name, a, b in pairs}
