"""The names and rules of other libraries, autocast, and every way to call them wrongly."""

import dense
import numpy
import oracle
import pytest
import torch
import torch.nn.functional as F

import longspan
from longspan.torch import attention, flash_attention, scaled_dot_product_attention

X = torch.zeros(1, 2, 40, 8)

#: f32 averages of values of size 1 to 4 in another order: some dozen roundings of 6e-8 each.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


@pytest.mark.parametrize("size", dense.SIZES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_scaled_dot_product_attention(rng, size, is_causal):
    q, k, v, dout = dense.tensors(rng, size)
    # Not the default, and scores about as large: the bound is for scores of size 1.
    scale = 1.2 * q.shape[3] ** -0.5
    out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    rule = dense.RULES["causal" if is_causal else "full"]
    mask = oracle.mask(rule, q.shape[2], k.shape[2], query_offset=0)
    expected = dense.truth(q, k, v, mask, dout, scale=scale)
    dense.check(dict(zip(("dq", "dk", "dv"), gradients), out=out), expected)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)
    torch.testing.assert_close(out, theirs, **CLOSE)


@pytest.mark.parametrize(
    "shape", [(50, 70), (2, 1, 50, 70), (1, 4, 50, 70), (2, 4, 50, 70), (4, 1, 70), (2, 1, 1, 70)], ids=str
)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_attn_mask(rng, shape, kind):
    q, k, v, dout = dense.tensors(rng, (2, 4, 2, 50, 70, 16, 24))
    active = torch.from_numpy(rng.random(shape) < 0.4)
    # Every row has a key: torch has another rule for those that have none.
    active[..., 3] = True
    mask = active if kind == torch.bool else torch.zeros(shape).masked_fill(~active, -torch.inf)
    ours = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    theirs = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    gradients = [torch.autograd.grad(out, (q, k, v), dout) for out in (ours, theirs)]
    for got, expected in zip(*gradients):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)


def test_what_differs_by_batch_entry_in_tensors(rng):
    """Global tokens, prefixes, packings and holes in padding, each against its rule at every pair."""
    q, k, v, dout = dense.tensors(rng, (3, 4, 2, 70, 70, 16, 24))
    at = numpy.arange(70)
    causal, near = at[:, None] >= at, abs(at[:, None] - at) <= 4
    marks = rng.random((3, 70)) < 0.1
    marks[1] = False
    held = rng.random((3, 70)) < 0.7
    held[2] = False
    bounds = numpy.array([[0, 9, 40, 70], [0, 70, 70, 70], [0, 1, 2, 70]])
    document = numpy.array([numpy.searchsorted(row[1:], at, side="right") for row in bounds])
    same = document[:, :, None] == document[:, None, :]
    lengths = numpy.array([0, 33, 70])
    cases = [
        (near | marks[:, :, None] | marks[:, None, :], "window(4, 4)", {"global_tokens": marks}),
        (causal | (at < lengths[:, None, None]), "causal", {"prefix": lengths}),
        (causal & same, "causal", {"cu_seqlens": bounds}),
        (causal & held[:, None, :], "causal", {"key_padding": held}),
        (
            (causal | marks[:, :, None] | marks[:, None, :] | (at < lengths[:, None, None])) & held[:, None, :],
            "causal",
            {"global_tokens": marks, "prefix": lengths, "key_padding": held},
        ),
    ]
    for mask, pattern, places in cases:
        places = {name: torch.from_numpy(value) for name, value in places.items()}
        out = attention(q, k, v, pattern, enable_gqa=True, **places)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        mask = numpy.broadcast_to(numpy.broadcast_to(mask, (3, 70, 70))[:, None], (3, 4, 70, 70))
        dense.check(dict(zip(("dq", "dk", "dv"), gradients), out=out), dense.truth(q, k, v, mask, dout))
        with torch.no_grad():
            assert torch.equal(attention(q, k, v, pattern, enable_gqa=True, **places), out)


def test_a_pattern_per_batch_entry(rng):
    q, k, v, dout = dense.tensors(rng, (2, 4, 4, 50, 70, 16, 16))
    patterns = ["causal", longspan.Pattern("window(5, 5) | keys(7, 9)")]
    ours = attention(q, k, v, patterns)
    gradients = torch.autograd.grad(ours, (q, k, v), dout)
    for entry, pattern in enumerate(patterns):
        alone = [x.detach()[entry : entry + 1].requires_grad_() for x in (q, k, v)]
        out = attention(*alone, pattern)
        torch.testing.assert_close(out[0], ours[entry], rtol=0, atol=0)
        for got, all_of_them in zip(torch.autograd.grad(out, alone, dout[entry : entry + 1]), gradients):
            torch.testing.assert_close(got[0], all_of_them[entry], rtol=0, atol=0)


