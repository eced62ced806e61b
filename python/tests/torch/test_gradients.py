"""Outputs and all gradients against torch's dense attention with a materialised mask."""

import dense
import numpy
import oracle
import pytest
import torch

import longspan
from longspan.torch import attention


def run(q, k, v, dout, pattern, dlse=None, **options):
    """Everything that a call and its backward pass give."""
    out, lse = attention(q, k, v, pattern, enable_gqa=True, return_lse=True, **options)
    outputs, arrived = [out], [dout]
    if dlse is not None:
        outputs, arrived = [out, lse], [dout, dlse]
    dq, dk, dv = torch.autograd.grad(outputs, (q, k, v), arrived)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("size", dense.SIZES, ids=str)
@pytest.mark.parametrize("text", dense.RULES)
def test_f32(rng, text, size):
    q, k, v, dout = dense.tensors(rng, size)
    mask = oracle.mask(dense.RULES[text], q.shape[2], k.shape[2])
    dense.check(run(q, k, v, dout, text), dense.truth(q, k, v, mask, dout))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", dense.SIZES, ids=str)
@pytest.mark.parametrize("text", ["full", "causal & (sliding_window(17) | sinks(5))"])
def test_half_types(rng, text, size, dtype):
    q, k, v, dout = dense.tensors(rng, size, dtype)
    mask = oracle.mask(dense.RULES[text], q.shape[2], k.shape[2])
    got = run(q, k, v, dout, text)
    assert got["out"].dtype == got["dq"].dtype == got["dk"].dtype == got["dv"].dtype == dtype
    assert got["lse"].dtype == torch.float32
    dense.check(got, dense.truth(q, k, v, mask, dout), dtype)


def test_pattern_text_and_layout_give_the_same_bits(rng):
    q, k, v, dout = dense.tensors(rng, (2, 6, 2, 97, 131, 13, 7))
    pattern = longspan.causal() & longspan.window(30, 0)
    expected = run(q, k, v, dout, str(pattern))
    for other in (pattern, pattern.compile(97, 131)):
        for name, value in run(q, k, v, dout, other).items():
            assert torch.equal(value, expected[name]), name


def test_heads(rng):
    texts = ["causal", "window(20, 3)", "!strided(3)", "full"]
    q, k, v, dout = dense.tensors(rng, (2, 4, 2, 70, 83, 8, 8))
    mask = numpy.stack([oracle.mask(dense.RULES[text], 70, 83) for text in texts])
    got = run(q, k, v, dout, longspan.heads(texts))
    dense.check(got, dense.truth(q, k, v, mask, dout))


def test_gradients_through_lse(rng):
    q, k, v, dout = dense.tensors(rng, (1, 4, 2, 50, 61, 8, 8))
    dlse = torch.from_numpy(rng.standard_normal((1, 4, 50), dtype="float32"))
    mask = oracle.mask(dense.RULES["causal"], 50, 61)
    expected = dense.truth(q, k, v, mask, dout, dlse)
    dense.check(run(q, k, v, dout, "causal", dlse=dlse), expected)
    # One number for all rows, which has no strides.
    ones = torch.ones(()).expand(1, 4, 50)
    dense.check(run(q, k, v, dout, "causal", dlse=ones), dense.truth(q, k, v, mask, dout, ones))


