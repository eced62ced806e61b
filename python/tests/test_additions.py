"""Biases and dropout on arrays, against the definition in f64."""

import pickle

import longspan
import numpy
import pytest


def dense(q, k, v, softcap=None, slopes=None, table=None, right=0):
    """Causal attention; two axes of distances."""
    scores = q.astype("f8") @ k.astype("f8").swapaxes(2, 3) * q.shape[3] ** -0.5
    if softcap is not None:
        scores = softcap * numpy.tanh(scores / softcap)
    at = numpy.arange(q.shape[2]) + k.shape[2] - q.shape[2]
    distance = at[:, None] - numpy.arange(k.shape[2])
    if slopes is not None:
        scores = scores - numpy.asarray(slopes)[:, None, None] * abs(distance)
    if table is not None:
        columns = numpy.clip(distance, -right, table.shape[1] - 1 - right) + right
        scores = scores + table[:, columns]
    scores = numpy.where(distance >= 0, scores, -numpy.inf)
    weights = numpy.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v.astype("f8")


@pytest.fixture
def tensors(rng):
    return [rng.standard_normal((2, 3, tokens, 8), dtype="float32") for tokens in (19, 40, 40)]


def options(rng):
    table = rng.standard_normal((3, 9), dtype="float32")
    return {"softcap": 3.0, "alibi_slopes": [0.1, 0.2, 0.3], "bias_table": table, "bias_right": 2}


def test_biases_add_up(rng, tensors):
    given = options(rng)
    expected = dense(*tensors, 3.0, given["alibi_slopes"], given["bias_table"], 2)
    out = longspan.attention(*tensors, "causal", **given)
    numpy.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    assert numpy.array_equal(longspan.Attention("causal", **given)(*tensors), out)
    # A list of rows is a table too, and the default has no columns for later keys.
    plain = longspan.attention(*tensors, "causal", bias_table=given["bias_table"].tolist())
    expected = dense(*tensors, table=given["bias_table"])
    numpy.testing.assert_allclose(plain, expected, rtol=1e-4, atol=1e-5)


def test_gradients_are_differences(rng, tensors):
    given = options(rng)
    output = longspan.forward(*tensors, "causal", **given)
    dout = rng.standard_normal(output.out.shape, dtype="float32")
    gradients = longspan.backward(*tensors, output, dout)
    assert gradients.dbias_table.shape == (3, 9) and gradients.dalibi_slopes.shape == (3,)

    def loss(slopes, table):
        return (dense(*tensors, 3.0, slopes, table, 2) * dout).sum()

    slopes, table = numpy.array(given["alibi_slopes"]), given["bias_table"].astype("f8")
    for got, values in ((gradients.dalibi_slopes, slopes), (gradients.dbias_table, table)):
        expected = numpy.empty_like(values)
        for index in numpy.ndindex(values.shape):
            kept, sides = values[index], []
            for step in (1e-5, -1e-5):
                values[index] = kept + step
                sides.append(loss(slopes, table))
            values[index] = kept
            expected[index] = (sides[0] - sides[1]) / 2e-5
        numpy.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


def test_dropout_is_that_of_the_seed(tensors):
    def call(seed, **others):
        return longspan.attention(*tensors, "causal", dropout_p=0.5, dropout_seed=seed, **others)

    assert numpy.array_equal(call(1, threads=1), call(1, threads=2))
    assert not numpy.array_equal(call(1), call(2))
    assert numpy.array_equal(
        longspan.attention(*tensors, "causal", dropout_p=0.0), longspan.attention(*tensors, "causal")
    )


def test_objects_hold_additions(rng, tensors):
    given = options(rng) | {"dropout_p": 0.25, "dropout_seed": 3}
    attention = longspan.Attention("causal", **given)
    output = attention.forward(*tensors)
    copied = pickle.loads(pickle.dumps(attention))
    assert copied.options == attention.options
    again = copied.forward(*tensors)
    assert numpy.array_equal(again.out, output.out)
    gradients = attention.backward(*tensors, output, output.out)
    same = longspan.backward(*tensors, output, output.out)
    assert all(map(numpy.array_equal, gradients, same))
    with pytest.raises(ValueError, match="dropout_seed is 4, but the forward pass had 3"):
        longspan.backward(*tensors, output, output.out, dropout_seed=4)
    with pytest.raises(ValueError, match="bias_table is .* but the forward pass had"):
        longspan.backward(*tensors, output, output.out, bias_table=given["bias_table"] + 1)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"dropout_p": 0.5}, "dropout_p is given without a dropout_seed"),
        ({"dropout_p": 1.0, "dropout_seed": 1}, "the dropout probability is 1, expected"),
        ({"bias_right": 1}, "bias_right is given without a bias_table"),
        ({"bias_table": numpy.zeros((3, 4)), "bias_right": 4}, "bias_right is 4 and bias_table has 4"),
        ({"bias_table": numpy.zeros(4)}, "expected two axes: query heads, distances"),
        ({"bias_table": numpy.zeros((2, 4))}, "bias table, query heads, has 2 elements, expected 3"),
        ({"bias_table": numpy.full((3, 2), numpy.nan)}, "a value of the bias table is NaN"),
    ],
)
def test_refusals(tensors, given, message):
    with pytest.raises(ValueError, match=message):
        longspan.attention(*tensors, "causal", **given)