@pytest.mark.parametrize("axes", [2, 3])
def test_scaled_dot_product_attention_with_fewer_axes(rng, axes):
    q, k, v, _ = (x[(0,) * (4 - axes)] for x in dense.tensors(rng, (2, 4, 4, 20, 30, 8, 8)))
    for is_causal in (False, True):
        ours = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_scaled_dot_product_attention_with_pattern(rng):
    q, k, v, _ = dense.tensors(rng, (1, 2, 2, 20, 30, 8, 8))
    pattern = longspan.causal()
    for mask in ("causal", pattern, pattern.compile(20, 30)):
        assert torch.equal(scaled_dot_product_attention(q, k, v, mask), attention(q, k, v, "causal"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (9, 3), (9, -1), (-1, 5), (0, 0)], ids=str)
@pytest.mark.parametrize("size", [(2, 4, 2, 37, 61, 8, 8), (1, 2, 2, 61, 37, 8, 8)], ids=str)
def test_flash_attention(rng, size, window, causal):
    left, right = window
    right = 0 if causal else right

    def rule(q, k):
        return (left < 0 or q - left <= k) and (right < 0 or k <= q + right)

    q, k, v, dout = dense.tensors(rng, size)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = flash_attention(*turned, causal=causal, window_size=window, return_lse=True)
    gradients = torch.autograd.grad(out, (q, k, v), dout.transpose(1, 2))
    expected = dense.truth(q, k, v, oracle.mask(rule, q.shape[2], k.shape[2]), dout)
    got = dict(zip(("dq", "dk", "dv"), gradients), out=out.transpose(1, 2), lse=lse)
    dense.check(got, expected)


def test_flash_attention_over_sequences(rng):
    q, k, v, _ = (x[0].transpose(0, 1) for x in dense.tensors(rng, (1, 4, 2, 50, 70, 8, 8)))
    cu_q = torch.tensor([0, 20, 50], dtype=torch.int32)
    cu_k = torch.tensor([0, 30, 70], dtype=torch.int32)
    how = {"causal": True, "window_size": (9, 0), "softmax_scale": 0.5, "softcap": 2.0}
    out, lse = flash_attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, **how)
    assert out.shape == (50, 4, 8) and lse.shape == (4, 50)
    parts = [
        flash_attention(q[None, a], k[None, b], v[None, b], **how)[0]
        for a, b in ((slice(0, 20), slice(0, 30)), (slice(20, 50), slice(30, 70)))
    ]
    torch.testing.assert_close(out, torch.cat(parts), **CLOSE)


