"""Hosts that compute attention by Longspan, beside what they compute by themselves: interleaved, the best of several.

    python benches/hosts.py torch   beside torch 2.15: SDPA's registry, masks, FlexAttention's BlockMask
    python benches/hosts.py jax     beside JAX

Prints a table. Ratios above 1 are Longspan's gain. 8 heads, 4,096 tokens, d 64, two threads, unless it says so.
"""

import argparse
import statistics
import time

import numpy

TOKENS, HEADS, DIM, THREADS = 4096, 8, 64, 2


def measured(calls, rounds):
    """The best time of each of several functions, twice each in every round: after JAX's own attention its half a
    gigabyte of scores is still being freed, which slows the next call down."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(2):
                start = time.perf_counter()
                call()
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def row(name, stock, own):
    print(f"| {name} | {1e3 * stock:.1f} | {1e3 * own:.1f} | {stock / own:.2f} |", flush=True)


def heading(title):
    print(f"\n{title}\n\n| | stock, ms | Longspan, ms | ratio |\n|---|---|---|---|")


def of_torch(rounds):
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    import longspan
    import longspan.torch
    from longspan.torch._block_mask_layouts import _LAYOUTS, layout_of

    torch.set_num_threads(THREADS)

    def active(call):
        def run():
            activate_flash_attention_impl("longspan")
            try:
                call()
            finally:
                restore_flash_attention_impl()

        return run

    def tensors(dtype, tokens=TOKENS):
        return [torch.randn(1, HEADS, tokens, DIM, dtype=dtype, requires_grad=True) for _ in range(3)]

    def passes(attend, *inputs):
        def forward():
            with torch.no_grad():
                attend(*inputs)

        return forward, lambda: attend(*inputs).sum().backward()

    heading(f"torch {torch.__version__}, `scaled_dot_product_attention` through the registry")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        calls = passes(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *tensors(dtype))
        for name, call in zip(("forward", "forward + backward"), calls):
            best = measured({"stock": call, "own": active(call)}, rounds)
            row(f"causal, {str(dtype)[6:]}, {name}", best["stock"], best["own"])
    window = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(-511)
    random = torch.rand(TOKENS, TOKENS) < 0.7
    for title, mask in (("window 512 as a boolean mask", window), ("70 % of pairs, scattered", random)):
        calls = passes(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), *tensors(torch.float32))
        for name, call in zip(("forward", "forward + backward"), calls):
            best = measured({"stock": call, "own": active(call)}, rounds)
            row(f"{title}, float32, {name}", best["stock"], best["own"])
    for tokens in (32, 128, 256, 512):
        q, k, v = (x.detach() for x in tensors(torch.float32, tokens))
        own_mask = window[:tokens, :tokens].clone()
        many = range(200)
        for name, call in (
            ("causal", lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
            ("a boolean mask", lambda: F.scaled_dot_product_attention(q, k, v, own_mask)),
        ):
            repeated = lambda: [call() for _ in many]
            best = measured({"stock": repeated, "own": active(repeated)}, rounds)
            row(f"{name}, {tokens} tokens, forward", best["stock"] / len(many), best["own"] / len(many))

    print("\nA `BlockMask` as a layout, the first time\n\n| | median, ms |\n|---|---|")
    tokens = 65_536

    def mask_mod(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (q_idx - kv_idx <= 1024)

    made = longspan.Pattern("causal & window(1024, 0)").to_block_mask(tokens, width="longest")
    lists = {name: getattr(made, name) for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")}
    mask = BlockMask((tokens, tokens), *lists.values(), None, None, None, None, mask_mod=mask_mod)
    times = []
    for _ in range(2 * rounds + 1):
        _LAYOUTS.clear()
        start = time.perf_counter()
        layout_of(mask, (1, HEADS), (tokens, tokens))
        times.append(time.perf_counter() - start)
    print(f"| window 1,024 over {tokens:,} tokens | {1e3 * statistics.median(times):.0f} |")
    start = time.perf_counter()
    create_block_mask(mask_mod, None, None, 16_384, 16_384, device="cpu")
    print(f"| beside it: torch's `create_block_mask` over 16,384 tokens | {1e3 * (time.perf_counter() - start):.0f} |")


def of_jax(rounds):
    import jax
    import jax.numpy as jnp

    import longspan.jax

    q = jnp.asarray(numpy.random.default_rng(0).standard_normal((1, TOKENS, HEADS, DIM), dtype="float32"))
    heading(f"JAX {jax.__version__}, `dot_product_attention`, float32")
    for title, options in (("causal", {}), ("window 512", {"local_window_size": (512, 0)})):
        for name, wrap in (("forward", lambda f: f), ("forward + backward", lambda f: jax.grad(lambda q: f(q).sum()))):
            calls = {}
            for label, function in (("stock", jax.nn.dot_product_attention), ("own", longspan.jax.dot_product_attention)):
                compiled = jax.jit(wrap(lambda q, f=function: f(q, q, q, is_causal=True, **options)))
                compiled(q).block_until_ready()
                calls[label] = lambda compiled=compiled: compiled(q).block_until_ready()
            best = measured(calls, rounds)
            row(f"{title}, {name}", best["stock"], best["own"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host", choices=["torch", "jax"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    (of_torch if arguments.host == "torch" else of_jax)(arguments.rounds)
