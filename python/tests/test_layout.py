"""Layouts as Python objects."""

import copy
import pickle
import xml.etree.ElementTree as ElementTree

import numpy
import oracle
import pytest

import longspan


def test_numbers():
    layout = longspan.causal().compile(1_000)
    assert (layout.tokens_q, layout.tokens_k, layout.block) == (1_000, 1_000, 64)
    assert (layout.rows, layout.columns) == (16, 16)
    assert layout.active_blocks == 16 * 17 // 2
    assert layout.active_pairs == 1_000 * 1_001 // 2
    assert layout.density == layout.active_pairs / 1_000_000
    assert (layout.batch, layout.heads) == (None, None)
    assert 0 < layout.nbytes < 10_000


def test_million_tokens():
    layout = longspan.Pattern("causal & (window(1024, 0) | sinks(64))").compile(1 << 20)
    assert layout.rows == 1 << 14
    assert layout.nbytes < 4 << 20


def test_sets():
    ranges = [(0, 100), (40, 100), (0, 100)]
    layout = longspan.causal().compile(100, key_padding=ranges)
    assert (layout.batch, layout.heads) == (3, None)
    assert layout.active_pairs == 2 * 100 * 101 // 2 + 60 * 61 // 2
    assert repr(layout).endswith("3 batch entries>")
    layout = longspan.heads(["causal", "full"]).compile(50)
    assert (layout.batch, layout.heads) == (None, 2)
    assert layout.active_pairs == 50 * 51 // 2 + 50 * 50
    layout = longspan.heads(["causal", "full"]).compile(100, key_padding=ranges)
    assert (layout.batch, layout.heads) == (3, 2)
    assert repr(layout).endswith("3 batch entries, 2 heads>")


def test_offsets_and_blocks():
    rolled = longspan.causal().compile(4, 10, query_offset=0, key_offset=0, block=16)
    assert rolled.active_pairs == 1 + 2 + 3 + 4
    assert rolled.block == 16
    assert longspan.causal().compile(4, 10).active_pairs == 7 + 8 + 9 + 10


def test_equality_is_about_what_is_seen():
    causal = longspan.causal().compile(500)
    window = longspan.window(499, 0).compile(500)
    assert causal == window
    assert hash(causal) == hash(window)
    assert causal != longspan.full().compile(500)
    assert causal != longspan.causal().compile(500, block=32)
    assert causal != longspan.heads(["causal"]).compile(500)
    assert causal != "causal"
    assert copy.deepcopy(causal) is causal


def test_text():
    lines = str(longspan.causal().compile(200)).splitlines()
    assert lines == [
        "<longspan.Layout of 200 × 200 tokens, blocks of 64, 50.2 % of all pairs>",
        "▒···",
        "█▒··",
        "██▒·",
        "███▒",
    ]


@pytest.mark.parametrize("tokens", [0, 1, 200, 1 << 20])
def test_picture(tokens):
    svg = longspan.causal().compile(tokens)._repr_svg_()
    root = ElementTree.fromstring(svg)
    cells = root.findall("{http://www.w3.org/2000/svg}rect")
    assert len(cells) <= 64 * 64 + 1
    assert f"{tokens} × {tokens} tokens" in svg
    colours = {cell.get("fill") for cell in cells}
    assert ("#0a4c8c" in colours) == (tokens > 0)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"block": 8}, ValueError, "block size is 8, expected 16 to 256; the nearest legal size is 16"),
        ({"key_padding": [(5, 101)]}, ValueError, r"5..101, expected a range inside 0..100"),
        ({"key_padding": [(5, -1)]}, ValueError, "-1, expected 0 to"),
        ({"query_offset": 2**62}, OverflowError, r"at most 2\^60 from zero"),
        ({"key_padding": 3}, TypeError, "Sequence"),
    ],
)
def test_arguments_that_break_rule(arguments, error, message):
    with pytest.raises(error, match=message):
        longspan.causal().compile(100, **arguments)


def test_lengths_that_do_not_add_up():
    with pytest.raises(ValueError, match="add up to 8, expected 9"):
        longspan.documents([3, 5]).compile(9)
    with pytest.raises(OverflowError):
        longspan.causal().compile(2**61)
    with pytest.raises(ValueError, match="-1, expected 0"):
        longspan.causal().compile(-1)


def test_it_is_made_by_compile_alone():
    with pytest.raises(TypeError):
        longspan.Layout()


def test_masks():
    rng = numpy.random.default_rng(3)
    for shape in ((1, 1), (100, 100), (37, 130), (130, 37)):
        mask = rng.random(shape) < 0.3
        layout = longspan.Layout.from_mask(mask, block=16)
        assert layout.active_pairs == mask.sum()
        assert (layout.batch, layout.heads) == (None, None)
        assert pickle.loads(pickle.dumps(layout)) == layout
    mask = rng.random((2, 3, 40, 50)) < 0.5
    layout = longspan.Layout.from_mask(mask)
    assert (layout.batch, layout.heads, layout.active_pairs) == (2, 3, mask.sum())
    assert pickle.loads(pickle.dumps(layout)) == layout
    for axis, (batch, heads) in ((0, (None, 3)), (1, (2, None))):
        layout = longspan.Layout.from_mask(mask.take([0], axis))
        assert (layout.batch, layout.heads) == (batch, heads)
    for wrong in (numpy.ones((3, 3)), numpy.ones((1, 3, 3), bool), numpy.ones((0, 1, 3, 3), bool)):
        with pytest.raises(ValueError, match="expected bool of shape"):
            longspan.Layout.from_mask(wrong)


def test_attention_over_a_mask_and_over_a_list_of_patterns():
    rng = numpy.random.default_rng(4)
    q, k, v = (rng.standard_normal((2, 2, n, 16), dtype="float32") for n in (60, 90, 90))
    mask = rng.random((2, 2, 60, 90)) < 0.2
    ours = longspan.forward(q, k, v, longspan.Layout.from_mask(mask)).out
    expected, _ = oracle.attention(q, k, v, mask, q)
    numpy.testing.assert_allclose(ours, expected.out, atol=1e-5)
    patterns = ["causal", longspan.Pattern("window(5, 5) | keys(7, 9)")]
    ours = longspan.forward(q, k, v, patterns).out
    for entry, pattern in enumerate(patterns):
        alone = [x[entry : entry + 1] for x in (q, k, v)]
        numpy.testing.assert_array_equal(longspan.forward(*alone, pattern).out[0], ours[entry])
    with pytest.raises(ValueError, match="patterns of 3 batch entries, expected those of 2"):
        longspan.forward(q, k, v, ["causal"] * 3)
    with pytest.raises(TypeError, match="entry 1 is 3, a int, expected a longspan.Pattern"):
        longspan.forward(q, k, v, ["causal", 3])
