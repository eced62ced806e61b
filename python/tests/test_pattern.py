"""Patterns as Python objects: operators, text, equality, pickling, pictures."""

import copy
import pickle
import xml.etree.ElementTree as ElementTree

import pytest

import longspan

TEXTS = [
    "full",
    "causal",
    "window(3, 4)",
    "sinks(5)",
    "global_tokens(6)",
    "keys(3, 7)",
    "queries(3, 7)",
    "neighborhood([6, 7], [1, 2])",
    "dilated(64, 4, 1)",
    "strided(7)",
    "hierarchical([(2, 1, 1), (8, 4, 2)])",
    "documents([3, 0, 5])",
    "packed([3, 5], [4, 5], causal)",
    "blocks_dilated(16, [1, 2])",
    "butterfly(16)",
    "random(16, 3, 10, 7)",
    "blocks(64, [[0], [0..2], [0, 2]])",
    "causal & (window(256, 0) | sinks(16))",
    "!(causal | strided(4))",
    "heads([causal, window(64, 0)])",
    "batch([causal, heads([causal, full])])",
]

MADE = {
    "full": longspan.full(),
    "causal": longspan.causal(),
    "window(3, 4)": longspan.window(3, 4),
    "window(4, 0)": longspan.sliding_window(5),
    "sinks(5)": longspan.sinks(5),
    "global_tokens(6)": longspan.global_tokens(tokens=6),
    "keys(3, 7)": longspan.keys(3, 7),
    "queries(3, 7)": longspan.queries(3, to=7),
    "neighborhood([6, 7], [1, 2])": longspan.neighborhood([6, 7], radii=(1, 2)),
    "dilated(64, 4)": longspan.dilated(64, 4),
    "dilated(64, 4, 1)": longspan.dilated(64, 4, offset=1),
    "strided(7)": longspan.strided(7),
    "hierarchical([(2, 1, 1), (8, 4, 2)])": longspan.hierarchical([(2, 1, 1), (8, 4, 2)]),
    "documents([3, 0, 5])": longspan.documents([3, 0, 5]),
    "packed([3, 5], [4, 5], causal)": longspan.packed([3, 5], [4, 5], longspan.causal()),
    "packed([3], [3], causal)": longspan.packed([3], [3], "causal"),
    "blocks_dilated(16, [1, 2])": longspan.blocks_dilated(16, [1, 2]),
    "butterfly(16)": longspan.butterfly(16),
    "random(16, 3, 10, 7)": longspan.random(16, 3, 10, 7),
    "blocks(64, [[0], [0..2], [0, 2]])": longspan.blocks(64, [[0], [(0, 2)], [0, 2]]),
    "heads([causal, full])": longspan.heads([longspan.causal(), "full"]),
    "batch([causal, full])": longspan.batch([longspan.causal(), "full"]),
}


@pytest.mark.parametrize("text", MADE)
def test_functions_and_text_agree(text):
    assert longspan.Pattern(text) == MADE[text]


@pytest.mark.parametrize("text", TEXTS)
def test_text_pickle_hash_copy(text):
    pattern = longspan.Pattern(text)
    assert str(pattern) == text
    assert repr(pattern) == f'longspan.Pattern("{text}")'
    assert eval(repr(pattern)) == pattern
    again = pickle.loads(pickle.dumps(pattern))
    assert again == pattern
    assert hash(again) == hash(pattern)
    assert len({pattern, again}) == 1
    assert copy.deepcopy(pattern) is pattern
    assert pattern != longspan.sinks(999)
    assert pattern != text


def test_operators():
    causal, strided = longspan.causal(), longspan.strided(4)
    assert causal & ~strided == longspan.Pattern("causal & ~strided(4)")
    assert causal | strided == longspan.Pattern("causal | strided(4)")
    assert ~~causal == causal


