"""Dilated attention against the paper's equations in f64, and what looks at its operator."""

import copy
import pickle
import shutil

import dense
import longnet
import numpy
import oracle
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import longspan
from longspan.torch import DilatedAttention, attention

#: What branches may be cut with, and which queries attend to which keys then.
WITHIN = {
    "full": lambda q, k: True,
    "causal": lambda q, k: k <= q,
    "causal & documents([30, 0, 41])": lambda q, k: k <= q and (q < 30) == (k < 30),
    "window(9, 3)": lambda q, k: q - 9 <= k <= q + 3,
    "!strided(3)": lambda q, k: (q - k) % 3 != 0,
}
#: Rates that divide and that don't, short last segments, one that is longer than the sequence,
#: queries that no branch has, more offsets than heads, the same key in up to three branches.
BRANCHES = [
    [(16, 1), (32, 2), (64, 4)],
    [(10, 2), (14, 3)],
    [(1000, 1)],
    [(8, 8), (5, 3), (70, 71)],
    [(300, 1), (300, 1)],
]
#: batch, queries, keys, query heads, key heads, dim of keys, dim of values
SIZES = [(2, 71, 71, 4, 4, 8, 8), (1, 71, 71, 6, 2, 13, 7), (1, 20, 71, 4, 1, 8, 8)]


def tensors(rng, size, dtype=torch.float32):
    batch, queries, keys, heads, key_heads, dim, value_dim = size
    size = batch, heads, key_heads, queries, keys, dim, value_dim
    made = dense.tensors(rng, size, dtype)
    q, k, v, dout = (x.detach().transpose(1, 2).contiguous() for x in made)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def allowed(within, queries, keys):
    return torch.from_numpy(oracle.mask(WITHIN[within], queries, keys))


def spec(branches, **options):
    return longspan.Dilated(*zip(*branches), **options)


def run(dilated, q, k, v, dout, dlse=None, **options):
    """Everything that a call and its backward pass give, heads before tokens."""
    q, k, v, dout = (longnet.turned(x) for x in (q, k, v, dout))
    out, lse = attention(q, k, v, dilated, enable_gqa=True, return_lse=True, **options)
    outputs, arrived = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse.mT])
    dq, dk, dv = torch.autograd.grad(outputs, (q, k, v), arrived)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("branches", BRANCHES, ids=str)
@pytest.mark.parametrize("within", WITHIN)
def test_both_ways_to_write_the_truth_agree(rng, branches, within):
    q, k, v, dout = tensors(rng, SIZES[2])
    dlse = torch.from_numpy(rng.standard_normal((1, 20, 4)))
    seen = allowed(within, 20, 71)
    first, _ = longnet.truth(q, k, v, branches, seen, dout, dlse)
    second, _ = longnet.side_by_side(q, k, v, branches, seen, dout, dlse)
    for name, a, b in zip(first._fields, first, second):
        numpy.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("branches", BRANCHES, ids=str)
