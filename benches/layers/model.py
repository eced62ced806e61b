"""Layers in the shapes of two models, with attention by one of several engines.

`modernbert` is three pre-norm layers of ModernBERT-base: one that sees everything, two that see
|query - key| <= 64; width 768, 12 heads, GeGLU of 1,152. `mistral` is one layer of Mistral 7B: a
causal window of 4,096; width 4,096, 32 heads on 8 of keys and values, SwiGLU of 14,336. Rotary
positions and dropout are left out: they cost every engine the same.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu


@dataclass(frozen=True)
class Shape:
    width: int
    heads: int
    key_heads: int
    inner: int
    activation: object
    #: One pattern per layer.
    patterns: tuple[str, ...]


SHAPES = {
    "modernbert": Shape(768, 12, 12, 1_152, gelu, ("full", "window(64, 64)", "window(64, 64)")),
    "mistral": Shape(4_096, 32, 8, 14_336, silu, ("causal & window(4095, 0)",)),
}


def dense_mask(pattern: str, tokens: int) -> torch.Tensor | None:
    """The pattern as a boolean matrix, as a user of dense attention has to make it."""
    if pattern == "full":
        return None
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)
    if pattern == "window(64, 64)":
        return (query - key).abs() <= 64
    assert pattern == "causal & window(4095, 0)", pattern
    return (key <= query) & (query - key <= 4095)


class Engine:
    """Attention over one pattern: `(batch, heads, tokens, dim)` in and out."""

    def __init__(self, pattern: str, tokens: int, masks: dict):
        self.pattern, self.tokens, self.masks = pattern, tokens, masks

    def mask(self, make):
        """Layers of one pattern share a mask."""
        if self.pattern not in self.masks:
            self.masks[self.pattern] = make(self.pattern, self.tokens)
        return self.masks[self.pattern]


class Eager(Engine):
    def __call__(self, q, k, v):
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        mask = self.mask(dense_mask)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


class Sdpa(Engine):
    def __call__(self, q, k, v):
        return scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask(dense_mask), enable_gqa=q.shape[1] != k.shape[1]
        )


class Flex(Engine):
    compiled = None

    def __call__(self, q, k, v):
        from torch.nn.attention import flex_attention as flex

        if Flex.compiled is None:
            Flex.compiled = torch.compile(flex.flex_attention)

        def make(pattern, tokens):
            import longspan

            # create_block_mask would need tokens² bytes and seconds; only the attention is compared.
            return longspan.Pattern(pattern).to_block_mask(tokens)

        return Flex.compiled(
            q, k, v, block_mask=self.mask(make), enable_gqa=q.shape[1] != k.shape[1]
        )


class Longspan(Engine):
    def __call__(self, q, k, v):
        from longspan.torch import attention

        return attention(q, k, v, self.pattern, enable_gqa=q.shape[1] != k.shape[1])


class Nothing(Engine):
    """No attention at all: what everything else costs."""

    def __call__(self, q, k, v):
        return q + v.repeat_interleave(q.shape[1] // v.shape[1], 1)


ENGINES = {"eager": Eager, "sdpa": Sdpa, "flex": Flex, "longspan": Longspan, "nothing": Nothing}


class Layer(nn.Module):
    def __init__(self, shape: Shape, attention: Engine):
        super().__init__()
        self.shape, self.attention = shape, attention
        self.dim = shape.width // shape.heads
        heads = shape.heads + 2 * shape.key_heads
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.qkv = nn.Linear(shape.width, heads * self.dim, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.inner_norm = nn.LayerNorm(shape.width, bias=False)
        self.up = nn.Linear(shape.width, 2 * shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x):
        batch, tokens, _ = x.shape
        s = self.shape
        qkv = self.qkv(self.norm(x)).view(batch, tokens, -1, self.dim).transpose(1, 2)
        q, k, v = qkv.split([s.heads, s.key_heads, s.key_heads], 1)
        seen = self.attention(q, k, v).transpose(1, 2).reshape(batch, tokens, -1)
        x = x + self.out(seen)
        a, b = self.up(self.inner_norm(x)).chunk(2, -1)
        return x + self.down(s.activation(a) * b)


def layers(name: str, engine: str, tokens: int, dtype: torch.dtype) -> nn.Sequential:
    shape, masks = SHAPES[name], {}
    torch.manual_seed(0)
    made = [Layer(shape, ENGINES[engine](p, tokens, masks)) for p in shape.patterns]
    return nn.Sequential(*made).to(dtype)
