"""Sink logits in torch, against a softmax with one column more and its autograd."""

import dense
import oracle
import pytest
import torch
import torch._dynamo.testing

import longspan
from longspan.torch import (
    DilatedAttention,
    attention,
    flash_attention,
    scaled_dot_product_attention,
)

SIZE = (2, 6, 2, 47, 61, 13, 7)


def logits(rng, dtype=torch.float32):
    made = torch.from_numpy(rng.standard_normal(6, dtype="float32")) * 2
    return made.to(dtype).requires_grad_()


def plain(q, k, v, mask, sinks, scale=None):
    """Output and log-sum-exp in f64."""
    q, k, v, sinks = (x.double() for x in (q, k, v, sinks))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q.shape[3] ** -0.5 if scale is None else scale) * (q @ k.mT)
    scores = scores.masked_fill(~torch.as_tensor(mask), -torch.inf)
    column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    scores = torch.cat([scores, column], -1)
    return scores.softmax(-1)[..., :-1] @ v, scores.logsumexp(-1)


def compare(got, expected, inputs, tolerance):
    """Outputs, and gradients of a loss through both."""
    loss = lambda out, lse: (out.double() ** 2).sum() + (lse.double() * lse.double().cos()).sum()
    gradients = [
        torch.autograd.grad(loss(*outputs), inputs, retain_graph=True) for outputs in (got, expected)
    ]
    for a, b in zip((*got, *gradients[0]), (*expected, *gradients[1])):
        scale = b.double().abs().max().clamp(min=1)
        assert not a.isnan().any()
        assert ((a.double() - b.double()).abs().max() / scale) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("text", ["full", "causal & (sliding_window(17) | sinks(5))", "!strided(3)"])
def test_gradients(rng, text, dtype):
    # Results, outputs that gradients are taken from, and with a matrix unit probabilities are rounded:
    # the rule of `oracle`, taken of the largest element. f32 has sums of a hundred terms instead.
    tolerance = 2e-5 if dtype == torch.float32 else oracle.MOST * oracle.UNIT[str(dtype)[6:]]
    q, k, v, _ = dense.tensors(rng, SIZE, dtype)
    sinks = logits(rng, dtype)
    mask = oracle.mask(dense.RULES[text], 47, 61)
    expected = plain(q, k, v, mask, sinks)
    for pattern in (text, longspan.Pattern(text).compile(47, 61)):
        got = attention(q, k, v, pattern, enable_gqa=True, return_lse=True, sink_logits=sinks)
        assert (got[0].dtype, got[1].dtype) == (dtype, torch.float32)
        compare(got, expected, (q, k, v, sinks), tolerance)
        assert torch.autograd.grad(got[0].sum(), sinks)[0].dtype == dtype


def test_without_gradients_and_with_some(rng):
    q, k, v, dout = dense.tensors(rng, SIZE)
    sinks = logits(rng)
    expected, _ = plain(q, k, v, oracle.mask(dense.RULES["causal"], 47, 61), sinks)
    with torch.no_grad():
        out = attention(q, k, v, "causal", enable_gqa=True, sink_logits=sinks)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    # The logits alone.
    fixed = [x.detach() for x in (q, k, v)]
    out = attention(*fixed, "causal", enable_gqa=True, sink_logits=sinks)
    (only,) = torch.autograd.grad(out, sinks, dout)
    (exact,) = torch.autograd.grad(expected, sinks, dout.double())
    torch.testing.assert_close(only, exact.float(), atol=1e-4, rtol=1e-4)
    # All but the logits.
    out = attention(q, k, v, "causal", enable_gqa=True, sink_logits=sinks.detach())
    assert torch.autograd.grad(out, q, dout)[0].shape == q.shape


def test_empty_rows(rng):
    q, k, v, _ = dense.tensors(rng, SIZE)
    sinks = logits(rng)
    out, lse = attention(q, k, v, "!full", enable_gqa=True, return_lse=True, sink_logits=sinks)
    assert (out == 0).all() and (lse == sinks[:, None]).all()
    (gradient,) = torch.autograd.grad((out.sum() + lse.sum()), sinks)
    assert (gradient == 2 * 47).all()


def test_finite_differences(rng):
    q, k, v, dout = dense.tensors(rng, SIZE)
    sinks = logits(rng)
    loss = lambda s: (
        attention(q, k, v, "causal", enable_gqa=True, sink_logits=s).double() * dout
    ).sum()
    (gradient,) = torch.autograd.grad(loss(sinks), sinks)
    step = 2.0**-6
    for head in range(6):
        by = torch.zeros(6)
        by[head] = step
        difference = (loss(sinks.detach() + by) - loss(sinks.detach() - by)) / (2 * step)
        assert abs(difference.item() - gradient[head].item()) < 5e-3


