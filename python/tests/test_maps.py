"""Layouts of a shard: positions of the queries and keys at hand."""

import longspan
import numpy
import pytest


def zigzag(rank, ranks, tokens):
    part = tokens // (2 * ranks)
    front = range(rank * part, (rank + 1) * part)
    return [front, range(tokens - (rank + 1) * part, tokens - rank * part)]


@pytest.mark.parametrize("text", ["causal & window(50, 0)", "dilated(32, 4) | sinks(3)", "documents([70, 50])"])
@pytest.mark.parametrize(
    "queries, keys",
    [
        (range(0, 120, 3), None),
        (zigzag(1, 3, 120), zigzag(0, 3, 120)),
        ([5, 6, 7, 100, 3, 60, 62, 64], [range(10), range(90, 120)]),
        (None, range(1, 120, 2)),
    ],
)
def test_pairs_are_those_of_the_whole(rng, text, queries, keys):
    pattern = longspan.Pattern(text)
    layout = pattern.compile(120, block=16, query_map=queries, key_map=keys)
    q_at, k_at = (positions(x, 120) for x in (queries, keys))
    assert (layout.tokens_q, layout.tokens_k) == (len(q_at), len(k_at))
    assert layout.active_pairs == sum(pattern.allows(i, j) for i in q_at for j in k_at)
    q = rng.standard_normal((1, 2, 120, 8), dtype="float32")
    k, v, dout = (rng.standard_normal((1, 2, 120, 8), dtype="float32") for _ in range(3))
    shard = [numpy.ascontiguousarray(x[:, :, at]) for x, at in ((q, q_at), (k, k_at), (v, k_at))]
    got = longspan.forward(*shard, layout)
    # The same pairs, of all tokens.
    rows = [[j for j in k_at if pattern.allows(i, j)] for i in q_at]
    for row, (i, seen) in enumerate(zip(q_at, rows)):
        scores = q[0, 0, i].astype("float64") @ k[0, 0, seen].T.astype("float64") / 8**0.5
        if not seen:
            assert not got.out[0, 0, row].any()
            continue
        weights = numpy.exp(scores - scores.max())
        want = weights @ v[0, 0, seen] / weights.sum()
        assert numpy.allclose(got.out[0, 0, row], want, atol=1e-5)
    gradients = longspan.backward(*shard, got, dout[:, :, q_at])
    assert gradients.dk.shape == shard[1].shape


def positions(given, tokens):
    if given is None:
        return list(range(tokens))
    parts = [given] if isinstance(given, range) else given
    return [at for part in parts for at in (part if isinstance(part, range) else [part])]


def test_ways_to_say_the_same():
    pattern, want = longspan.causal(), None
    for given in (range(3, 90, 2), [range(3, 90, 2)], list(range(3, 90, 2)), numpy.arange(3, 90, 2)):
        layout = pattern.compile(100, query_map=given)
        want = layout if want is None else want
        assert layout == want and layout.tokens_q == 44


@pytest.mark.parametrize(
    "given, error, message",
    [
        (3, TypeError, "3, a int, expected positions: a list of integers, a range"),
        ([1.5], TypeError, "an element is 1.5, a float, expected an integer or a range"),
        (range(9, 0, -1), ValueError, "a range has step -1, expected 1 or more"),
        ([100], ValueError, "100"),
        ([-1], ValueError, "-1"),
    ],
)
def test_what_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        longspan.causal().compile(100, query_map=given)


def test_block_masks_have_no_maps():
    layout = longspan.causal().compile(100, key_map=range(10))
    with pytest.raises(ValueError, match="compile the pattern without maps"):
        layout.to_block_mask()
