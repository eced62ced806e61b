"""Patterns whose cost is measured: every primitive, and ten from papers, as text for a length."""

import math


def documents(tokens):
    """Lengths between 500 and 2,500, the same for every run."""
    lengths, state = [], 1
    while tokens:
        state = (state * 747_796_405 + 2_891_336_453) % 2**32
        lengths.append(min(tokens, 500 + (state >> 8) % 2_000))
        tokens -= lengths[-1]
    return lengths


def grid(tokens):
    """Height and width of a grid of these cells."""
    height = 2 ** (int(math.log2(tokens)) // 2)
    return height, tokens // height


PRIMITIVES = {
    "full": lambda n: "full",
    "causal": lambda n: "causal",
    "window": lambda n: "window(256, 256)",
    "sliding_window": lambda n: "sliding_window(512)",
    "sinks": lambda n: "sinks(64)",
    "global_tokens": lambda n: "global_tokens(64)",
    "keys": lambda n: f"keys({n // 4}, {n // 2})",
    "queries": lambda n: f"queries({n // 4}, {n // 2})",
    "dilated": lambda n: "dilated(2048, 4)",
    "strided": lambda n: "strided(64)",
    "strided and window": lambda n: "strided(64) | window(64, 64)",
    "dilated and window": lambda n: "dilated(2048, 4) | window(64, 64)",
    "hierarchical": lambda n: "hierarchical([(64, 1, 1), (512, 4, 16), (4096, 16, 64)])",
    "documents": lambda n: f"documents({documents(n)})",
    "packed": lambda n: f"packed({documents(n)}, {documents(n)}, causal)",
    "blocks_dilated": lambda n: "blocks_dilated(64, [1, 4, 16])",
    "butterfly": lambda n: "butterfly(64)",
    "random": lambda n: f"random(64, 8, {n // 64}, 1)",
    "neighborhood": lambda n: "neighborhood([{}, {}], [8, 8])".format(*grid(n)),
    "not": lambda n: "causal & !window(1024, 0)",
}

PAPERS = {
    "Sparse Transformer, strided": lambda n: "causal & (window(64, 0) | strided(128))",
    "Sparse Transformer, fixed": lambda n: (
        "causal & (dilated(128, 1) | hierarchical([(16777216, 16, 8)]))"
    ),
    "Longformer": lambda n: "window(256, 256) | global_tokens(16)",
    "BigBird": lambda n: f"window(96, 96) | global_tokens(128) | random(64, 3, {n // 64}, 1)",
    "LongNet, union": lambda n: (
        "causal & (dilated(2048, 1) | dilated(8192, 4) | dilated(32768, 16))"
    ),
    "DilateFormer": lambda n: "window(32, 32) | window(96, 96) & strided(3)",
    "StreamingLLM": lambda n: "causal & (window(2044, 0) | sinks(4))",
    "Neighborhood Attention": lambda n: "neighborhood([{}, {}], [6, 6])".format(*grid(n)),
    "ModernBERT": lambda n: "window(64, 64)",
    "document packing": lambda n: f"packed({documents(n)}, {documents(n)}, causal)",
}
