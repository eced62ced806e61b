"""Layouts by content: ``BlockSelector``, ``Selection``, ``KeptMass``."""

from __future__ import annotations

import pickle

import longspan
import numpy
import pytest


def _tensors(tokens: int = 1536, heads: int = 2, dim: int = 16) -> tuple[numpy.ndarray, numpy.ndarray]:
    random = numpy.random.default_rng(7)
    q = random.standard_normal((1, heads, tokens, dim), dtype="float32")
    k = random.standard_normal((1, 1, tokens, dim), dtype="float32")
    k[:, :, 300:310] *= 5
    return q, k


def _selector(**options: object) -> longspan.BlockSelector:
    return longspan.BlockSelector("causal", always="window(64, 0) | sinks(1)", **options)


def _mask(layout: longspan.Layout, tokens: int) -> numpy.ndarray:
    """The chosen pairs, read off attention over one-hot values."""
    zeros = numpy.zeros((1, layout.heads, tokens, 4), dtype="float32")
    values = numpy.zeros((1, layout.heads, tokens, 1), dtype="float32")
    mask = numpy.zeros((layout.heads, tokens, tokens), dtype=bool)
    for block in range(0, tokens, 64):
        values[:] = 0
        values[:, :, block : block + 64] = 1
        seen = longspan.attention(zeros, zeros, values, layout)[0, :, :, 0] > 0
        mask[:, :, block : block + 64] = seen[:, :, None]
    return mask & numpy.tri(tokens, dtype=bool)


def test_attention_is_exact_over_the_choice() -> None:
    tokens = 1536
    q, k = _tensors(tokens)
    selection = _selector(mass=0.6).select(q, k)
    assert selection.density < 0.9
    layout = selection.layout
    assert (layout.batch, layout.heads, layout.tokens_q) == (1, 2, tokens)
    out, lse = longspan.attention(q, k, k, layout, return_lse=True)
    scores = q[0].astype("float64") @ k[0].astype("float64").transpose(0, 2, 1) / 4
    scores[~_mask(layout, tokens)] = -numpy.inf
    expected = numpy.log(numpy.exp(scores).sum(-1))
    numpy.testing.assert_allclose(lse[0], expected, rtol=1e-5, atol=1e-5)
    weights = numpy.exp(scores - expected[..., None])
    numpy.testing.assert_allclose(out[0], weights @ k[0].astype("float64"), rtol=1e-4, atol=1e-5)


def test_kept_mass_is_measured() -> None:
    q, k = _tensors()
    selection = _selector(mass=0.8).select(q, k)
    lse = longspan.forward(q, k, k, selection.layout).lse
    whole = longspan.forward(q, k, k, "causal").lse
    truth = numpy.exp(lse - whole).mean()
    kept = selection.kept_mass(q, k, lse)
    low, high = kept.interval
    assert high - low <= 0.01
    assert abs(kept.mean - truth) < 0.01
    assert (numpy.diff(kept.sampled) >= 0).all()
    covered = [
        low <= truth <= high
        for low, high in (selection.kept_mass(q, k, lse, seed=seed).interval for seed in range(40))
    ]
    assert sum(covered) >= 34
    assert "KeptMass" in repr(kept) and "Selection" in repr(selection)


def test_options_and_orders() -> None:
    q, k = _tensors()
    selector = _selector(mass=0.6, max_blocks=6)
    layout = selector.select(q, k).layout
    turned = [numpy.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k)]
    assert selector.select(*turned, order="bshd", threads=1).layout == layout
    assert selector.select(q, k, scale=4.0).layout != layout
    last = selector.select(q[:, :, 1024:], k).layout
    assert last.tokens_q == 512
    padded = selector.select(q, k, key_padding=[(512, 1536)])
    assert padded.layout.active_pairs < 2 * 1024 * 1025 // 2 + 1
    means = _selector(estimator="means", queries=16, groups=4, max_blocks=6).select(q, k)
    sums = _selector(estimator="antidiagonals", max_blocks=6).select(q, k)
    assert means.layout != layout and sums.layout != layout
    shared = _selector(sharing="key_head", max_blocks=6).select(q, k).layout
    assert (_mask(shared, 1536)[0] == _mask(shared, 1536)[1]).all()


