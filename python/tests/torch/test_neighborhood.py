"""Neighborhoods of grids in the order of tiles, against masks of all pairs."""

import dense
import numpy
import pytest
import torch

from longspan.torch import neighborhood_attention


def near(sizes, radii):
    """Every pair of cells, by coordinates."""
    cells = numpy.stack(numpy.unravel_index(numpy.arange(numpy.prod(sizes)), sizes))
    apart = abs(cells[:, :, None] - cells[:, None, :])
    return (apart <= numpy.array(radii)[:, None, None]).all(0)


@pytest.mark.parametrize(
    "sizes, radii, tile",
    [
        ((17, 23), (2, 3), None),
        ((16, 24), (0, 5), (8, 8)),
        ((5, 6, 7), (1, 2, 1), None),
        ((3, 4, 5, 4), (1, 1, 0, 2), None),
        ((90,), (7,), None),
        ((9, 40), (20, 2), (4, 16)),
        ((1, 1), (0, 0), None),
    ],
    ids=str,
)
def test_neighborhoods(rng, sizes, radii, tile):
    tokens = int(numpy.prod(sizes))
    q, k, v, dout = dense.tensors(rng, (2, 4, 2, tokens, tokens, 16, 24))
    out, lse = neighborhood_attention(q, k, v, sizes, radii, tile=tile, enable_gqa=True, return_lse=True)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    mask = numpy.broadcast_to(near(sizes, radii), (2, 4, tokens, tokens))
    expected = dense.truth(q, k, v, mask, dout)
    dense.check(dict(zip(("dq", "dk", "dv"), gradients), out=out, lse=lse), expected)


def test_wrong_calls():
    x = torch.zeros(1, 1, 12, 8)
    with pytest.raises(ValueError, match="expected .* with 20 tokens, the cells of a grid of 4 x 5"):
        neighborhood_attention(x, x, x, (4, 5), (1, 1))
    with pytest.raises(ValueError, match="radii is 1, expected one per axis"):
        neighborhood_attention(x, x, x, (3, 4), (1,))
    with pytest.raises(ValueError, match="tiles: tile is 1, expected one size per axis"):
        neighborhood_attention(x, x, x, (3, 4), (1, 1), tile=(2,))
    with pytest.raises(ValueError, match="at most four axes"):
        neighborhood_attention(x, x, x, (3, 4, 1, 1, 1), (1,) * 5)
    with pytest.raises(ValueError, match="key_padding: a layout has its own"):
        neighborhood_attention(x, x, x, (3, 4), (1, 1), key_padding=torch.tensor([[0, 12]]))