@pytest.mark.parametrize("within", WITHIN)
def test_f32(rng, within, branches, size):
    q, k, v, dout = tensors(rng, size)
    expected = longnet.truth(q, k, v, branches, allowed(within, *size[1:3]), dout)
    dense.check(run(spec(branches, within=within), q, k, v, dout), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("branches", BRANCHES, ids=str)
def test_half_types(rng, branches, dtype):
    q, k, v, dout = tensors(rng, SIZES[1], dtype)
    expected = longnet.truth(q, k, v, branches, allowed("causal", 71, 71), dout)
    got = run(spec(branches, within="causal"), q, k, v, dout)
    assert got["out"].dtype == got["dq"].dtype == got["dv"].dtype == dtype
    dense.check(got, expected, dtype)


def test_gradients_through_lse_scale_and_softcap(rng):
    branches = BRANCHES[0]
    q, k, v, dout = tensors(rng, SIZES[1])
    dlse = torch.from_numpy(rng.standard_normal((1, 71, 6), dtype="float32"))
    seen = allowed("causal", 71, 71)
    expected = longnet.truth(q, k, v, branches, seen, dout, dlse, scale=-0.7)
    dilated = spec(branches, within="causal")
    dense.check(run(dilated, q, k, v, dout, dlse, scale=-0.7), expected)
    capped = run(dilated, q, k, v, dout, scale=2.0, softcap=3.0)["out"]
    free = run(dilated, q, k, v, dout, scale=2.0)["out"]
    assert capped.isfinite().all() and free.isfinite().all()
    assert not torch.allclose(capped, free, atol=1e-2)


@pytest.mark.parametrize("branches", BRANCHES, ids=str)
@pytest.mark.parametrize("within", ["full", "causal"])
def test_counting_once_is_the_union(rng, branches, within):
    q, k, v, dout = tensors(rng, SIZES[0])
    got = run(spec(branches, within=within, overlap="union"), q, k, v, dout)
    seen = allowed(within, 71, 71)
    dense.check(got, longnet.side_by_side(q, k, v, branches, seen, dout, once=True))
    union = longspan.heads(
        [
            f"{within} & ({' | '.join(f'dilated({w}, {r}, {h % r})' for w, r in branches)})"
            for h in range(4)
        ]
    )
    for name, value in run(union, q, k, v, dout).items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("overlap", ["weighted", "union"])
def test_branches_and_window(rng, overlap):
    branches, within = BRANCHES[0], "causal"
    q, k, v, dout = tensors(rng, SIZES[0])
    got = run(spec(branches, within=within, also="window(9, 3)", overlap=overlap), q, k, v, dout)
    if overlap == "union":
        union = longspan.heads(
            [
                f"{within} & (window(9, 3) | {' | '.join(f'dilated({w}, {r}, {h % r})' for w, r in branches)})"
                for h in range(4)
            ]
        )
        expected = run(union, q, k, v, dout)
    else:
        # Two partial results, joined by hand.
        q, k, v, dout = (longnet.turned(x) for x in (q, k, v, dout))
        each = spec(branches, within=within), f"{within} & window(9, 3)"
        found = [attention(q, k, v, part, return_lse=True) for part in each]
        outs, lses = torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])
        out = (lses.softmax(0)[..., None] * outs).sum(0)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        expected = {"out": out, "lse": lses.logsumexp(0)}
        expected |= zip(("dq", "dk", "dv"), gradients)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_twice_and_once_by_hand():
    """Scores 0 and ln 2; branch (1, 1) has the query's own key, branch (2, 1) both."""
    q = torch.ones(1, 2, 1, 1)
    k, v = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1), torch.tensor([10.0, 40.0]).view(1, 2, 1, 1)
    scale = float(numpy.log(2))
    twice = DilatedAttention([1, 2], [1, 1], scale)(q, k, v).flatten()
    once = DilatedAttention([1, 2], [1, 1], scale, overlap="union")(q, k, v).flatten()
    # Query 0: 1 + 1 for the first key, 2 for the second. Query 1: 1, and 2 + 2.
    torch.testing.assert_close(twice, torch.tensor([100 / 4, 170 / 5]))
    torch.testing.assert_close(once, torch.tensor([90 / 3, 90 / 3]))


def test_branch_of_everything_is_full_attention(rng):
    q, k, v, dout = tensors(rng, SIZES[0])
    for within in ("full", "causal"):
        plain = run(within, q, k, v, dout)
        for name, value in run(spec([(71, 1)], within=within), q, k, v, dout).items():
            torch.testing.assert_close(value, plain[name], msg=name)


def test_queries_that_no_branch_has(rng):
    q, k, v, dout = tensors(rng, SIZES[0])
    got = run(spec([(16, 4)]), q, k, v, dout)
    at = torch.arange(71) % 16 % 4
    for head in range(4):
        dead = at != head
        assert (got["lse"][:, head, dead] == -torch.inf).all()
        for name in ("out", "dq", "dk", "dv"):
            assert (got[name][:, head, dead] == 0).all(), name
            assert (got[name][:, head, ~dead] != 0).any(), name


