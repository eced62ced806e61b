"""What a typed program sees of the calls for torch: `mypy --strict` and pyright check this file, and
it runs as a test."""

from __future__ import annotations

import longspan
import torch
from longspan.torch import attention, flash_attention, ring_attention, scaled_dot_product_attention
from torch import Tensor


def calls() -> None:
    q: Tensor = torch.ones(1, 2, 40, 8)
    out: Tensor = attention(q, q, q, longspan.causal())
    pair: tuple[Tensor, Tensor] = attention(q, q, q, "causal", return_lse=True)
    same: Tensor = scaled_dot_product_attention(q, q, q, is_causal=True)
    turned = q.transpose(1, 2)
    flash: Tensor = flash_attention(turned, turned, turned, causal=True)
    flash_pair: tuple[Tensor, Tensor] = flash_attention(turned, turned, turned, return_lse=True)
    assert out.shape == pair[0].shape == same.shape and flash.shape == flash_pair[0].shape


def either(return_lse: bool) -> Tensor:
    q = torch.ones(1, 2, 40, 8)
    result = attention(q, q, q, "causal", return_lse=return_lse)
    return result[0] if isinstance(result, tuple) else result


def over_ranks(q: Tensor) -> Tensor:
    dilated = longspan.Dilated([16, 32], [1, 2], within="causal")
    out, lse = ring_attention(q, q, q, dilated, return_lse=True)
    return ring_attention(out, out, out, "causal") + lse[..., None]


if __name__ == "__main__":
    calls()
    assert either(True).shape == either(False).shape
