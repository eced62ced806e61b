"""Neighborhoods of a grid against dense attention per active pair, and against SDPA with a mask. Prints ratios.

    python benches/neighborhood.py

The share is (dense time / dense pairs) / (time / active pairs), f32, head dim 64, forward and backward,
the order of tiles made beforehand (`tiled`) and inside of the call (`call`). All sides interleaved, best
rounds; run it on a quiet machine.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

from longspan.torch import attention, neighborhood_attention
from longspan.torch._neighborhood import _TILES, _tiled

HEADS, DIM, ROUNDS = 2, 64, 5
DENSE = 8192
GRIDS = [((256, 256), (6, 6)), ((32, 32, 32), (3, 3, 3)), ((64, 64), (6, 6))]


def best(functions) -> list[float]:
    """Seconds that a call of each takes, at its best."""
    times = [float("inf")] * len(functions)
    for _ in range(ROUNDS):
        for index, function in enumerate(functions):
            start = time.perf_counter()
            function()
            times[index] = min(times[index], time.perf_counter() - start)
    return times


def tensors(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(1, HEADS, tokens, DIM, generator=generator, requires_grad=True) for _ in range(3)]


def passes(function, x: list[torch.Tensor]):
    """The forward pass, and both."""

    def forward():
        with torch.no_grad():
            return function(*x)

    def both():
        return torch.autograd.grad(function(*x).sum(), x)

    return [forward, both]


def main() -> None:
    dense = passes(lambda q, k, v: attention(q, k, v, "full"), tensors(DENSE))
    for sizes, radii in GRIDS:
        tokens = torch.Size(sizes).numel()
        start = time.perf_counter()
        layout, order, _ = _tiled(sizes, radii, _TILES[len(sizes)])
        built = time.perf_counter() - start
        x = tensors(tokens)
        moved = [y.detach()[:, :, order].requires_grad_() for y in x]
        functions = dense + passes(lambda q, k, v: attention(q, k, v, layout), moved)
        functions += passes(lambda q, k, v: neighborhood_attention(q, k, v, sizes, radii), x)
        if tokens <= 4096:
            axes = torch.stack(torch.meshgrid(*map(torch.arange, sizes), indexing="ij")).flatten(1)
            near = (axes[:, :, None] - axes[:, None]).abs() <= torch.tensor(radii)[:, None, None]
            mask = near.all(0)
            assert int(mask.sum()) == layout.active_pairs
            functions += passes(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), x)
        times = best(functions)
        blocks = layout.active_pairs / (layout.active_blocks * 64 * 64)
        name = " x ".join(map(str, sizes))
        print(f"{name}, radius {radii[0]}: {built:.2f} s to compile, blocks {blocks:.1%} full")
        for index, which in enumerate(("forward", "both passes")):
            per_pair = times[index] / DENSE**2
            shares = [per_pair * layout.active_pairs / times[index + 2 * side] for side in (1, 2)]
            line = f"  {which}: {shares[0]:.3f} of dense per active pair (tiled), {shares[1]:.3f} (call)"
            if len(times) > 6:
                line += f", {times[index + 6] / times[index + 4]:.1f} x as fast as SDPA with the mask (call)"
            print(line, flush=True)


if __name__ == "__main__":
    main()
