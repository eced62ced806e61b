"""The harness itself: torch's CUDA kernels in Triton's interpreter are right, and read block lists."""

from __future__ import annotations

import fake_device
import interpreter
import numpy
import oracle
import pytest
import reference
import torch
import triton
import triton.language as tl
from arithmetic import corrected
from interpreter import InterpretedCuda
from operators import OPTIONS, Blocks, Operators
from torch._inductor.runtime.hints import DeviceProperties

import longspan

#: torch warns of its own ways.
pytestmark = pytest.mark.filterwarnings("default")



@pytest.fixture(autouse=True)
def compilations_of_its_own():
    """Dynamo counts compilations per code object, whatever it closes over, and allows eight."""
    torch._dynamo.reset()


PATTERN = "causal & (window(70, 0) | sinks(9))"


def window(query, key, offset, size, sinks):
    position = query + offset
    return (key <= position) & ((position - key <= size) | (key < sinks))


def case(queries, keys, block=64):
    """Block lists of ``PATTERN``, the numbers of its mask, and the mask written out."""
    layout = longspan.Pattern(PATTERN).compile(queries, keys, block=block)
    blocks = Blocks(layout.to_block_mask().as_tuple()[2:14], block)
    numbers = tuple(torch.tensor(n, dtype=torch.int32) for n in (keys - queries, 70, 9))
    mask = oracle.mask(lambda q, k: k <= q and (q - k <= 70 or k < 9), queries, keys)
    return blocks, numbers, mask


def tensors(rng, shapes, dtype=torch.float32):
    return [torch.from_numpy(rng.standard_normal(s, dtype="float32")).to(dtype) for s in shapes]


def both_passes(operators, q, k, v, dout, dlse, blocks, numbers):
    out, lse = operators.forward(q, k, v, blocks, numbers)
    dq, dk, dv = operators.backward(q, k, v, out, lse, dout, dlse, blocks, numbers)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_operators_are_as_exact_as_the_rule(rng, dtype):
    # Grouped heads, fewer queries than keys, lengths that no block divides, dims that differ.
    shapes = [(2, 4, 100, 32), (2, 2, 150, 32), (2, 2, 150, 48), (2, 4, 100, 48)]
    q, k, v, dout = tensors(rng, shapes, dtype)
    (dlse,) = tensors(rng, [(2, 4, 100)])
    blocks, numbers, mask = case(100, 150)
    backend = InterpretedCuda()
    results = both_passes(Operators(window, backend), q, k, v, dout, dlse, blocks, numbers)
    reference.check(results, reference.attention(q, k, v, mask, dout, dlse), dtype)
    assert [x.attention for x in backend.launches if x.attention] == ["forward", "backward"]
    assert [graph.attention for graph in backend.graphs] == [["forward"], ["backward"]]


def test_views_arrive_where_they_are(rng):
    # Tokens far apart, heads next to each other, and a start that isn't aligned: what a dilated branch is.
    whole = tensors(rng, [(1, 3 * 130 + 2, 2, 16)] * 4)
    q, k, v, dout = (x[:, 2:].unflatten(1, (130, 3))[:, :, 0].transpose(1, 2) for x in whole)
    assert q.stride() == (390 * 32, 16, 96, 1) and q.storage_offset() == 64
    odd = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    assert odd.data_ptr() % 16
    (dlse,) = tensors(rng, [(1, 4, 130)])
    dlse = dlse[:, 1:3]
    blocks, numbers, mask = case(130, 130)
    expected = reference.attention(q, k, v, mask, dout, dlse)
    operators = Operators(window, InterpretedCuda())
    for queries in (q, odd):
        reference.check(
            both_passes(operators, queries, k, v, dout, dlse, blocks, numbers), expected, torch.float32
        )


@pytest.mark.parametrize("queries", [1, 16])
def test_few_queries_are_decoded(rng, queries):
    q, k, v = tensors(rng, [(1, 4, queries, 32), (1, 2, 200, 32), (1, 2, 200, 32)])
    blocks, numbers, mask = case(queries, 200)
    backend = InterpretedCuda()
    options = {**OPTIONS, "BACKEND": "TRITON_DECODE"}
    out, lse = Operators(window, backend, options=options).forward(q, k, v, blocks, numbers)
    reference.check({"out": out, "lse": lse}, reference.attention(q, k, v, mask, out), torch.float32)
    assert backend.graphs[0].attention == ["decode"]


def test_lengths_that_are_symbols(rng):
    backend = InterpretedCuda()
    operators = Operators(window, backend, dynamic=True)
    for tokens in (150, 197):
        q, k, v, dout = tensors(rng, [(1, 2, tokens, 16)] * 4)
        (dlse,) = tensors(rng, [(1, 2, tokens)])
        blocks, numbers, mask = case(tokens, tokens)
        results = both_passes(operators, q, k, v, dout, dlse, blocks, numbers)
        reference.check(results, reference.attention(q, k, v, mask, dout, dlse), torch.float32)
    assert len(backend.graphs) == 2


def test_lists_are_read(rng):
    q, k, v = tensors(rng, [(1, 1, 200, 16)] * 3)
    blocks, numbers, mask = case(200, 200)
    operators = Operators(window, InterpretedCuda())
    expected = reference.attention(q, k, v, mask, q)
    out, _ = operators.forward(q, k, v, blocks, numbers)
    reference.check({"out": out}, expected, torch.float32)
    blocks.lists[0][0, 0, 3] -= 1
    out, _ = operators.forward(q, k, v, blocks, numbers)
    with pytest.raises(AssertionError, match="out: error"):
        reference.check({"out": out}, expected, torch.float32)