def test_no_tokens_and_one():
    module = DilatedAttention([4, 8], [1, 2])
    assert module(*torch.zeros(3, 2, 0, 4, 8)).shape == (2, 0, 4, 8)
    q, k, v = torch.randn(3, 2, 1, 4, 8)
    torch.testing.assert_close(module(q, k, v, is_causal=True), v)


def test_the_module(rng):
    """Causal by call, cut by pattern besides, with and without gradients, in any strides."""
    q, k, v, dout = tensors(rng, SIZES[1])
    branches = BRANCHES[0]
    for within, is_causal, rule in (
        ("full", False, "full"),
        ("full", True, "causal"),
        ("documents([30, 0, 41])", True, "causal & documents([30, 0, 41])"),
    ):
        module = DilatedAttention(*zip(*branches), within=within)
        expected = longnet.truth(q, k, v, branches, allowed(rule, 71, 71), dout)
        out = module(q, k, v, is_causal=is_causal)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        got = dict(zip(("out", "dq", "dk", "dv"), map(longnet.turned, (out, *gradients))))
        dense.check(got, expected)
        with torch.no_grad():
            other = q.transpose(1, 2).contiguous().transpose(1, 2)
            assert torch.equal(module(other, k, v, is_causal), out)


def test_the_other_spelling(rng):
    q, k, v, _ = tensors(rng, SIZES[0])
    ours = DilatedAttention([16, 32], [1, 2])(q, k, v)
    assert torch.equal(DilatedAttention(segment_length=[16, 32], dilated_ratio=[1, 2])(q, k, v), ours)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({}, ValueError, "segment_lengths is missing, expected one of the two names"),
        ({"segment_lengths": [4]}, ValueError, "dilation_rates is missing"),
        (
            {"segment_lengths": [4], "segment_length": [4], "dilation_rates": [1]},
            ValueError,
            r"segment_lengths is \[4\] and segment_length is \[4\], expected one of the two names",
        ),
        (
            {"segment_lengths": [4, 8], "dilation_rates": [1]},
            ValueError,
            "segment_lengths has 2 elements and dilation_rates has 1, expected as many",
        ),
        ({"segment_lengths": [], "dilation_rates": []}, ValueError, "branch"),
        ({"segment_lengths": [4], "dilation_rates": [0]}, ValueError, "rate"),
        ({"segment_lengths": [-4], "dilation_rates": [1]}, ValueError, "an integer is -4"),
        ({"segment_lengths": ["4"], "dilation_rates": [1]}, TypeError, "segment_lengths"),
        (
            {"segment_lengths": [4], "dilation_rates": [1], "attention_dropout": 1.0},
            ValueError,
            "attention_dropout is 1.0, expected a number from 0 to below 1",
        ),
        ({"segment_lengths": [4], "dilation_rates": [1], "op": 3}, ValueError, "op is 3"),
        (
            {"segment_lengths": [4], "dilation_rates": [1], "overlap": "twice"},
            ValueError,
            'overlap is "twice", expected "weighted"',
        ),
        (
            {"segment_lengths": [4], "dilation_rates": [1], "within": "casual"},
            ValueError,
            "causal",
        ),
        (
            {"segment_lengths": [4], "dilation_rates": [1], "within": "heads([full, causal])"},
            ValueError,
            "give patterns that are the same for all heads",
        ),
    ],
    ids=str,
)
def test_what_module_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        DilatedAttention(**arguments)


