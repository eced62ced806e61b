"""What a typed program sees of the calls for torch: `mypy --strict` and pyright check this file, and
it runs as a test."""

from __future__ import annotations

import longspan
import torch
from longspan.torch import (
    DilatedAttention,
    LongNetEncoder,
    LongNetLM,
    MultiheadAttention,
    MultiheadDilatedAttention,
    Shards,
    attention,
    flash_attention,
    flex_attention,
    impl_calls,
    ring_attention,
    ring_loss,
    ring_positions,
    scale_loss,
    scaled_dot_product_attention,
    score_mod,
    sum_gradients,
)
from torch import Tensor
from torch.distributed import ProcessGroup


def calls() -> None:
    q: Tensor = torch.ones(1, 2, 40, 8)
    out: Tensor = attention(q, q, q, longspan.causal())
    pair: tuple[Tensor, Tensor] = attention(q, q, q, "causal", return_lse=True)
    same: Tensor = scaled_dot_product_attention(q, q, q, is_causal=True)
    turned = q.transpose(1, 2)
    flash: Tensor = flash_attention(turned, turned, turned, causal=True)
    flash_pair: tuple[Tensor, Tensor] = flash_attention(turned, turned, turned, return_lse=True)
    assert out.shape == pair[0].shape == same.shape and flash.shape == flash_pair[0].shape
    capped: Tensor = flex_attention(q, q, q, score_mod(softcap=2.0))
    counts: int = impl_calls().longspan + impl_calls().stock
    assert capped.shape == out.shape and counts >= 0


def either(return_lse: bool) -> Tensor:
    q = torch.ones(1, 2, 40, 8)
    result = attention(q, q, q, "causal", return_lse=return_lse)
    return result[0] if isinstance(result, tuple) else result


def over_ranks(q: Tensor) -> Tensor:
    dilated = longspan.Dilated([16, 32], [1, 2], within="causal")
    out, lse = ring_attention(q, q, q, dilated, return_lse=True)
    bounds = torch.tensor([0, 10, 40])
    out = ring_attention(out, out, out, dilated, key_padding=torch.tensor([[0, 40]]))
    return ring_attention(out, out, out, "causal", cu_seqlens=bounds) + lse[..., None]


def modules() -> None:
    x = torch.ones(1, 40, 16)
    layer = MultiheadAttention(16, 2, pattern=longspan.causal(), num_kv_heads=1, batch_first=True)
    out, nothing = layer.forward(x, x, x, is_causal=True, cu_seqlens=torch.tensor([0, 10, 40]))
    dilated = DilatedAttention([8, 16], [1, 2], checkpoint=True)
    heads = x.view(1, 40, 2, 8)
    padding = torch.tensor([[3, 40]])
    rows: Tensor = dilated.forward(heads, heads, heads, key_padding=padding)
    wide = MultiheadDilatedAttention(16, 2, [1, 2], [8, 16])
    same: Tensor = wide.forward(x, x, x, key_padding=padding)[0]
    encoder = LongNetEncoder(
        hidden_size=16,
        num_attention_heads=2,
        num_hidden_layers=1,
        segment_lengths=[8, 16],
        dilation_rates=[1, 2],
    )
    encoded: Tensor = encoder.forward(x, key_padding=padding)
    assert nothing is None and rows.shape == heads.shape
    assert out.shape == same.shape == encoded.shape


def training(ids: Tensor, group: ProcessGroup) -> Tensor:
    model = LongNetLM(hidden_size=32, group=group, shards="balanced", checkpoint=True)
    shards: Shards = model.sharding(1000)
    mine: Tensor = ring_positions(1000, 0, 2, "balanced", pattern="causal")
    assert mine.equal(shards.positions)
    logits: Tensor = model.forward(shards.shard(ids), tokens=1000)
    loss: Tensor = ring_loss(logits, shards.next_tokens(ids), group=group)
    scale_loss(loss, group=group).backward()  # type: ignore[no-untyped-call]
    sum_gradients(model, group=group)
    sum_gradients(model.parameters(), group=group)
    return shards.gather(logits)


if __name__ == "__main__":
    calls()
    modules()
    assert either(True).shape == either(False).shape
