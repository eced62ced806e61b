"""Forward and backward against the oracle."""

import numpy
import oracle
import pytest

import longspan

#: Patterns beside the predicate they stand for, read from its definition.
RULES = {
    "full": lambda q, k: True,
    "causal": lambda q, k: k <= q,
    "window(20, 3)": lambda q, k: q - 20 <= k <= q + 3,
    "causal & sliding_window(31)": lambda q, k: q - 30 <= k <= q,
    "causal & (window(16, 0) | sinks(5))": lambda q, k: k <= q and (q - k <= 16 or 0 <= k < 5),
    "global_tokens(3) | window(7, 7)": lambda q, k: 0 <= q < 3 or 0 <= k < 3 or abs(q - k) <= 7,
    "!strided(3)": lambda q, k: (q - k) % 3 != 0,
    "dilated(40, 4, 1)": lambda q, k: q >= 0
    and k >= 0
    and q // 40 == k // 40
    and (q % 40) % 4 == 1 == (k % 40) % 4,
    "blocks_dilated(16, [2])": lambda q, k: abs(q // 16 - k // 16) in (0, 2) and q >= 0 and k >= 0,
}

#: batch, query heads, key heads, queries, keys, dim of keys, dim of values: primes, one token, no
#: tokens, fewer queries than keys, more queries than keys (which leaves rows empty).
SIZES = [
    (1, 1, 1, 64, 64, 16, 16),
    (2, 6, 2, 97, 97, 13, 7),
    (1, 4, 1, 31, 131, 32, 32),
    (1, 2, 2, 151, 67, 8, 24),
    (3, 2, 1, 1, 89, 64, 64),
    (1, 1, 1, 1, 1, 1, 1),
]


def tensors(rng, size, dtype="float32"):
    batch, heads, key_heads, queries, keys, dim, value_dim = size
    shapes = [
        (batch, heads, queries, dim),
        (batch, key_heads, keys, dim),
        (batch, key_heads, keys, value_dim),
        (batch, heads, queries, value_dim),
    ]
    return [rng.standard_normal(shape, dtype="float32").astype(dtype) for shape in shapes]


def check_all(q, k, v, dout, pattern, mask, dtype="float32", dlse=None, score=None, **options):
    scale = options.get("scale")
    truth, gross = oracle.attention(q, k, v, mask, dout, dlse, scale, score)
    output = longspan.forward(q, k, v, pattern, **options)
    gradients = longspan.backward(q, k, v, output, dout, pattern, dlse=dlse, **options)
    for name in ("out", "lse"):
        oracle.check(name, getattr(output, name), truth, gross, dtype)
    for name in ("dq", "dk", "dv"):
        oracle.check(name, getattr(gradients, name), truth, gross, dtype)
    out, lse = longspan.attention(q, k, v, pattern, return_lse=True, **options)
    oracle.check("out", out, truth, gross, dtype)
    oracle.check("lse", lse, truth, gross, dtype)
    # Up to 16 queries of heads that share keys have the order of the decode kernel where no backward
    # pass follows; all others have one order.
    if q.shape[2] > 16:
        assert numpy.array_equal(out, output.out)
        assert numpy.array_equal(lse, output.lse)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("text", RULES)
def test_f32(rng, text, size):
    q, k, v, dout = tensors(rng, size)
    check_all(q, k, v, dout, text, oracle.mask(RULES[text], q.shape[2], k.shape[2]))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("text", ["full", "causal & (window(16, 0) | sinks(5))"])
def test_f16(rng, text, size):
    q, k, v, dout = tensors(rng, size, "float16")
    check_all(q, k, v, dout, text, oracle.mask(RULES[text], q.shape[2], k.shape[2]), "float16")


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("text", ["full", "causal & (window(16, 0) | sinks(5))"])
def test_bf16(rng, text, size):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v, dout = tensors(rng, size, ml_dtypes.bfloat16)
    mask = oracle.mask(RULES[text], q.shape[2], k.shape[2])
    check_all(q, k, v, dout, text, mask, "bfloat16")
    assert longspan.attention(q, k, v, text).dtype == ml_dtypes.bfloat16


def test_exact_bf16_is_rounded_f32(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v, _ = tensors(rng, (1, 2, 2, 211, 211, 24, 24), ml_dtypes.bfloat16)
    wide = [x.astype("float32") for x in (q, k, v)]
    exact = longspan.attention(q, k, v, "causal", precision="widened").astype("float32")
    rounded = longspan.attention(*wide, "causal").astype(ml_dtypes.bfloat16).astype("float32")
    # A number that lies between two of bf16 may round to the other one.
    assert numpy.mean(exact != rounded) < 1e-3


def test_queries_that_see_nothing(rng):
    q, k, v, dout = tensors(rng, (1, 2, 2, 40, 40, 8, 8))
    output = longspan.forward(q, k, v, "!full")
    assert (output.out == 0).all()
    assert (output.lse == -numpy.inf).all()
    for gradient in longspan.backward(q, k, v, output, dout, "!full"):
        assert (gradient == 0).all()


@pytest.mark.parametrize("size", [(0, 2, 2, 5, 5, 4, 4), (1, 2, 2, 0, 5, 4, 4), (1, 2, 2, 5, 0, 4, 4)])
def test_without_tokens(rng, size):
    q, k, v, dout = tensors(rng, size)
    output = longspan.forward(q, k, v, "full")
    assert output.out.shape == dout.shape
    assert (output.out == 0).all()
    dq, dk, dv = longspan.backward(q, k, v, output, dout, "full")
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


def test_layout_pattern_and_text_agree(rng):
    q, k, v, _ = tensors(rng, (1, 2, 2, 200, 200, 8, 8))
    text = "causal & window(50, 0)"
    pattern = longspan.Pattern(text)
    expected = longspan.attention(q, k, v, text)
    assert numpy.array_equal(longspan.attention(q, k, v, pattern), expected)
    assert numpy.array_equal(longspan.attention(q, k, v, pattern.compile(200)), expected)
    assert numpy.array_equal(longspan.attention(q, k, v, text, threads=1), expected)


def test_layouts_are_compiled_once(rng):
    from longspan import _longspan

    q, k, v, _ = tensors(rng, (1, 1, 1, 1009, 1009, 4, 4))
    longspan.attention(q, k, v, "window(11, 12)")
    before = _longspan.cache_stats()
    for _ in range(5):
        longspan.attention(q, k, v, "window(11, 12)")
    after = _longspan.cache_stats()
    assert (after["misses"], after["hits"]) == (before["misses"], before["hits"] + 5)
    assert after["bytes"] <= 64 << 20


def test_heads(rng):
    texts = ["causal", "window(5, 5)", "causal & strided(4)", "full"]
    rules = [lambda q, k: k <= q, lambda q, k: abs(q - k) <= 5]
    rules += [lambda q, k: k <= q and (q - k) % 4 == 0, lambda q, k: True]
    q, k, v, dout = tensors(rng, (2, 4, 2, 70, 83, 8, 8))
    mask = numpy.stack([oracle.mask(rule, 70, 83) for rule in rules])
    pattern = longspan.heads(texts)
    check_all(q, k, v, dout, pattern, mask)
    check_all(q, k, v, dout, pattern.compile(70, 83), mask)
    ranges = [(0, 83), (20, 60)]
    valid = numpy.array([[first <= key < end for key in range(83)] for first, end in ranges])
    layout = pattern.compile(70, 83, key_padding=ranges)
    check_all(q, k, v, dout, layout, mask & valid[:, None, None, :])


def test_offsets(rng):
    q, k, v, dout = tensors(rng, (1, 1, 1, 20, 90, 8, 8))
    rule = RULES["causal & (window(16, 0) | sinks(5))"]
    mask = oracle.mask(rule, 20, 90, query_offset=40, key_offset=3)
    options = {"query_offset": 40, "key_offset": 3}
    check_all(q, k, v, dout, "causal & (window(16, 0) | sinks(5))", mask, **options)


def test_key_padding(rng):
    q, k, v, dout = tensors(rng, (3, 2, 2, 77, 77, 8, 8))
    ranges = [(0, 77), (30, 77), (0, 41)]
    valid = numpy.array([[first <= key < end for key in range(77)] for first, end in ranges])
    mask = oracle.mask(RULES["causal"], 77, 77) & valid[:, None, None, :]
    check_all(q, k, v, dout, "causal", mask, key_padding=ranges)
    layout = longspan.causal().compile(77, key_padding=ranges)
    assert numpy.array_equal(
        longspan.attention(q, k, v, layout), longspan.attention(q, k, v, "causal", key_padding=ranges)
    )


@pytest.mark.parametrize("block", [16, 37, 128, 256])
def test_block_sizes(rng, block):
    q, k, v, dout = tensors(rng, (1, 1, 1, 150, 150, 8, 8))
    check_all(q, k, v, dout, "causal", oracle.mask(RULES["causal"], 150, 150), block=block)


def test_order_bshd_reads_the_same_memory(rng):
    q, k, v, dout = tensors(rng, (2, 4, 2, 61, 75, 8, 12))
    turned = [x.transpose(0, 2, 1, 3) for x in (q, k, v, dout)]
    expected = longspan.forward(q, k, v, "causal")
    got = longspan.forward(*turned[:3], "causal", order="bshd")
    assert numpy.array_equal(got.out.transpose(0, 2, 1, 3), expected.out)
    assert numpy.array_equal(got.lse, expected.lse)
    gradients = longspan.backward(*turned[:3], got, turned[3], "causal", order="bshd")
    for a, b in zip(gradients, longspan.backward(q, k, v, expected, dout, "causal")):
        assert numpy.array_equal(a.transpose(0, 2, 1, 3), b)


def test_any_strides(rng):
    q, k, v, dout = tensors(rng, (2, 4, 4, 45, 45, 16, 16))
    mask = oracle.mask(RULES["causal"], 45, 45)
    reversed_tokens = q[:, :, ::-1]
    every_other = numpy.repeat(k, 2, axis=3)[..., ::2]
    expanded = numpy.broadcast_to(v[:, :1], v.shape)
    backwards = dout[..., ::-1]
    check_all(reversed_tokens, every_other, expanded, backwards, "causal", mask)
    fortran = numpy.asfortranarray(q)
    assert numpy.array_equal(
        longspan.attention(fortran, k, v, "causal"), longspan.attention(q, k, v, "causal")
    )


def test_out(rng):
    q, k, v, _ = tensors(rng, (2, 4, 2, 61, 61, 8, 12))
    expected = longspan.attention(q, k, v, "causal")
    room = numpy.full((2, 61, 4, 24), 7, dtype="float32")
    out = room.transpose(0, 2, 1, 3)[..., ::2]
    assert longspan.attention(q, k, v, "causal", out=out) is out
    assert numpy.array_equal(out, expected)
    assert (room[..., 1::2] == 7).all()
    assert longspan.forward(q, k, v, "causal", out=out).out is out


def softcap(cap):
    def score(scores):
        squashed = numpy.tanh(scores / cap)
        return cap * squashed, 1 - squashed**2

    return score


def test_options_are_honoured(rng):
    q, k, v, dout = tensors(rng, (1, 2, 2, 80, 80, 8, 8))
    mask = oracle.mask(RULES["causal"], 80, 80)
    # Large enough that a cap which is ignored shows.
    check_all(q, k, v, dout, "causal", mask, scale=2.0, score=softcap(3.0), softcap=3.0)
    check_all(q, k, v, dout, "causal", mask, scale=-0.7)
    slopes = numpy.array([0.5, 0.25])
    distance = abs(numpy.arange(80)[:, None] - numpy.arange(80)[None])

    def alibi(scores):
        return scores - slopes[:, None, None] * distance, numpy.ones_like(scores)

    check_all(q, k, v, dout, "causal", mask, score=alibi, alibi_slopes=slopes)
    check_all(q, k, v, dout, "causal", mask, isa="portable", threads=2)


def test_gradients_through_lse(rng):
    q, k, v, dout = tensors(rng, (1, 2, 1, 50, 50, 8, 8))
    dlse = rng.standard_normal((1, 2, 50), dtype="float32")
    check_all(q, k, v, dout, "causal", oracle.mask(RULES["causal"], 50, 50), dlse=dlse)


def test_backward_without_the_rest(rng):
    q, k, v, dout = tensors(rng, (1, 1, 1, 30, 30, 8, 8))
    output = longspan.forward(q, k, v, "causal")
    exact = longspan.backward(q, k, v, output, dout, "causal")
    near = longspan.backward(q, k, v, (output.out, output.lse), dout, "causal")
    for a, b in zip(exact, near):
        # Half an ulp of a log-sum-exp below 16.
        assert numpy.allclose(a, b, rtol=0, atol=1e-5)


def test_finite_differences(rng):
    """The oracle's own gradients, and ours, against differences of the oracle's output in f64."""
    q, k, v, dout = tensors(rng, (1, 2, 1, 6, 7, 3, 2))
    mask = oracle.mask(RULES["causal"], 6, 7)
    output = longspan.forward(q, k, v, "causal")
    gradients = longspan.backward(q, k, v, output, dout, "causal")
    inputs = [x.astype("float64") for x in (q, k, v)]
    step = 1e-5
    for index, got in enumerate(gradients):
        for at in numpy.ndindex(*got.shape):
            sums = []
            for sign in (1, -1):
                moved = [x.copy() for x in inputs]
                moved[index][at] += sign * step
                truth, _ = oracle.attention(*moved, mask, dout)
                sums.append((truth.out * dout).sum())
            # Differences are exact to step², sums of a few terms to some f32 roundings.
            assert abs((sums[0] - sums[1]) / (2 * step) - got[at]) < 5e-6


def test_threads_and_calls_give_the_same_bits(rng):
    # Below 64 blocks of 64 x 64 at 64 + 64 dims a call stays on one thread; these are 2 heads of 136.
    q, k, v, dout = tensors(rng, (1, 2, 2, 1000, 1000, 64, 64))
    results = []
    for threads in (1, 2, 3):
        output = longspan.forward(q, k, v, "causal", threads=threads)
        gradients = longspan.backward(q, k, v, output, dout, "causal", threads=threads)
        results.append([*output, *gradients])
    for other in results[1:]:
        for a, b in zip(results[0], other):
            assert numpy.array_equal(a, b)