def test_packed_sequences(rng):
    q, k, v, _ = dense.tensors(rng, (1, 6, 2, 61, 61, 13, 7))
    sinks, bounds = logits(rng), [0, 9, 9, 40, 61]
    packed = attention(
        q, k, v, "causal", enable_gqa=True, cu_seqlens=torch.tensor(bounds), sink_logits=sinks
    )
    parts = [
        attention(*(x[:, :, a:b] for x in (q, k, v)), "causal", enable_gqa=True, sink_logits=sinks)
        for a, b in zip(bounds, bounds[1:])
    ]
    torch.testing.assert_close(packed, torch.cat(parts, 2), atol=1e-6, rtol=1e-6)


def test_compiled(rng):
    def step(q, k, v, sinks):
        out, lse = attention(
            q * 2, k, v, "causal & window(9, 0)", return_lse=True, sink_logits=sinks * 1.5
        )
        return out + 1, lse

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fast = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for length in range(5, 15):
        q, k, v, _ = dense.tensors(rng, (1, 6, 6, length, length + 3, 8, 8))
        inputs = (q, k, v, logits(rng))
        torch.testing.assert_close(fast(*inputs), step(*inputs))
        got, expected = (
            torch.autograd.grad(sum(x.sum() for x in f(*inputs)), inputs) for f in (fast, step)
        )
        torch.testing.assert_close(got, expected)
    assert counter.frame_count <= 2


def test_other_names(rng):
    q, k, v, _ = dense.tensors(rng, (2, 6, 6, 47, 47, 13, 7))
    sinks = logits(rng)
    expected = attention(q, k, v, "causal", sink_logits=sinks)
    sdpa = scaled_dot_product_attention(q, k, v, is_causal=True, sink_logits=sinks)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    flash = flash_attention(*turned, causal=True, sink_logits=sinks).transpose(1, 2)
    assert torch.equal(sdpa, expected) and torch.equal(flash, expected)
    (gradient,) = torch.autograd.grad(flash.square().sum(), sinks)
    (exact,) = torch.autograd.grad(expected.square().sum(), sinks)
    torch.testing.assert_close(gradient, exact)


def test_dilated(rng):
    q, k, v, _ = dense.tensors(rng, (2, 6, 6, 61, 61, 13, 7))
    sinks = logits(rng)
    # Branches over everything: each key counts twice, the sink once. Scores grow by ln 2.
    dilated = DilatedAttention([61, 61], [1, 1])
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    out = dilated(*turned, sink_logits=sinks).transpose(1, 2)
    mask = oracle.mask(dense.RULES["full"], 61, 61)
    expected, lse = plain(q, k, v, mask, sinks - torch.log(torch.tensor(2.0)))
    both = attention(q, k, v, longspan.Dilated([61, 61], [1, 1]), return_lse=True, sink_logits=sinks)
    assert torch.equal(both[0], out)
    compare((out, both[1]), (expected, lse + torch.log(torch.tensor(2.0))), (q, k, v, sinks), 2e-5)


def test_what_is_refused(rng):
    q, k, v, _ = dense.tensors(rng, SIZE)
    for wrong, error, message in [
        (torch.zeros(2), ValueError, r"sink_logits is a float32 tensor of shape \(2,\), expected"),
        (torch.zeros(6, 1), ValueError, "one logit per query head"),
        (torch.zeros(6, dtype=torch.int64), ValueError, "expected floating-point"),
        ([0.0] * 6, TypeError, "sink_logits is a list, expected a torch.Tensor"),
        (torch.full((6,), torch.nan), ValueError, "a sink logit is NaN"),
        (torch.full((6,), torch.inf), ValueError, "a sink logit is inf"),
        (torch.zeros(6, device="meta"), ValueError, "sink_logits is on meta, expected the CPU"),
    ]:
        with pytest.raises(error, match=message):
            attention(q, k, v, "causal", enable_gqa=True, sink_logits=wrong)


def test_no_second_derivative(rng):
    q, k, v, _ = dense.tensors(rng, SIZE)
    sinks = logits(rng)
    out = attention(q, k, v, "causal", enable_gqa=True, sink_logits=sinks)
    (gradient,) = torch.autograd.grad(out.sum(), sinks, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()