def test_flash_attention_narrowed_by_pattern(rng):
    q, k, v, _ = dense.tensors(rng, (1, 2, 2, 40, 40, 8, 8))
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    for pattern in ("strided(2) | sinks(1)", longspan.Pattern("strided(2) | sinks(1)")):
        out = flash_attention(*turned, causal=True, pattern=pattern)
        expected = attention(q, k, v, "causal & (strided(2) | sinks(1))")
        assert torch.equal(out.transpose(1, 2), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(rng, dtype):
    q, k, v, dout = dense.tensors(rng, (1, 2, 2, 40, 40, 8, 8))
    halves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    expected = attention(*halves, "causal")
    expected_gradients = torch.autograd.grad(expected, halves, dout.to(dtype))
    with torch.autocast("cpu", dtype=dtype):
        mixed = attention(q, halves[1], v, "causal")
        out = attention(q, k, v, "causal")
        assert F.scaled_dot_product_attention(q, k, v).dtype == out.dtype == dtype
        with torch.autocast("cpu", enabled=False):
            assert attention(q, k, v, "causal").dtype == torch.float32
    assert torch.equal(out, expected) and torch.equal(mixed, expected)
    for got, value in zip(torch.autograd.grad(out, (q, k, v), dout.to(dtype)), expected_gradients):
        assert got.dtype == torch.float32
        assert torch.equal(got, value.float())


HALF = X.bfloat16()
CAUSAL = longspan.causal().compile(40)


@pytest.mark.parametrize("needs_gradient", [False, True], ids=["direct", "autograd"])
@pytest.mark.parametrize(
    "arguments, kind, message",
    [
        ({"k": HALF}, TypeError, "hold torch.float32, torch.bfloat16 and torch.float32, expected one"),
        ({"q": X.double(), "k": X.double(), "v": X.double()}, TypeError, "q holds float64, expected"),
        ({"q": X[0]}, ValueError, r"q has 3 axes, expected 4: \(batch, head, token, dim\)"),
        ({"q": X.repeat(1, 2, 1, 1)}, ValueError, "q has 4 heads and k has 2.*enable_gqa=True"),
        ({"v": X[:, :, 1:]}, ValueError, "v has tokens 39, expected 40"),
        ({"pattern": None}, TypeError, "pattern is a NoneType, expected a longspan.Pattern"),
        ({"pattern": "windw(3)"}, ValueError, "windw"),
        ({"pattern": "documents([3])"}, ValueError, "add up to 3, expected 40"),
        ({"softcap": 0.0}, ValueError, "softcap is 0"),
        ({"scale": float("nan")}, ValueError, "the scale is NaN"),
        ({"query_offset": torch.zeros(2, dtype=torch.int64)}, ValueError, "query_offset is a int64 tensor"),
        ({"key_offset": torch.tensor(1.5)}, ValueError, "key_offset is a float32 tensor"),
        ({"key_padding": torch.tensor([[0.0, 1.0]])}, ValueError, r"expected int64 of shape \(1, 2\)"),
        ({"key_padding": torch.tensor([[0, 41]])}, ValueError, r"inside 0\.\.40"),
        ({"key_padding": torch.ones(1, 39, dtype=torch.bool)}, ValueError, r"expected shape \(1, 40\)"),
        ({"cu_seqlens": torch.tensor([[[0, 40]]])}, ValueError, r"expected int32 or int64 of shape"),
        ({"cu_seqlens": torch.tensor([[0, 40]] * 2)}, ValueError, "expected 1 rows: one per batch entry"),
        ({"global_tokens": torch.ones(1, 39, dtype=torch.bool)}, ValueError, r"expected shape \(1, 40\)"),
        ({"global_tokens": torch.ones(1, 40)}, ValueError, "of bools"),
        ({"prefix": torch.tensor([3, 4])}, ValueError, r"prefix is a int64.* of shape \(1,\)"),
        ({"prefix": torch.tensor([-1])}, ValueError, "0 or more"),
        ({"prefix": torch.tensor([3]), "key_offset": -5}, ValueError, "key_offset is -5 beside prefix"),
        ({"prefix": torch.tensor([3]), "cu_seqlens": torch.tensor([0, 40])}, ValueError, "expected one of them"),
        ({"prefix": torch.tensor([3]), "pattern": ["causal"]}, ValueError, "the same for all heads and batch"),
        ({"prefix": torch.tensor([3]), "pattern": "heads([causal, full])"}, ValueError, "inside of heads"),
        (
            {"global_tokens": torch.ones(1, 40, dtype=torch.bool), "key_offset": -5},
            ValueError,
            "key_offset is -5 beside global_tokens",
        ),
        ({"cu_seqlens": torch.tensor([1, 40])}, ValueError, r"cu_seqlens_q\[0\] is 1, expected 0"),
        ({"cu_seqlens": torch.tensor([0, 30, 20, 40])}, ValueError, r"\[2\] is 20, expected at least 30"),
        ({"cu_seqlens": torch.tensor([0, 39])}, ValueError, "39.*expected 40"),
        ({"cu_seqlens": torch.tensor([0, 40]), "query_offset": 0}, ValueError, "expected one of both"),
        ({"pattern": CAUSAL, "query_offset": 0}, ValueError, "query_offset: a layout has its own"),
        ({"pattern": CAUSAL, "key_padding": torch.tensor([[0, 4]])}, ValueError, "key_padding: a layout"),
        ({"pattern": longspan.causal().compile(41)}, ValueError, "q has tokens 40, expected 41"),
        ({"q": X.to("meta")}, ValueError, "q is on meta, expected the CPU.*Layout.to_block_mask"),
    ],
)
def test_wrong_calls(arguments, kind, message, needs_gradient):
    given = {"q": X, "k": X, "v": X, "pattern": "causal", **arguments}
    q, k, v, pattern = (given.pop(name) for name in ("q", "k", "v", "pattern"))
    if needs_gradient:
        q = q.clone().requires_grad_()
    with pytest.raises(kind, match=message):
        attention(q, k, v, pattern, **given)


@pytest.mark.parametrize(
    "arguments, kind, message",
    [
        ({"dropout_p": 1.5}, ValueError, "dropout_p is 1.5, expected a number from 0 to below 1"),
        ({"attn_mask": torch.ones(40, 40, dtype=torch.int8)}, TypeError, "int8 tensor, expected bool"),
        ({"attn_mask": torch.ones(40, 40)}, ValueError, "other than 0 and -inf"),
        ({"attn_mask": torch.zeros(40, 40, requires_grad=True)}, ValueError, "requires a gradient"),
        ({"attn_mask": torch.zeros(40, 39)}, ValueError, "broadcasts to"),
        ({"attn_mask": torch.zeros(3, 1, 40, 40)}, ValueError, "broadcasts to"),
        ({"attn_mask": "full", "is_causal": True}, ValueError, "expected one of both"),
    ],
)
def test_wrong_calls_of_scaled_dot_product_attention(arguments, kind, message):
    with pytest.raises(kind, match=message):
        scaled_dot_product_attention(X, X, X, **arguments)
    with pytest.raises(ValueError, match="have 5, 4 and 4 axes, expected 2 to 4"):
        scaled_dot_product_attention(X[None], X, X)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"dropout_p": 1.5}, "dropout_p is 1.5, expected a number from 0 to below 1"),
        ({"alibi_slopes": torch.ones(1, 2)}, r"alibi_slopes has shape \(1, 2\), expected \(heads,\)"),
        ({"window_size": (-2, 0)}, "window_size has -2, expected 0 or more, or -1"),
        ({"cu_seqlens_k": torch.tensor([0, 2])}, "cu_seqlens_k without cu_seqlens_q"),
    ],
)
def test_wrong_calls_of_flash_attention(arguments, message):
    with pytest.raises(ValueError, match=message):
        flash_attention(X, X, X, **arguments)
    with pytest.raises(ValueError, match="q has 3 axes"):
        flash_attention(X[0], X[0], X[0])
