"""Calls that take the shortest way: results, errors and what has to see a call are those of the others."""

from __future__ import annotations

import dense
import longspan
import pytest
import torch
from longspan.torch import _attention, _run, attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: Torch of 2026 describes tensors to compiled code; before, no call is direct.
needs_direct = pytest.mark.skipif(not _run._READS, reason="this torch has no DLPack functions")

Q = torch.randn(1, 4, 9, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call was direct."""
    calls = []
    compiled = _attention.direct_forward

    def forward(*args: object) -> torch.Tensor | None:
        out = compiled(*args)
        calls.append(out is not None)
        return out

    monkeypatch.setattr(_attention, "direct_forward", forward)
    return calls


@needs_direct
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [*dense.SIZES, (2, 2, 2, 0, 5, 4, 4), (1, 2, 2, 5, 0, 4, 4), (0, 2, 2, 5, 5, 4, 4)])
def test_same_bits(rng, direct, size, dtype):
    q, k, v, _ = (x.detach() for x in dense.tensors(rng, size, dtype))
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    for text in ("causal & (window(20, 0) | sinks(5))", "!full"):
        expected, _ = attention(q, k, v, text, return_lse=True, enable_gqa=True)
        for queries, pattern in ((q, text), (strided, longspan.Pattern(text))):
            out = attention(queries, k, v, pattern, enable_gqa=True)
            assert torch.equal(out, expected)
            assert out.stride() == expected.stride() and out.dtype == dtype
    assert direct == [True] * 4


@needs_direct
def test_more_keys_than_queries(rng, direct):
    q, k, v, _ = (x.detach() for x in dense.tensors(rng, (2, 8, 2, 1, 300, 64, 64)))
    expected, _ = attention(q, k, v, "causal", return_lse=True, enable_gqa=True)
    assert torch.equal(attention(q, k, v, "causal", enable_gqa=True), expected)
    assert direct == [True]


class Sees(TorchDispatchMode):
    seen = ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen += str(function)
        return function(*args, **(kwargs or {}))


def test_what_has_to_see_a_call_does(direct):
    expected = attention(Q, Q, Q, "causal")
    direct.clear()
    with Sees() as mode:
        assert torch.equal(attention(Q, Q, Q, "causal"), expected)
    assert "longspan" in mode.seen
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(Q, Q, Q, "causal").dtype == torch.bfloat16
    assert attention(Q, Q.clone().requires_grad_(), Q, "causal").requires_grad
    assert torch.equal(attention(torch.nn.Parameter(Q), Q, Q, "causal").detach(), expected)
    batched = torch.func.vmap(lambda q: attention(q, Q, Q, "causal"))(Q[None].expand(3, 1, 4, 9, 8))
    assert torch.equal(batched[1], expected)
    assert not any(direct)
    with torch.inference_mode():
        assert torch.equal(attention(Q, Q, Q, "causal"), expected)
    with torch.no_grad():
        assert not attention(Q, Q.clone().requires_grad_(), Q, "causal").requires_grad
    assert direct[-2:] == [_run._READS] * 2


@pytest.mark.parametrize(
    ("q", "k", "error", "text"),
    [
        (Q, Q[:, :2], ValueError, "q has 4 heads and k has 2.*enable_gqa=True"),
        (Q[0], Q[0], ValueError, "q has 3 axes, expected 4"),
        (Q, Q.bfloat16(), TypeError, "q, k and v hold torch.float32, torch.bfloat16"),
        (Q.double(), Q.double(), TypeError, "q holds float64"),
        (Q, Q.to("meta"), ValueError, "k is on meta"),
        (Q, Q[..., :7], ValueError, "7"),
        (Q, Q.to_sparse(), Exception, "."),
        (Q, torch._efficientzerotensor(Q.shape), Exception, "."),
    ],
)
def test_errors_are_those_of_other_calls(q, k, error, text):
    errors = []
    for return_lse in (False, True):
        with pytest.raises(error, match=text) as caught:
            attention(q, k, k, "causal", return_lse=return_lse)
        # Torch's own go on with addresses.
        errors.append((caught.type, str(caught.value).split("\n")[0]))
    assert errors[0] == errors[1]


def test_a_wrong_pattern():
    for return_lse in (False, True):
        with pytest.raises(ValueError, match="windw"):
            attention(Q, Q, Q, "windw(3, 0)", return_lse=return_lse)


class Counts(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_function_modes(direct):
    """They see functions of torch, which this is none of."""
    with Counts():
        assert torch.equal(attention(Q, Q, Q, "causal"), attention(Q, Q, Q, "causal", return_lse=True)[0])