@pytest.mark.parametrize("use", [bool, lambda p: p and p, lambda p: p or p, lambda p: not p])
def test_no_truth_value(use):
    with pytest.raises(TypeError, match=r"use & for and, \| for or, ~ for not"):
        use(longspan.causal())


def test_heads_are_outermost():
    heads = longspan.heads(["causal", "full"])
    assert heads.heads == 2
    assert longspan.causal().heads is None
    for combine in (lambda: heads & longspan.full(), lambda: longspan.full() | heads, lambda: ~heads):
        with pytest.raises(ValueError, match=r"heads\(…\) and batch\(…\) are outermost"):
            combine()
    with pytest.raises(ValueError, match="outermost"):
        longspan.heads([heads])
    with pytest.raises(ValueError, match="no pattern"):
        longspan.heads([])
    assert not heads.allows(1, 2, head=0)
    assert heads.allows(1, 2, head=1)
    with pytest.raises(ValueError, match="expected head=0 to head=1"):
        heads.allows(1, 2)
    with pytest.raises(ValueError, match="head is 2, expected less than 2"):
        heads.allows(1, 2, head=2)


@pytest.mark.parametrize("other", [True, b"causal", 3, None])
def test_operators_refuse_other_things(other):
    with pytest.raises(TypeError):
        longspan.causal() & other


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: longspan.Pattern("causal & windw(1, 0)"), "did you mean `window`"),
        (lambda: longspan.window(-1, 0), "-1, expected 0 to"),
        (lambda: longspan.window(2**64, 0), "expected 0 to"),
        (lambda: longspan.window(2**62, 0), "left is 4611686018427387904, expected at most"),
        (lambda: longspan.sliding_window(0), "width is 0, expected 1 to"),
        (lambda: longspan.dilated(8, 2, 2), "offset is 2, expected less than the rate"),
        (lambda: longspan.strided(0), "stride is 0"),
        (lambda: longspan.hierarchical([]), "at least one"),
        (lambda: longspan.packed([1], [1, 2], "full"), "1 query lengths and 2 key lengths"),
        (lambda: longspan.blocks(64, [[2, 1]]), "row 0"),
        (lambda: longspan.blocks(64, [[(2, 2)]]), "row 0"),
    ],
)
def test_values_that_break_rule(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: longspan.window("3", 0),
        lambda: longspan.window(1.5, 0),
        lambda: longspan.documents(3),
        lambda: longspan.packed([1], [1], 3),
        lambda: longspan.heads([3]),
        lambda: longspan.Pattern(3),
    ],
)
def test_arguments_of_the_wrong_kind(make):
    with pytest.raises(TypeError):
        make()


def test_numpy_numbers_are_numbers():
    import numpy

    assert longspan.window(numpy.int64(3), numpy.uint8(1)) == longspan.window(3, 1)
    assert longspan.documents(numpy.array([3, 5])) == longspan.documents([3, 5])
    matrix = numpy.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=bool)
    rows = [numpy.flatnonzero(row) for row in matrix]
    assert longspan.blocks(64, rows) == longspan.Pattern("blocks(64, [[0], [0..2], [0, 2]])")


@pytest.mark.parametrize("text", TEXTS)
def test_picture(text):
    svg = longspan.Pattern(text)._repr_svg_()
    root = ElementTree.fromstring(svg)
    cells = root.findall("{http://www.w3.org/2000/svg}rect")
    assert 1 < len(cells) <= 4 * 64 * 64 + 4


def test_long_repr_is_cut():
    pattern = longspan.documents([1] * 10_000)
    assert len(repr(pattern)) < 1_100
    assert longspan.Pattern(str(pattern)) == pattern


def test_picture_of_many_heads_says_what_is_left_out():
    assert "the first 4 of 6" in longspan.heads(["causal"] * 6)._repr_svg_()
    assert "the first" not in longspan.heads(["causal"] * 4)._repr_svg_()


def test_no_picture_of_what_cannot_be_compiled_unasked():
    assert longspan.documents([2**40])._repr_svg_() is None
