"""f32 products follow torch's own setting."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import longspan
import pytest
import torch
from longspan import limits
from longspan.torch import attention

Q, K, V = (torch.randn(1, 2, 200, 32, generator=torch.Generator().manual_seed(n)) for n in range(3))


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def both(dtype: torch.dtype) -> list[torch.Tensor]:
    q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in (Q, K, V))
    out = attention(q, k, v, "causal")
    return [out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))]


@pytest.mark.parametrize("name", ["high", "medium"])
def test_f32_follows_torch(name: str) -> None:
    highest = both(torch.float32)
    torch.set_float32_matmul_precision(name)
    high = both(torch.float32)
    has_unit = limits.best_isa() == "amx"
    for a, b in zip(highest, high):
        assert torch.equal(a, b) != has_unit
        # 4.5e-6 of each product, of which gradients add up 200 of a size of up to 10.
        torch.testing.assert_close(a, b, rtol=0, atol=3e-4)
    numbers = [x.numpy() for x in (Q, K, V)]
    same = longspan.attention(*numbers, "causal", precision="high")
    assert torch.equal(torch.from_numpy(same), high[0])


def test_settings_of_backends() -> None:
    """A process that sets torch's backends one by one can't ask for the one setting of all."""
    check = """
import torch
from longspan.torch import _run, attention
if hasattr(torch.backends.mkldnn, "matmul"):
    for name, expected in (("bf16", "high"), ("ieee", "highest")):
        torch.backends.mkldnn.matmul.fp32_precision = name
        assert _run.precision() == expected, (name, _run.precision())
x = torch.ones(1, 1, 3, 4)
attention(x, x, x, "full")
"""
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_do_not(dtype: torch.dtype) -> None:
    highest = both(dtype)
    torch.set_float32_matmul_precision("high")
    assert all(map(torch.equal, highest, both(dtype)))