@pytest.mark.parametrize("pattern", ["causal", longspan.causal().compile(50)], ids=["text", "layout"])
def test_lse_alone(rng, pattern):
    q, k, v, dout = dense.tensors(rng, (1, 2, 2, 50, 50, 8, 8))
    _, lse = attention(q, k, v, pattern, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    mask = oracle.mask(dense.RULES["causal"], 50, 50)
    ones = torch.ones_like(lse)
    expected = dense.truth(q, k, v, mask, torch.zeros_like(dout), ones)
    dense.check({"dq": dq, "dk": dk}, expected)
    assert (dv == 0).all()


def test_gradient_of_unused_lse_is_not_computed(rng, monkeypatch):
    from longspan.torch import _run

    seen = []

    def backward(*arguments, **options):
        seen.append(arguments[7])
        return None, None, None

    monkeypatch.setattr(_run, "raw_backward", backward)
    q, k, v, dout = dense.tensors(rng, (1, 2, 2, 20, 20, 8, 8))
    for pattern in ("causal", longspan.causal().compile(20)):
        out, lse = attention(q, k, v, pattern, return_lse=True)
        torch.autograd.grad(out, (q, k, v), dout)
        out, lse = attention(q, k, v, pattern, return_lse=True)
        torch.autograd.grad((out, lse), (q, k, v), (dout, torch.ones_like(lse)))
    assert [dlse is None for dlse in seen] == [True, False, True, False]


class Softcap:
    """Scores as both sides compute them."""

    def __init__(self, cap):
        self.cap = cap

    def torch(self, scores):
        return self.cap * (scores / self.cap).tanh()

    def numpy(self, scores):
        squashed = numpy.tanh(scores / self.cap)
        return self.cap * squashed, 1 - squashed**2


def test_scale_and_softcap(rng):
    q, k, v, dout = dense.tensors(rng, (1, 2, 2, 80, 80, 8, 8))
    mask = oracle.mask(dense.RULES["causal"], 80, 80)
    dense.check(
        run(q, k, v, dout, "causal", scale=-0.7), dense.truth(q, k, v, mask, dout, scale=-0.7)
    )
    # Large enough that a cap which is ignored shows.
    got = run(q, k, v, dout, "causal", scale=2.0, softcap=3.0)
    dense.check(got, dense.truth(q, k, v, mask, dout, scale=2.0, score=Softcap(3.0)))


def test_offsets(rng):
    q, k, v, dout = dense.tensors(rng, (1, 1, 1, 20, 90, 8, 8))
    text = "causal & (sliding_window(17) | sinks(5))"
    mask = oracle.mask(dense.RULES[text], 20, 90, query_offset=40, key_offset=3)
    expected = dense.truth(q, k, v, mask, dout)
    dense.check(run(q, k, v, dout, text, query_offset=40, key_offset=3), expected)
    tensors = {"query_offset": torch.tensor(40), "key_offset": torch.tensor(3, dtype=torch.int32)}
    dense.check(run(q, k, v, dout, text, **tensors), expected)
    with torch.no_grad():
        dense.check({"out": attention(q, k, v, text, query_offset=40, key_offset=3)}, expected)
        dense.check({"out": attention(q, k, v, text, **tensors)}, expected)


def test_key_padding(rng):
    q, k, v, dout = dense.tensors(rng, (4, 2, 1, 77, 77, 8, 8))
    ranges = torch.tensor([[0, 77], [30, 77], [0, 41], [12, 12]])
    at = torch.arange(77)
    valid = (at >= ranges[:, :1]) & (at < ranges[:, 1:])
    mask = oracle.mask(dense.RULES["causal"], 77, 77) & valid[:, None, None].numpy()
    expected = dense.truth(q, k, v, mask, dout)
    for padding in (ranges, ranges.int(), valid):
        dense.check(run(q, k, v, dout, "causal", key_padding=padding), expected)


@pytest.mark.parametrize("text", ["causal", "causal & (sliding_window(17) | sinks(5))"])
def test_packed_equals_unpacked(rng, text):
    lengths_q, lengths_k = [13, 0, 40, 1, 31], [20, 3, 40, 17, 31]
    q, k, v, dout = dense.tensors(rng, (1, 4, 2, sum(lengths_q), sum(lengths_k), 8, 8))
    cu_q, cu_k = (
        torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    )
    got = run(q, k, v, dout, text, cu_seqlens=(cu_q, cu_k))
    parts = []
    for rows, columns in zip(cu_q.tolist(), cu_k.tolist()):
        index = len(parts)
        if index == len(lengths_q):
            break
        x = [y.detach()[:, :, rows : rows + lengths_q[index]].requires_grad_() for y in (q, dout)]
        y = [y.detach()[:, :, columns : columns + lengths_k[index]].requires_grad_() for y in (k, v)]
        mask = oracle.mask(dense.RULES[text], lengths_q[index], lengths_k[index])
        parts.append(dense.truth(x[0], *y, mask, x[1]))
    joined = [
        oracle.Truth(*(numpy.concatenate(field, axis=2) for field in zip(*side)))
        for side in zip(*parts)
    ]
    dense.check(got, joined)
    same = torch.tensor([0, 13, 84])
    square = q.detach()[:, :, :84], k.detach()[:, :, :84], v.detach()[:, :, :84]
    both = attention(*square, text, cu_seqlens=same, enable_gqa=True)
    apart = [attention(*(x[:, :, s] for x in square), text, enable_gqa=True)
             for s in (slice(0, 13), slice(13, 84))]
    torch.testing.assert_close(both, torch.cat(apart, 2))


def test_any_strides(rng):
    q, k, v, dout = (x.detach() for x in dense.tensors(rng, (2, 4, 4, 45, 45, 16, 16)))
    mask = oracle.mask(dense.RULES["causal"], 45, 45)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    every_other = k.repeat_interleave(2, 3)[..., ::2].requires_grad_()
    columns = v.mT.contiguous().mT.requires_grad_()
    assert not any(x.is_contiguous() for x in (turned, every_other, columns))
    expected = dense.truth(q, k, v, mask, dout)
    for arrived in (dout, dout.transpose(1, 2).contiguous().transpose(1, 2)):
        dense.check(run(turned, every_other, columns, arrived, "causal"), expected)


@pytest.mark.parametrize("pattern", ["causal", longspan.causal().compile(45)], ids=["text", "layout"])
def test_sign_beside_the_numbers(rng, pattern):
    """As the imaginary part of a conjugate has it: nothing is negated until somebody reads it."""
    q, k, v, dout = (x.detach() for x in dense.tensors(rng, (1, 4, 4, 45, 45, 16, 16)))
    dlse = torch.from_numpy(rng.standard_normal((1, 4, 45), dtype="float32"))
    mask = oracle.mask(dense.RULES["causal"], 45, 45)
    expected = dense.truth(q, k, v, mask, dout, dlse)
    q, k, v, dout, dlse = (torch._neg_view(-x) for x in (q, k, v, dout, dlse))
    assert all(x.is_neg() for x in (q, k, v, dout, dlse))
    with torch.no_grad():
        dense.check({"out": attention(q, k, v, pattern)}, expected)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    dense.check(run(q, k, v, dout, pattern, dlse=dlse), expected)


def test_expanded_tensors_sum_their_gradients(rng):
    q, k, v, dout = (x.detach() for x in dense.tensors(rng, (2, 4, 4, 45, 45, 16, 16)))
    one = v[:1, :1].clone().requires_grad_()
    expanded = one.expand(v.shape)
    q.requires_grad_(), k.requires_grad_()
    out = attention(q, k, expanded, "causal")
    (got,) = torch.autograd.grad(out, one, dout)
    mask = oracle.mask(dense.RULES["causal"], 45, 45)
    truth, gross = dense.truth(q, k, expanded, mask, dout)
    dense.check({"out": out}, (truth, gross))
    summed = [side._replace(dv=side.dv.sum((0, 1), keepdims=True)) for side in (truth, gross)]
    dense.check({"dv": got}, summed)
    row = dout[:, :, :1].expand(dout.shape)
    dense.check(run(q, k, v.requires_grad_(), row, "causal"), dense.truth(q, k, v, mask, row))


def test_rows_that_see_nothing(rng):
    q, k, v, dout = dense.tensors(rng, (1, 2, 2, 40, 40, 8, 8))
    got = run(q, k, v, dout, "!full", dlse=torch.ones(1, 2, 40))
    assert (got.pop("lse") == -torch.inf).all()
    for name, value in got.items():
        assert (value == 0).all(), name


@pytest.mark.parametrize("size", [(0, 2, 2, 5, 5, 4, 4), (1, 2, 2, 0, 5, 4, 4), (1, 2, 2, 5, 0, 4, 4)])
def test_without_tokens(rng, size):
    q, k, v, dout = dense.tensors(rng, size)
    got = run(q, k, v, dout, "full")
    assert got["out"].shape == dout.shape
    assert (got["out"] == 0).all()
    assert [got[name].shape for name in ("dq", "dk", "dv")] == [q.shape, k.shape, v.shape]


def test_results_lie_as_models_go_on_with_them(rng):
    q, k, v, _ = dense.tensors(rng, (2, 4, 4, 45, 45, 16, 16))
    for out in (attention(q, k, v, "causal"), attention(q.detach(), k.detach(), v.detach(), "causal")):
        assert out.transpose(1, 2).is_contiguous()
