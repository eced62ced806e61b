"""Layouts as components: `strided` and `dilated` terms in the order of residues."""

import longspan
import numpy
import pytest


def pairs(component):
    """The pairs of all views, as (query, key)."""
    (query_starts, queries), (key_starts, keys) = component.queries, component.keys
    assert len(query_starts) == len(key_starts)
    for first_query, first_key in zip(query_starts, key_starts, strict=True):
        for query in queries:
            for key in keys:
                yield first_query + query, first_key + key


def test_components_cover_every_pair_once():
    pattern = longspan.Pattern("strided(7) | window(2, 2)")
    layout = pattern.compile(60)
    natural, *residues = layout.components()
    assert natural.modulus == 1 and natural.segment is None
    assert {part.modulus for part in residues} == {7}
    views = [pair for part in residues for pair in pairs(part)]
    assert len(views) == len(set(views))
    assert set(views) == {(q, k) for q in range(60) for k in range(60) if (q - k) % 7 == 0}
    assert sum(part.active_pairs for part in layout.components()) == layout.active_pairs


def test_segments_are_named():
    (part,) = longspan.dilated(2048, 4, 1).compile(4096).components()
    assert (part.modulus, part.segment) == (4, 2048)
    assert part.queries == (range(1, 4097, 2048), range(0, 2048, 4))
    assert repr(part) == (
        "<longspan.Component modulo 4 in segments of 2048, 2 × (512 × 512) tokens, 524288 pairs>"
    )


def test_other_patterns_have_none():
    assert longspan.causal().compile(100).components() == []
    heads = longspan.heads(["causal", "strided(4)"]).compile(100)
    assert heads.components(head=0) == []
    assert len(heads.components(head=1)) == 1
    with pytest.raises(ValueError, match="2 heads"):
        heads.components(head=2)


def test_results_are_those_of_the_definition():
    rng = numpy.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 600, 16), dtype="float32") for _ in range(3))
    position = numpy.arange(600)
    distance = position[:, None] - position[None, :]
    mask = (distance % 16 == 0) | (abs(distance) <= 3)
    scores = q.astype("float64") @ k.astype("float64").swapaxes(2, 3) / 4
    weights = numpy.exp(numpy.where(mask, scores, -numpy.inf))
    expected = weights @ v / weights.sum(-1, keepdims=True)
    got = longspan.attention(q, k, v, "strided(16) | window(3, 3)")
    numpy.testing.assert_allclose(got, expected, atol=2e-6)
