"""Attention for sequences too long for attention.

A pattern says which positions may see which; only those pairs are computed, exactly, forward and
backward, on the CPU.

>>> import longspan, numpy
>>> q = numpy.random.default_rng(0).standard_normal((1, 4, 2048, 32), dtype="float32")
>>> pattern = longspan.causal() & (longspan.window(256, 0) | longspan.sinks(16))
>>> longspan.attention(q, q, q, pattern).shape
(1, 4, 2048, 32)

Patterns are also written as text, and differ by head with ``heads``:

>>> pattern == longspan.Pattern("causal & (window(256, 0) | sinks(16))")
True
>>> print(pattern)
causal & (window(256, 0) | sinks(16))
"""

from longspan._attention import Attention
from longspan._longspan import (
    Array,
    BlockSelector,
    Component,
    Dilated,
    KeptMass,
    KvCache,
    Layout,
    ListedBlocks,
    Pattern,
    RingError,
    Selection,
    __version__,
    attention,
    attention_weights,
    backward,
    batch,
    blocks,
    blocks_dilated,
    butterfly,
    bytes_needed,
    causal,
    dilated,
    documents,
    forward,
    full,
    global_tokens,
    heads,
    hierarchical,
    keys,
    neighborhood,
    packed,
    packed_cu_seqlens,
    queries,
    random,
    scale_to_density,
    sinks,
    sliding_window,
    strided,
    tiles,
    weights_svg,
    window,
)
from longspan._results import Gradients, Output

__all__ = [
    "Array",
    "Attention",
    "BlockSelector",
    "Component",
    "Dilated",
    "Gradients",
    "KeptMass",
    "KvCache",
    "Layout",
    "ListedBlocks",
    "Output",
    "Pattern",
    "RingError",
    "Selection",
    "__version__",
    "attention",
    "attention_weights",
    "backward",
    "batch",
    "blocks",
    "blocks_dilated",
    "butterfly",
    "bytes_needed",
    "causal",
    "dilated",
    "documents",
    "forward",
    "full",
    "global_tokens",
    "heads",
    "hierarchical",
    "keys",
    "neighborhood",
    "packed",
    "packed_cu_seqlens",
    "queries",
    "random",
    "scale_to_density",
    "sinks",
    "sliding_window",
    "strided",
    "tiles",
    "weights_svg",
    "window",
]
