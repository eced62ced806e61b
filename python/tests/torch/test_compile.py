"""What looks at the operator: torch.compile, opcheck, checkpoint, transforms."""

import shutil

import dense
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import longspan
from longspan.torch import attention, flash_attention

NOTHING = (None,) * 7

# Torch's own tools look at .grad of tensors that are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


#: Bias table, slopes, `bias_right`, dropout and its seed: none, and all.
ADDITIONS = [
    (None, None, 0, None, None),
    (torch.linspace(-1, 1, 54).view(6, 9), torch.linspace(0, 0.5, 6), 2, 0.25, torch.tensor(3)),
]


@pytest.fixture(autouse=True)
def forget():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function):
    """Compiled for all lengths, and how often that took."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=True), counter


@pytest.mark.parametrize(
    "places",
    [
        NOTHING,
        (torch.tensor([[0, 61], [3, 50]]), *NOTHING[1:]),
        (torch.arange(61).expand(2, 61) > 20, *NOTHING[1:]),
        (None, torch.tensor([0, 9, 47]), torch.tensor([0, 30, 61]), *NOTHING[3:]),
        (*NOTHING[:3], torch.tensor(5), torch.tensor(-2), None, None),
        (*NOTHING[:5], torch.arange(61).expand(2, 61) % 7 == 3, torch.tensor([0, 20])),
    ],
    ids=["plain", "ranges", "mask", "packed", "offsets", "global"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, 6)], ids=["", "sinks"])
def test_opcheck(rng, places, dtype, sinks):
    q, k, v, dout = dense.tensors(rng, (2, 6, 2, 47, 61, 13, 7), dtype)
    how = ("causal", *places, 0.3, 2.0, sinks, *ADDITIONS[sinks is not None])
    torch.library.opcheck(torch.ops.longspan.attention.default, (q, k, v, *how))
    out, lse, rest = (x.detach() for x in torch.ops.longspan.attention(q, k, v, *how))
    q, k, v = (x.detach() for x in (q, k, v))
    for dlse in (None, torch.ones_like(lse)):
        wanted = [sinks is not None] * 3
        arguments = (q, k, v, out, lse, rest, dout, dlse, wanted, *how)
        torch.library.opcheck(torch.ops.longspan.attention_backward.default, arguments)


def test_fifty_lengths_compile_at_most_twice(rng):
    def step(q, k, v):
        out, lse = attention(q * 2, k, v, "causal & window(9, 0)", return_lse=True)
        return out.transpose(1, 2).flatten(2) + 1, lse

    fast, counter = compiled(step)
    for length in range(5, 55):
        q, k, v, _ = dense.tensors(rng, (1, 2, 2, length, length + 3, 8, 8))
        got, expected = (torch.autograd.grad(sum(x.sum() for x in f(q, k, v)), (q, k, v)) for f in (fast, step))
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(fast(q, k, v), step(q, k, v))
    assert counter.frame_count <= 2


# Torch 2.6 says so of itself.
@pytest.mark.filterwarnings("ignore:Skipping serialization")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
def test_inductor(rng):
    def step(q, k, v):
        out, lse = attention(q * 2, k, v, "causal & window(9, 0)", return_lse=True)
        return out.transpose(1, 2).flatten(2).tanh(), lse

    fast = torch.compile(step, fullgraph=True, dynamic=True)
    for length in (20, 33):
        q, k, v, _ = dense.tensors(rng, (1, 2, 2, length, length + 3, 8, 8))
        got, expected = (torch.autograd.grad(sum(x.sum() for x in f(q, k, v)), (q, k, v)) for f in (fast, step))
        torch.testing.assert_close(got, expected)


def test_fifty_packings_offsets_and_paddings_compile_at_most_twice(rng):
    def step(q, bounds, offset, padding):
        packed = attention(q, q, q, "causal", cu_seqlens=bounds)
        moved = attention(q, q, q, "causal & sinks(7)", query_offset=offset, key_offset=offset - 3)
        return packed + moved + attention(q, q, q, "causal", key_padding=padding)

    fast, counter = compiled(step)
    for number in range(50):
        tokens = 20 + number
        q, *_ = dense.tensors(rng, (2, 2, 2, tokens, tokens, 8, 8))
        cuts = sorted(rng.integers(0, tokens, size=2 + number % 7).tolist())
        bounds = torch.tensor([0, *cuts, tokens])
        padding = torch.tensor([[0, tokens], [number % 9, tokens - number % 5]])
        arguments = (q, bounds, 2 + number, padding)
        torch.testing.assert_close(fast(*arguments), step(*arguments))
    assert counter.frame_count <= 2


def test_fifty_global_token_sets_prefixes_and_packings_compile_at_most_twice(rng):
    def step(q, marks, prefix, bounds, held):
        marked = attention(q, q, q, "window(3, 3)", global_tokens=marks)
        packed = attention(q, q, q, "causal", cu_seqlens=bounds)
        return marked + packed + attention(q, q, q, "causal", prefix=prefix, key_padding=held)

    fast, counter = compiled(step)
    for number in range(50):
        tokens = 20 + number
        q, *_ = dense.tensors(rng, (2, 2, 2, tokens, tokens, 8, 8))
        marks, held = (torch.from_numpy(rng.random((2, tokens)) < share) for share in (0.1, 0.8))
        cuts = rng.integers(0, tokens, size=(2, 2 + number % 7))
        cuts.sort(axis=1)
        bounds = torch.nn.functional.pad(torch.from_numpy(cuts), (1, 0))
        bounds = torch.nn.functional.pad(bounds, (0, 1), value=tokens)
        prefix = torch.from_numpy(rng.integers(0, tokens, size=2))
        arguments = (q, marks, prefix, bounds, held)
        torch.testing.assert_close(fast(*arguments), step(*arguments))
    assert counter.frame_count <= 2


def test_another_pattern_is_another_graph(rng):
    """Never the one that came first."""
    q, k, v, _ = dense.tensors(rng, (1, 2, 2, 40, 40, 8, 8))
    fast, _ = compiled(lambda pattern: attention(q, k, v, pattern))
    for text in ("full", "causal", "window(3, 3)", "full"):
        assert torch.equal(fast(text), attention(q, k, v, text))
    for pattern in (longspan.causal(), longspan.window(3, 3), longspan.causal()):
        try:
            out = fast(pattern)
        except torch._dynamo.exc.InternalTorchDynamoError as error:
            # Older versions take text alone.
            assert "is not a constant" in str(error)
            assert int(torch.__version__.split(".")[1]) < 15
        else:
            assert torch.equal(out, attention(q, k, v, pattern))


def test_layout_is_refused_in_graph(rng):
    q, *_ = dense.tensors(rng, (1, 2, 2, 40, 40, 8, 8))
    layout = longspan.causal().compile(40)
    fast, _ = compiled(lambda q: attention(q, q, q, layout))
    # Older versions keep the message to themselves.
    message = "expected a Pattern or its text under torch.compile|Observed exception"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        fast(q)


def test_flash_attention_compiles(rng):
    q, k, v, _ = (x.transpose(1, 2) for x in dense.tensors(rng, (1, 4, 2, 40, 50, 8, 8)))

    def step(q, k, v):
        return flash_attention(q, k, v, causal=True, window_size=(9, -1))

    fast, _ = compiled(step)
    assert torch.equal(fast(q, k, v), step(q, k, v))


@pytest.mark.parametrize("pattern", ["causal", longspan.causal().compile(40)], ids=["text", "layout"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(rng, pattern, reentrant):
    q, k, v, dout = dense.tensors(rng, (1, 2, 2, 40, 40, 8, 8))
    expected = torch.autograd.grad(attention(q, k, v, pattern), (q, k, v), dout)
    out = checkpoint(attention, q, k, v, pattern, use_reentrant=reentrant)
    out.backward(dout)
    for got, value in zip((q.grad, k.grad, v.grad), expected):
        assert torch.equal(got, value)


@pytest.mark.parametrize("pattern", ["causal", longspan.causal().compile(40)], ids=["text", "layout"])
def test_second_derivative_is_refused(rng, pattern):
    q, k, v, dout = dense.tensors(rng, (1, 2, 2, 40, 40, 8, 8))
    (dq,) = torch.autograd.grad(attention(q, k, v, pattern), q, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(dq.sum(), k)


def test_inputs_changed_before_the_backward_pass_are_noticed(rng):
    q, k, v, dout = dense.tensors(rng, (2, 2, 2, 40, 40, 8, 8))
    padding = torch.tensor([[0, 40], [0, 20]])
    out = attention(q, k, v, "causal", key_padding=padding)
    padding[1, 1] = 30
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_loop(rng):
    """Torch's own fallback, with its warning."""
    q = torch.from_numpy(rng.standard_normal((3, 1, 2, 40, 8), dtype="float32"))
    out = torch.vmap(lambda q: attention(q, q, q, "causal"))(q)
    for one, x in zip(out, q):
        assert torch.equal(one, attention(x, x, x, "causal"))


def test_modes_see_the_operator(rng):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names = []
    q = torch.zeros(1, 2, 40, 8)
    with Names():
        attention(q, q, q, "causal")
    assert "longspan.attention.default" in names
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(q)
        assert attention(fake, fake, fake, "causal").shape == q.shape


def test_lazy_negation_is_honoured():
    """The imaginary part of a conjugate: its sign is a flag."""
    x = torch.randn(1, 2, 40, 8, dtype=torch.complex64)
    negated = x.conj().imag
    assert negated.is_neg()
    plain = -x.imag
    assert torch.equal(attention(negated, plain, plain, "causal"), attention(plain, plain, plain, "causal"))
    assert torch.equal(attention(plain, plain, negated, "causal"), attention(plain, plain, plain, "causal"))