def test_compiled_callers_are_interpreted(rng):
    backend = InterpretedCuda()
    operators = Operators(window, backend)
    q, k, v, dout = tensors(rng, [(1, 2, 150, 16)] * 4)
    (dlse,) = tensors(rng, [(1, 2, 150)])
    blocks, numbers, mask = case(150, 150)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = operators.forward(q, k, v, blocks, numbers)
            ctx.save_for_backward(q, k, v, out, lse)
            return out, lse

        @staticmethod
        def backward(ctx, dout, dlse):
            return operators.backward(*ctx.saved_tensors, dout, dlse, blocks, numbers)

    inputs = [x.requires_grad_() for x in (q, k, v)]
    compiled = torch.compile(
        lambda q, k, v: Attention.apply(q / 1, k, v), backend=backend, fullgraph=True
    )
    out, lse = compiled(q, k, v)
    dq, dk, dv = torch.autograd.grad([out, lse], inputs, [dout, dlse])
    results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    reference.check(results, reference.attention(q, k, v, mask, dout, dlse), torch.float32)
    stages = {graph.stage: graph.attention for graph in backend.graphs}
    assert stages == {"forward": ["forward"], "backward": ["backward"]}


def test_graphs_without_attention_are_run_as_they_are():
    backend = InterpretedCuda()
    merge = torch.compile(torch.logaddexp, backend=backend, fullgraph=True)
    x, y = torch.rand(2, 7, generator=torch.Generator().manual_seed(0))
    # AOTAutograd's decomposition rounds otherwise than the operator.
    torch.testing.assert_close(merge(x, y), torch.logaddexp(x, y))
    (graph,) = backend.graphs
    assert (graph.operators, graph.source, graph.calls) == (0, "", [[]])


def test_lowering_without_template_is_an_error(rng, monkeypatch):
    monkeypatch.setattr(interpreter, "lower", lambda *args: "def call(args): return args")
    q, k, v = tensors(rng, [(1, 1, 150, 16)] * 3)
    with pytest.raises(Exception, match="1 calls of FlexAttention, but 0 attention templates"):
        Operators(window, InterpretedCuda()).forward(q, k, v, *case(150, 150)[:2])


def test_device_is_gone_afterwards():
    device = torch.device("cuda", 0)
    there = torch.cuda.is_available()
    for capability, gpu in fake_device.GPUS.items():
        with fake_device.install(capability):
            assert torch.cuda.get_device_capability() == capability
            properties = DeviceProperties.create(device)
            assert properties.cc == capability[0] * 10 + capability[1]
            assert properties.multi_processor_count == gpu.multiprocessors
        assert torch.cuda.is_available() == there


@triton.jit
def product(a, b, out, n: tl.constexpr):
    i = tl.arange(0, n)
    at = i[:, None] * n + i[None, :]
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, tl.dot(x, y))


@triton.jit
def shifted(a, out, n: tl.constexpr):
    i = tl.arange(0, n)
    x = tl.load(a + i)
    tl.store(out + i, (x.to(tl.float32) + 0.3).to(out.dtype.element_ty))
    tl.store(out + n + i, x * x - x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_that_of_a_gpu(rng, dtype):
    a, b = tensors(rng, [(64, 64)] * 2, dtype)
    out = torch.empty(64, 64)
    with corrected():
        product[(1,)](a, b, out, 64)
    expected = a.double() @ b.double()
    # Products are exact in f32; sums of 64 of them are not.
    assert (out - expected).abs().max() <= 64 * 2**-24 * (a.abs().double() @ b.abs().double()).max()

    # Every number of the type that is finite, carries into the exponent and ties among them.
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = torch.where(x.isfinite() & (x.float().abs() < 1e3), x, torch.zeros((), dtype=dtype))
    out = torch.empty(2, len(x), dtype=dtype)
    with corrected():
        shifted[(1,)](x, out, len(x))
    assert torch.equal(out[0], (x.float() + 0.3).to(dtype))
    assert torch.equal(out[1], x * x - x)


def test_reference_of_options(rng):
    """Against torch's autograd of the definition."""
    q, k, v, dout = tensors(rng, [(2, 4, 9, 8), (2, 2, 13, 8), (2, 2, 13, 5), (2, 4, 9, 5)], torch.float64)
    dlse, sinks, bias = tensors(rng, [(2, 4, 9), (4,), (4, 9, 13)], torch.float64)
    mask = torch.from_numpy(rng.random((2, 1, 9, 13)) < 0.4)
    inputs = [x.requires_grad_() for x in (q, k, v, sinks)]
    scores = 0.4 * (q @ k.repeat_interleave(2, 1).mT)
    scores = (2.5 * torch.tanh(scores / 2.5) + bias).masked_fill(~mask, -torch.inf)
    scores = torch.cat([scores, sinks[:, None, None].expand(2, 4, 9, 1)], 3)
    out, lse = scores.softmax(3)[..., :-1] @ v.repeat_interleave(2, 1), scores.logsumexp(3)
    gradients = torch.autograd.grad([out, lse], inputs, [dout, dlse])
    made = reference.attention(
        q, k, v, mask, dout, dlse, scale=0.4, softcap=2.5, bias=bias, sinks=sinks
    )
    for got, expected in zip((*made.truth, made.dsinks), (out, lse, *gradients), strict=True):
        numpy.testing.assert_allclose(got, expected.detach(), rtol=1e-12, atol=1e-12)
