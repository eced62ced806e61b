"""Attention weights of chosen rows, against a matrix of scores in f64; pictures of them."""

import xml.etree.ElementTree

import numpy
import oracle
import pytest

import longspan

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 4, 61, 90, 16
ROWS = [60, 0, 33]
LOGITS = numpy.array([0.5, -1.0, 2.0, -numpy.inf], dtype="float32")
SLOPES = [0.5, 0.25, 0.125, 0.0625]


def tensors(rng):
    q = rng.standard_normal((BATCH, HEADS, QUERIES, DIM), dtype="float32")
    return q, *(rng.standard_normal((BATCH, 2, KEYS, DIM), dtype="float32") for _ in range(2))


def naive(q, k, mask, rows, scale=None, softcap=None, bias=0.0, sinks=None):
    """Weights in f64; ``mask`` broadcasts to (batch, heads, queries, keys)."""
    q, k = (numpy.asarray(x, dtype="float64") for x in (q, k))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = scale * q @ k.repeat(q.shape[1] // k.shape[1], axis=1).swapaxes(2, 3)
    if softcap is not None:
        scores = softcap * numpy.tanh(scores / softcap)
    scores = numpy.exp(numpy.where(mask, scores + bias, -numpy.inf))
    total = scores.sum(3, keepdims=True)
    if sinks is not None:
        total = total + numpy.exp(sinks.astype("float64"))[:, None, None]
    return (scores / numpy.where(total > 0, total, 1))[:, :, rows]


def distances():
    return (numpy.arange(QUERIES) + KEYS - QUERIES)[:, None] - numpy.arange(KEYS)


def check(got, expected):
    assert got.dtype == numpy.float32 and got.shape == expected.shape
    # Weights are rounded to f32 once.
    numpy.testing.assert_allclose(got, expected, rtol=2**-23, atol=2**-140)


def test_weights_of_a_pattern(rng):
    q, k, v = tensors(rng)
    text = "causal & (window(20, 0) | sinks(3))"
    mask = oracle.mask(lambda i, j: j <= i and (i - 20 <= j or j < 3), QUERIES, KEYS)
    weights = longspan.attention_weights(q, k, text, ROWS)
    check(weights, naive(q, k, mask, ROWS))
    assert (weights[..., ~mask[ROWS].any(0)] == 0).all()
    out = longspan.attention(q, k, v, text)
    numpy.testing.assert_allclose(weights @ v.repeat(2, axis=1), out[:, :, ROWS], atol=2e-6)


def test_options(rng):
    q, k, v = tensors(rng)
    table = rng.standard_normal((HEADS, 12), dtype="float32")
    columns = (distances().clip(-3, 8) + 3).astype(int)
    bias = table[:, columns] - numpy.array(SLOPES)[:, None, None] * abs(distances())
    options = {"scale": 0.3, "softcap": 2.0, "alibi_slopes": SLOPES, "sink_logits": LOGITS}
    options |= {"bias_table": table, "bias_right": 3, "key_padding": [(0, 80), (5, 90)]}
    at = numpy.arange(KEYS)
    valid = numpy.stack([at < 80, at >= 5])[:, None, None]
    weights = longspan.attention_weights(q, k, "full", ROWS, **options)
    check(weights, naive(q, k, valid, ROWS, 0.3, 2.0, bias, LOGITS))
    sums = weights.sum(3)
    assert (sums[:, :3] < 0.999).all() and abs(sums[:, 3] - 1).max() < 1e-6

    # An `Attention` and the other order of axes are the same; so are chosen heads and entries.
    attention = longspan.Attention("full", **options)
    assert numpy.array_equal(attention.attention_weights(q, k, ROWS), weights)
    some = attention.attention_weights(q, k, numpy.array(ROWS), heads=[3, 1], batch=(1,))
    assert numpy.array_equal(some, weights[1:, [3, 1]])
    q, k = (x.swapaxes(1, 2) for x in (q, k))
    turned = longspan.attention_weights(q, k, "full", ROWS, order="bshd", **options)
    assert numpy.array_equal(turned, weights)


def test_dropout_is_that_of_the_output(rng):
    q, k, v = tensors(rng)
    options = {"dropout_p": 0.4, "dropout_seed": 5}
    weights = longspan.attention_weights(q, k, "causal", ROWS, **options)
    whole = longspan.attention_weights(q, k, "causal", ROWS)
    kept = weights > 0
    assert 0.5 < kept.sum() / (whole > 0).sum() < 0.7
    numpy.testing.assert_allclose(weights[kept], whole[kept] / 0.6, rtol=1e-6)
    out = longspan.attention(q, k, v, "causal", **options)
    numpy.testing.assert_allclose(weights @ v.repeat(2, axis=1), out[:, :, ROWS], atol=5e-6)


def test_heads_packed_layouts_and_empty_rows(rng):
    q, k, _ = tensors(rng)
    text = "heads([causal, ~full, packed([31, 30], [50, 40], causal), sinks(4)])"
    masks = numpy.zeros((HEADS, QUERIES, KEYS), dtype=bool)
    masks[0] = distances() >= 0
    masks[2, :31, :50] = numpy.arange(31)[:, None] + 19 >= numpy.arange(50)
    masks[2, 31:, 50:] = numpy.arange(30)[:, None] + 10 >= numpy.arange(40)
    masks[3, :, :4] = True
    expected = naive(q, k, masks, ROWS)
    check(longspan.attention_weights(q, k, text, ROWS), expected)
    layout = longspan.Pattern(text).compile(QUERIES, KEYS)
    weights = longspan.attention_weights(q, k, layout, ROWS)
    check(weights, expected)
    assert (weights[:, 1] == 0).all()


def test_half_precision(rng):
    q, k, _ = (x.astype("float16") for x in tensors(rng))
    check(longspan.attention_weights(q, k, "causal", ROWS), naive(q, k, distances() >= 0, ROWS))


def test_what_is_refused(rng):
    q, k, _ = tensors(rng)
    for error, message, arguments, options in [
        (ValueError, "query 61, expected an index below 61", [[61]], {}),
        (ValueError, "query head 4, expected an index below 4", [[0]], {"heads": [4]}),
        (ValueError, "batch entry 2, expected an index below 2", [[0]], {"batch": [2]}),
        (ValueError, "an integer is -1", [[-1]], {}),
        (MemoryError, "take 2880 bytes, the limit is 2879: choose fewer", [[0]], {"max_bytes": 2879}),
        (TypeError, r"attention_weights\(\) has no argument \"window\"", [[0]], {"window": 3}),
        (ValueError, "sink_logits has 1 elements, expected 4", [[0]], {"sink_logits": [0.0]}),
    ]:
        with pytest.raises(error, match=message):
            longspan.attention_weights(q, k, "causal", *arguments, **options)
    with pytest.raises(ValueError, match="longspan.Dilated, whose branches have a softmax each"):
        longspan.attention_weights(q, k, longspan.Dilated([32], [2]), [0])


def test_picture(rng):
    q, k, _ = tensors(rng)
    weights = longspan.attention_weights(q, k, "causal & window(20, 0)", ROWS, heads=[0, 1])
    root = xml.etree.ElementTree.fromstring(longspan.weights_svg(weights))
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert len(texts) == 1 + BATCH * 2 * len(ROWS)
    assert texts[-1] == "batch 1, head 1, row 2" and "over 90 keys" in texts[0]
    with pytest.raises(ValueError, match=r"rows 513, expected 512 \(at most"):
        longspan.weights_svg(numpy.zeros((1, 1, 513, 8), dtype="float32"))
    with pytest.raises(TypeError, match="weights holds f16, expected f32"):
        longspan.weights_svg(weights.astype("float16"))
