"""Implementations of dilated attention, all called as `engine(q, k, v)` on (batch, token, head, dim).

| engine | where from | what it needed to run on a CPU |
|---|---|---|
| longspan | this package | nothing |
| torchscale | a checkout of its repository: no release on PyPI has `dilated_attention.py` | `flash_attn_func`, which it has on CUDA alone: torch's own CPU flash attention, with its log-sum-exp, stands in |
| dilated-attention-pytorch | PyPI, 0.2.0 | xformers' `memory_efficient_attention`, which refuses tensors on a CPU: torch's `scaled_dot_product_attention` stands in |

Stand-ins are the fastest thing that torch has for the same job on a CPU. torchscale's projections are
taken out, so that what is timed is attention.
"""

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ENGINES = ("longspan", "torchscale", "dilated-attention-pytorch")


@dataclass(frozen=True)
class Case:
    """What an engine is made for."""

    segments: tuple[int, ...]
    rates: tuple[int, ...]
    heads: int
    dim: int
    causal: bool


def make(name: str, case: Case, checkout: str | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """An engine, or the error that it ends with."""
    return {
        "longspan": lambda: longspan(case),
        "torchscale": lambda: torchscale(case, checkout),
        "dilated-attention-pytorch": lambda: dilated_attention_pytorch(case),
    }[name]()


def longspan(case: Case):
    from longspan.torch import DilatedAttention

    module = DilatedAttention(case.segments, case.rates)
    return lambda q, k, v: module(q, k, v, is_causal=case.causal)


def torchscale(case: Case, checkout: str | None):
    if checkout is None:
        raise SystemExit("--torchscale DIR: a checkout of microsoft/torchscale is needed")
    sys.path.insert(0, checkout)
    from torchscale.component import multihead_attention
    from torchscale.component.dilated_attention import DilatedAttention

    assert multihead_attention.flash_attn_func in (None, flash_on_cpu), "it has its own here"
    multihead_attention.flash_attn_func = flash_on_cpu
    settings = types.SimpleNamespace(
        flash_attention=True,
        segment_length=list(case.segments),
        dilated_ratio=list(case.rates),
        seq_parallel=False,
        multiway=False,
        xpos_rel_pos=False,
        layernorm_eps=1e-5,
    )
    width = case.heads * case.dim
    module = DilatedAttention(settings, width, case.heads, self_attention=True)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(module, name, nn.Identity())

    def call(q, k, v):
        out, _ = module(q.flatten(2), k.flatten(2), v.flatten(2), is_causal=case.causal)
        return out.unflatten(2, (case.heads, case.dim))

    return call


def flash_on_cpu(q, k, v, dropout=0.0, bias=None, softmax_scale=None, is_causal=False):
    """As flash-attn's function is called by torchscale: output and log-sum-exp."""
    assert dropout == 0 and bias is None
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(x.transpose(1, 2) for x in (q, k, v)), 0.0, is_causal, scale=softmax_scale
    )
    return out.transpose(1, 2), lse


def dilated_attention_pytorch(case: Case):
    import xformers.ops
    from dilated_attention_pytorch.dilated_attention import DilatedAttention

    def memory_efficient_attention(query, key, value, attn_bias=None, op=None):
        assert op is None
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=attn_bias is not None).transpose(1, 2)

    xformers.ops.memory_efficient_attention = memory_efficient_attention
    module = DilatedAttention(case.segments, case.rates)
    return lambda q, k, v: module(q, k, v, is_causal=case.causal)


def pairs(name: str, case: Case, tokens: int) -> int:
    """Pairs of a query and a key that an engine computes, over all heads."""
    total = 0
    groups = [case.heads // len(case.rates)] * len(case.rates)
    for index in range(case.heads % len(case.rates)):
        groups[index] += 1
    for segment, rate, group in zip(case.segments, case.rates, groups):
        for head in range(case.heads if name != "dilated-attention-pytorch" else group):
            for start in range(0, tokens, segment):
                own = len(range(start + head % rate, min(start + segment, tokens), rate))
                total += own * (own + 1) // 2 if case.causal else own * own
    return total
