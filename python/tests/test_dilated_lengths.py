"""Dilated attention over sequences of several lengths: results and gradients of one call per sequence."""

import numpy
import pytest

import longspan

DILATED = longspan.Dilated([16, 40], [1, 3], within="causal", also="window(5, 0)")


def tensors(batch, tokens):
    return numpy.random.default_rng(0).standard_normal((3, batch, 2, tokens, 8), dtype="float32")


def both(tensors, dilated, **options):
    q, k, v = tensors
    output = longspan.forward(q, k, v, dilated, **options)
    return [output.out, output.lse, *longspan.backward(q, k, v, output, q, dilated, **options)]


def check(found, whole, entry, first, end):
    """Rows of one sequence are those of a call of its own."""
    part = whole[:, entry : entry + 1, :, first:end]
    for got, expected in zip(found, both(part, DILATED)):
        # The same kernel calls, so the same bits.
        numpy.testing.assert_array_equal(got[entry : entry + 1, :, first:end], expected)


@pytest.mark.parametrize("as_option", [False, True])
def test_padded(as_option):
    ranges = [(0, 61), (13, 75), (30, 31)]
    x = tensors(3, 75)
    if as_option:
        found = both(x, DILATED, key_padding=ranges)
    else:
        found = both(x, DILATED.padded(ranges))
    for entry, (first, end) in enumerate(ranges):
        check(found, x, entry, first, end)
        outside = numpy.r_[0:first, end:75]
        for index, got in enumerate(found):
            assert (got[entry][:, outside] == (-numpy.inf if index == 1 else 0)).all()


def test_packed():
    bounds = [0, 20, 20, 21, 75]
    x = tensors(1, 75)
    found = both(x, DILATED.packed_cu_seqlens(bounds))
    for first, end in zip(bounds, bounds[1:]):
        check(found, x, 0, first, end)


def test_what_is_refused():
    x = tensors(2, 30)
    padded = DILATED.padded([(0, 30), (4, 30)])
    assert padded.key_padding == [(0, 30), (4, 30)] and padded.cu_seqlens is None
    with pytest.raises(ValueError, match="padded or packed already"):
        longspan.attention(*x, padded, key_padding=[(0, 30), (4, 30)])
    with pytest.raises(ValueError, match="valid keys 4..31, expected an ascending range within 30"):
        longspan.attention(*x, DILATED.padded([(0, 30), (4, 31)]))
    with pytest.raises(ValueError, match="padding has batch 1, expected 2"):
        longspan.attention(*x, DILATED.padded([(0, 30)]))
    with pytest.raises(ValueError, match="q has batch 2, expected 1"):
        longspan.attention(*x, DILATED.packed_cu_seqlens([0, 30]))
    with pytest.raises(ValueError, match="ascending from 0 on"):
        DILATED.packed_cu_seqlens([0, 9, 8])
    with pytest.raises(ValueError, match="query_offset"):
        longspan.attention(*x[:, :1], DILATED.packed_cu_seqlens([0, 30]), query_offset=3)
