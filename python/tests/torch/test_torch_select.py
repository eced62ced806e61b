"""Layouts by content under autograd."""

from __future__ import annotations

import longspan
import longspan.torch
import torch


def test_gradients_over_a_choice() -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 2, 1100, 8, requires_grad=True) for _ in range(3))
    selector = longspan.BlockSelector("causal", always="window(64, 0)", max_blocks=6)
    selection = selector.select(q.detach(), k.detach())
    assert selection.density < 0.9
    out, lse = longspan.torch.attention(q, k, v, selection.layout, return_lse=True)
    # The same pairs as a boolean mask.
    one_hot = torch.eye(1100 // 64 + 1).repeat_interleave(64, 0)[:1100].expand(1, 2, -1, -1).contiguous()
    zeros = torch.zeros(1, 2, 1100, 8)
    seen = longspan.torch.attention(zeros, zeros, one_hot, selection.layout) > 0
    mask = seen.repeat_interleave(64, -1)[..., :1100] & torch.ones(1100, 1100).tril().bool()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), dout)
    for got, want in zip(found, torch.autograd.grad(expected, (q, k, v), dout)):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    kept = selection.kept_mass(q.detach(), k.detach(), lse.detach())
    assert 0 < kept.mean <= 1


def test_bf16() -> None:
    x = torch.randn(1, 2, 1100, 32, dtype=torch.bfloat16)
    selection = longspan.BlockSelector("causal", max_blocks=5).select(x, x)
    assert longspan.torch.attention(x, x, x, selection.layout).dtype == torch.bfloat16
