"""What a call from torch costs beside what it computes. Prints ratios; run it on a quiet machine.

    python python/benches/torch_calls.py

*Decoding*: one query over 4,096 keys against torch's own attention, at most 1.5 times as long.
*Hand-over*: a product, attention, a product, against the three apart; at most 10 % is lost where
torch's threads and Longspan's take turns. All sides interleaved, best rounds.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

from longspan.torch import attention

ROUNDS = 15


def best(*functions, seconds: float = 0.02) -> list[float]:
    """Seconds that a call of each takes."""
    counts = []
    for function in functions:
        function()
        start = time.perf_counter()
        function()
        counts.append(max(1, int(seconds / (time.perf_counter() - start))))
    times = [float("inf")] * len(functions)
    for _ in range(ROUNDS):
        for index, (function, count) in enumerate(zip(functions, counts)):
            start = time.perf_counter()
            for _ in range(count):
                function()
            times[index] = min(times[index], (time.perf_counter() - start) / count)
    return times


@torch.no_grad()
def decoding(heads: int, key_heads: int, dim: int, dtype: torch.dtype) -> None:
    q = torch.randn(1, heads, 1, dim, dtype=dtype)
    k, v = (torch.randn(1, key_heads, 4096, dim, dtype=dtype) for _ in range(2))
    ours, theirs = best(
        lambda: attention(q, k, v, "causal", enable_gqa=True),
        lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    )
    print(
        f"decoding, {heads} / {key_heads} heads of {dim}, {str(dtype)[6:]}: {ours * 1e6:.0f} µs, "
        f"torch {theirs * 1e6:.0f} µs, ratio {ours / theirs:.2f}"
    )


@torch.no_grad()
def hand_over(tokens: int) -> None:
    a, q = torch.randn(tokens, 512), torch.randn(1, 8, tokens, 64)
    b = torch.randn(512, 512)

    def product():
        return a @ b

    def attend():
        return attention(q, q, q, "causal & window(256, 0)")

    def loop():
        product(), attend(), product()

    alone, attended, all_three = best(product, attend, loop)
    lost = all_three / (2 * alone + attended) - 1
    print(
        f"hand-over, {tokens} tokens: product {alone * 1e3:.3f} ms, attention {attended * 1e3:.3f} ms, "
        f"loop {all_three * 1e3:.3f} ms, {100 * lost:.0f} % lost"
    )


def main() -> None:
    for threads in (1, torch.get_num_threads()):
        torch.set_num_threads(threads)
        print(f"{threads} threads")
        for heads, key_heads, dim in ((1, 1, 64), (8, 8, 64), (32, 8, 128)):
            for dtype in (torch.float32, torch.bfloat16):
                decoding(heads, key_heads, dim, dtype)
        for tokens in (512, 2_048, 8_192):
            hand_over(tokens)


if __name__ == "__main__":
    main()