def test_what_call_refuses(rng):
    q, k, v, _ = tensors(rng, SIZES[0])
    module = DilatedAttention([16], [1])
    with pytest.raises(ValueError, match="query has 3 axes, expected 4"):
        module(q[0], k, v)
    with pytest.raises(TypeError, match="expected one type"):
        module(q, k.double(), v)
    with pytest.raises(TypeError, match="float64, expected f32"):
        module(q.double(), k.double(), v.double())
    with pytest.raises(ValueError, match="heads"):
        module(q[:, :, :3], k, v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    dilated = spec([(16, 1)])
    for name, value in {
        "key_offset": 3,
        "prefix": torch.tensor([3, 4]),
        "global_tokens": torch.ones(2, 71, dtype=torch.bool),
    }.items():
        with pytest.raises(ValueError, match=f"{name}.*dilated attention has none"):
            attention(q, k, v, dilated, **{name: value})
    x = q.detach()
    with pytest.raises(ValueError, match="key_offset: dilated attention has none"):
        longspan.attention(x, x, x, dilated, key_offset=3)
    both = {"key_padding": torch.tensor([[0, 71], [3, 50]]), "cu_seqlens": torch.tensor([0, 30, 71])}
    with pytest.raises(ValueError, match="key_padding beside cu_seqlens: expected one of both"):
        attention(q, k, v, dilated, **both)
    with pytest.raises(ValueError, match="padded or packed already"):
        attention(q, k, v, dilated.packed_cu_seqlens([0, 30, 71]), key_padding=both["key_padding"])


def test_offsets_of_queries(rng):
    """The middle of a sequence, by number and by tensor, and its end: layouts that were kept for the
    one are not taken for the other."""
    q, k, v, dout = tensors(rng, SIZES[0])
    dilated = spec(BRANCHES[0], within="causal")
    whole = run(dilated, q, k, v, dout)["out"]
    part = q[:, 30:50]
    for offset in (30, torch.tensor(30)):
        got = run(dilated, part, k, v, dout[:, 30:50], query_offset=offset)["out"]
        torch.testing.assert_close(got, whole[:, :, 30:50])
        with torch.no_grad():
            turned = (longnet.turned(x) for x in (part, k, v))
            assert torch.equal(attention(*turned, dilated, query_offset=offset), got)
            last = (longnet.turned(x) for x in (q[:, 51:], k, v))
            torch.testing.assert_close(attention(*last, dilated), whole[:, :, 51:])


def test_arrays_have_the_same_bits(rng):
    q, k, v, dout = tensors(rng, SIZES[1])
    dilated = spec(BRANCHES[0], within="causal")
    got = run(dilated, q, k, v, dout)
    arrays = [x.detach().numpy() for x in (q, k, v)]
    output = longspan.forward(*arrays, dilated, order="bshd")
    gradients = longspan.backward(*arrays, output, dout.numpy(), dilated, order="bshd")
    for name, value in {"out": output.out, **gradients._asdict()}.items():
        assert numpy.array_equal(value.swapaxes(1, 2), got[name].detach().numpy()), name


def test_objects_compare_print_and_travel():
    dilated = spec(BRANCHES[0], within="causal & documents([3, 4])", overlap="union")
    assert dilated.segment_lengths == [16, 32, 64] and dilated.dilation_rates == [1, 2, 4]
    assert dilated.within == longspan.Pattern("causal & documents([3, 4])")
    for other in (copy.copy(dilated), copy.deepcopy(dilated), pickle.loads(pickle.dumps(dilated))):
        assert other == dilated and hash(other) == hash(dilated)
    assert eval(repr(dilated)) == dilated
    for other in (
        spec(BRANCHES[1], within="causal & documents([3, 4])", overlap="union"),
        spec(BRANCHES[0], within="causal", overlap="union"),
        spec(BRANCHES[0], within="causal & documents([3, 4])"),
        spec(BRANCHES[0], within="causal & documents([3, 4])", also="sinks(2)", overlap="union"),
        3,
    ):
        assert other != dilated
    more = spec(BRANCHES[0], also="window(4, 0)")
    assert more.also == longspan.Pattern("window(4, 0)") and dilated.also is None
    assert eval(repr(more)) == pickle.loads(pickle.dumps(more)) == more
    module = DilatedAttention([16], [2], 0.5, within="causal", also="sinks(2)", overlap="union")
    assert str(module) == (
        "DilatedAttention([16], [2], softmax_scale=0.5, within='causal', also='sinks(2)', "
        "overlap='union')"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(rng, dtype):
    q, k, v, dout = tensors(rng, SIZES[0])
    module = DilatedAttention([16, 32], [1, 2])
    with torch.autocast("cpu", dtype):
        out = module(q, k.to(dtype), v, is_causal=True)
    assert out.dtype == dtype
    out.backward(dout.to(dtype))
    assert q.grad.dtype == torch.float32
    assert torch.equal(module(*(x.to(dtype) for x in (q, k, v)), is_causal=True), out)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(rng, reentrant):
    q, k, v, dout = tensors(rng, SIZES[0])
    module = DilatedAttention([16, 32], [1, 2])
    expected = torch.autograd.grad(module(q, k, v, True), (q, k, v), dout)
    checkpoint(module, q, k, v, True, use_reentrant=reentrant).backward(dout)
    for got, value in zip((q.grad, k.grad, v.grad), expected):
        assert torch.equal(got, value)


def test_second_derivative_is_refused(rng):
    q, k, v, dout = tensors(rng, SIZES[0])
    out = DilatedAttention([16, 32], [1, 2])(q, k, v)
    (dq,) = torch.autograd.grad(out, q, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(dq.sum(), k)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("offset", [None, torch.tensor(5)], ids=["last", "offset"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, 6)], ids=["", "sinks"])
def test_opcheck(rng, offset, dtype, sinks):
    made = dense.tensors(rng, (2, 6, 2, 47, 61, 13, 7), dtype)
    q, k, v, dout = made
    also = "window(3, 0)" if offset is None else None
    key_padding = torch.tensor([[0, 61], [7, 50]]) if offset is None else None
    none = (None, None, 0, None, None)
    places = (key_padding, None, None, offset)
    how = ([16, 32], [1, 2], "causal", also, "weighted", *places, 0.3, 2.0, sinks, *none)
    torch.library.opcheck(torch.ops.longspan.dilated_attention.default, (q, k, v, *how))
    out, lse, rest = (x.detach() for x in torch.ops.longspan.dilated_attention(q, k, v, *how))
    q, k, v = (x.detach() for x in (q, k, v))
    for dlse in (None, torch.ones_like(lse)):
        wanted = [sinks is not None, False, False]
        arguments = (q, k, v, out, lse, rest, dout, dlse, wanted, *how)
        torch.library.opcheck(torch.ops.longspan.dilated_attention_backward.default, arguments)


@pytest.fixture
def forget():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("forget")
def test_twenty_lengths_compile_at_most_twice(rng):
    module = DilatedAttention([8, 16], [1, 2], within="window(9, 3)")

    def step(q, k, v):
        return module(q * 2, k, v, is_causal=True).flatten(2) + 1

    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for length in range(5, 25):
        q, k, v, _ = tensors(rng, (1, length, length + 3, 2, 2, 8, 8))
        got, expected = (torch.autograd.grad(f(q, k, v).sum(), (q, k, v)) for f in (fast, step))
        torch.testing.assert_close(got, expected)
        assert torch.equal(fast(q, k, v), step(q, k, v))
    assert counter.frame_count <= 2


@pytest.mark.usefixtures("forget")
@pytest.mark.filterwarnings("ignore:Skipping serialization")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
def test_inductor(rng):
    module = DilatedAttention([8, 16], [1, 2])

    def step(q, k, v):
        return module(q * 2, k, v, is_causal=True).flatten(2).tanh()

    fast = torch.compile(step, fullgraph=True, dynamic=True)
    for length in (20, 33):
        q, k, v, _ = tensors(rng, (1, length, length, 2, 2, 8, 8))
        got, expected = (torch.autograd.grad(f(q, k, v).sum(), (q, k, v)) for f in (fast, step))
        torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("forget")
def test_other_branches_are_another_graph(rng):
    q, k, v, _ = tensors(rng, SIZES[0])
    fast = torch.compile(
        lambda module, causal: module(q, k, v, causal), backend="aot_eager", fullgraph=True
    )
    for segments, rates, causal in (
        ([16], [1], False),
        ([16], [1], True),
        ([16], [2], True),
        ([32], [2], True),
    ):
        module = DilatedAttention(segments, rates)
        assert torch.equal(fast(module, causal), module(q, k, v, causal))
