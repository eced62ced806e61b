"""Steps of a cache against one call over all tokens."""

import numpy
import pytest

import longspan

PATTERN = "causal & (window(40, 0) | sinks(5))"


def normal(shape, seed, dtype="float32"):
    return numpy.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_any_chunking_is_one_call():
    for dtype, bound in (("float32", 1e-5), ("float16", 4e-3)):
        q, k, v = (normal((2, heads, 200, 16), heads, dtype) for heads in (4, 2, 1))
        v = normal((2, 2, 200, 24), 9, dtype)
        options = {"alibi_slopes": [0.5, 0.25, 0.1, 0.0], "scale": 0.3, "threads": 2}
        whole, lse = longspan.attention(q, k, v, PATTERN, return_lse=True, **options)
        cache = longspan.KvCache(PATTERN, **options)
        first = 0
        for tokens in (90, 1, 1, 1, 60, 3, 1, 43):
            part = (slice(None), slice(None), slice(first, first + tokens))
            out, rows = cache.step(q[part], k[part], v[part], return_lse=True)
            assert out.dtype == q.dtype
            numpy.testing.assert_allclose(out, whole[part], atol=bound)
            numpy.testing.assert_allclose(rows, lse[part], atol=bound)
            first += tokens
        assert cache.lengths == [200, 200]


def test_ragged_batches_are_sequences_of_their_own():
    x = normal((3, 1, 120, 8), 1)
    lengths = [[70, 3, 40], [1, 1, 1], [0, 1, 1], [1, 100, 0]]
    cache = longspan.KvCache(PATTERN, order="bhsd")
    ends = [0, 0, 0]
    for own in lengths:
        most = max(own)
        chunk = numpy.zeros((3, 1, most, 8), "float32")
        for entry, (end, length) in enumerate(zip(ends, own)):
            chunk[entry, :, :length] = x[entry, :, end : end + length]
        out = cache.step(chunk, chunk, chunk, own)
        for entry, (end, length) in enumerate(zip(ends, own)):
            alone = longspan.attention(*[x[entry : entry + 1, :, : end + length]] * 3, PATTERN)
            numpy.testing.assert_allclose(out[entry, :, :length], alone[0, :, end:], atol=1e-5)
            assert not out[entry, :, length:].any()
        ends = [end + length for end, length in zip(ends, own)]
    assert cache.lengths == ends


def test_windows_bound_the_cache_and_the_order_of_axes():
    cache = longspan.KvCache("causal & (window(40, 0) | sinks(5))", order="bshd")
    x = normal((1, 1000, 2, 4), 3)
    for i in range(1000):
        cache.step(*[x[:, i : i + 1]] * 3)
    assert cache.slots <= 40 + 5 + 64
    assert cache.nbytes == 2 * 2 * cache.slots * 4 * 4
    out = numpy.empty((1, 1, 2, 4), "float32")
    assert cache.step(*[x[:, :1]] * 3, out=out) is out
    cache.clear(0)
    assert cache.lengths == [0]
    assert repr(cache).startswith("<longspan.KvCache of causal & (window(40, 0) | sinks(5)), lengths [0], ")


def test_patterns_per_entry_and_head():
    x = normal((2, 2, 30, 4), 5)
    patterns = ["causal", "heads([causal & window(2, 0), causal & sinks(1)])"]
    whole = longspan.attention(x, x, x, patterns)
    cache = longspan.KvCache(patterns)
    outs = [cache.step(*[x[:, :, i : i + 3]] * 3) for i in range(0, 30, 3)]
    numpy.testing.assert_allclose(numpy.concatenate(outs, 2), whole, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: longspan.KvCache(longspan.causal().compile(5)), "pattern is a Layout, expected a"),
        (lambda x: longspan.KvCache(longspan.Dilated([8], [1])), "pattern is a Dilated, expected a"),
        (lambda x: longspan.KvCache("causal", block=32), "block: a cache has the positions"),
        (lambda x: longspan.KvCache("causal", key_padding=[(0, 1)]), "key_padding: a cache has"),
        (lambda x: longspan.KvCache("causal", colour=3), 'KvCache() has no argument "colour"'),
        (lambda x: longspan.KvCache("causal").step(x, x[:, :, :2], x), "v has tokens 3, expected 2"),
        (lambda x: longspan.KvCache("causal").step(x, x, x, [4]), "k has tokens 3, expected 4"),
        (lambda x: longspan.KvCache("causal").step(x, x, x, [1, 1]), "lengths has 2 elements"),
        (lambda x: longspan.KvCache("documents([5, 9])").step(x, x, x), "14"),
        (lambda x: longspan.KvCache("causal").clear(3), "entry is 3, expected one below 0"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises((ValueError, TypeError)) as error:
        make(normal((1, 1, 3, 4), 0))
    assert message in str(error.value)


def test_other_elements_are_refused():
    cache = longspan.KvCache("causal")
    x = normal((1, 1, 3, 4), 0)
    cache.step(x, x, x)
    x = x.astype("float16")
    with pytest.raises(ValueError, match="elements of f16, expected f32"):
        cache.append(x, x)
    assert cache.lengths == [3]