def test_gradients_through_a_selection() -> None:
    q, k = _tensors(1100)
    layout = _selector(mass=0.5).select(q, k).layout
    output = longspan.forward(q, k, k, layout)
    dout = numpy.ones_like(output.out)
    dq, _, dv = longspan.backward(q, k, k, output, dout)
    assert dq.shape == q.shape
    # Each row's weights sum to 1.
    assert abs(dv.sum() - output.out.size) < 0.5


def test_what_is_refused() -> None:
    q, k = _tensors()
    with pytest.raises(ValueError, match="a share above 0"):
        _selector(mass=0.0).select(q, k)
    with pytest.raises(ValueError, match='expected "clusters", "means" or "antidiagonals"'):
        _selector(estimator="guess")
    with pytest.raises(ValueError, match="as many of both"):
        _selector(estimator="antidiagonals", queries=4)
    with pytest.raises(ValueError, match='expected "head" or "key_head"'):
        _selector(sharing="all")
    with pytest.raises(TypeError, match="base is a int"):
        longspan.BlockSelector(3)
    with pytest.raises(ValueError, match="score addition"):
        _selector().select(q, k, softcap=30.0)
    with pytest.raises(TypeError, match="no argument"):
        _selector().select(q, k, window=3)
    with pytest.raises(TypeError, match="select again"):
        pickle.dumps(_selector().select(q, k).layout)


def test_listed_blocks_are_a_choice():
    rng = numpy.random.default_rng(3)
    q, k = (rng.standard_normal((2, heads, 700, 16), dtype="float32") for heads in (4, 2))
    rows = 11
    counts = rng.integers(1, 5, size=(2, 1, rows))
    indices = numpy.argsort(rng.random((2, 1, rows, rows)), axis=3)[..., :6]
    listed = longspan.ListedBlocks("causal", counts, indices)
    selection = listed.select(q, k)
    allowed = numpy.zeros((2, rows, rows), dtype=bool)
    for entry in range(2):
        for row in range(rows):
            allowed[entry, row, indices[entry, 0, row, : counts[entry, 0, row]]] = True
    mask = allowed.repeat(64, axis=1).repeat(64, axis=2)[:, None, :700, :700]
    mask = mask & numpy.tri(700, dtype=bool)
    scores = numpy.einsum("bhqd,bhkd->bhqk", q, k.repeat(2, axis=1)).astype("float64") / 4
    scores = numpy.where(mask, scores, -numpy.inf)
    with numpy.errstate(divide="ignore"):
        expected = numpy.log(numpy.exp(scores).sum(axis=3))
    lse = longspan.forward(q, k, k, selection.layout).lse
    numpy.testing.assert_allclose(lse, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="the first three of counts"):
        longspan.ListedBlocks("causal", counts, indices.reshape(1, 2, rows, 6))
    with pytest.raises(ValueError, match="softcap|score addition"):
        listed.select(q, k, softcap=3.0)
    with pytest.raises(ValueError, match="counts has shape"):
        longspan.ListedBlocks("causal", counts[0], indices)
    with pytest.raises(TypeError, match="indices holds no integers"):
        longspan.ListedBlocks("causal", counts, indices.astype("float32"))
    with pytest.raises(ValueError, match="below 0"):
        longspan.ListedBlocks("causal", counts, indices - 1)
    with pytest.raises(ValueError, match="block index"):
        longspan.ListedBlocks("causal", counts, indices + 100).select(q, k)


def test_where_choices_begin(rng):
    x = (rng.standard_normal((1, 1, 2048, 16)) * 3).astype("float32")
    density = lambda **options: longspan.BlockSelector("causal", mass=0.5, **options).select(x, x).density
    assert density(dense_below=4096) == 1
    assert density(dense_below=0) < density() < 1
    # Candidates of 256 tokens first: other blocks may be found, about as many.
    assert density(coarse_from=1024) == pytest.approx(density(), abs=0.1)
    with pytest.raises(ValueError, match="an integer is -1"):
        density(dense_below=-1)
