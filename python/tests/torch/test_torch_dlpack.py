"""Torch's tensors in the functions for arrays, by DLPack."""

import numpy
import pytest
import torch

import longspan

SHAPE = (1, 2, 40, 8)


def test_functions_for_arrays_take_tensors(rng):
    q = torch.from_numpy(rng.standard_normal(SHAPE, dtype="float32"))
    expected = longspan.attention(q.numpy(), q.numpy(), q.numpy(), "causal")
    assert numpy.array_equal(longspan.attention(q, q, q, "causal"), expected)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.empty_like(q)
    assert longspan.attention(turned, q, q, "causal", out=out) is out
    assert numpy.array_equal(out.numpy(), expected)
    half = q.bfloat16()
    result = torch.from_dlpack(longspan.attention(half, half, half, "causal"))
    assert result.dtype == torch.bfloat16
    reference = torch.nn.functional.scaled_dot_product_attention(half, half, half, is_causal=True)
    assert torch.allclose(result.float(), reference.float(), atol=0.02)
    # Torch's own error; its kind depends on the version.
    with pytest.raises((BufferError, RuntimeError), match="require gradient"):
        longspan.attention(q.clone().requires_grad_(), q, q, "causal")
    with pytest.raises(ValueError, match="meta|to_block_mask|device"):
        longspan.attention(q.to("meta"), q, q, "causal")


def test_lazy_negation_is_refused():
    """DLPack hands over the memory, which holds the numbers before they are negated."""
    q = torch.randn(SHAPE)
    negative = torch.complex(q, q).conj().imag
    assert negative.is_neg()
    with pytest.raises(ValueError, match=r"q.is_neg\(\) is true.*q.resolve_neg\(\)"):
        longspan.attention(negative, q, q, "causal")
    expected = longspan.attention(-q, q, q, "causal")
    assert numpy.array_equal(longspan.attention(negative.resolve_neg(), q, q, "causal"), expected)
