"""Pickles and copies: what comes back compares equal."""

import copy
import pickle

import longspan
import numpy
import pytest
from producer import Producer

PATTERNS = [
    "causal & (window(256, 0) | sinks(16))",
    "!strided(4) | dilated(64, 4, 1)",
    "documents([30, 0, 70])",
    "packed([40, 60], [40, 60], causal)",
    "blocks(16, [[0], [0..2], [0, 2]])",
    "random(16, 2, 7, 99)",
    "heads([causal, full & window(3, 3)])",
]

LAYOUTS = [
    {},
    {"block": 16},
    {"query_offset": 3, "key_offset": -7},
    {"key_padding": [(0, 100), (40, 90), (0, 0)]},
    {"query_map": range(1, 100, 3)},
    {"query_map": [range(0, 20), range(80, 100)], "key_map": [5, 6, 7, 90, 3]},
    {"query_map": [], "max_work": 1 << 20},
]


def copies(value):
    yield copy.copy(value)
    yield copy.deepcopy(value)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.loads(pickle.dumps(value, protocol))


@pytest.mark.parametrize("text", PATTERNS)
def test_patterns(text):
    pattern = longspan.Pattern(text)
    for again in copies(pattern):
        assert again == pattern and hash(again) == hash(pattern) and str(again) == str(pattern)


@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: "-".join(options) or "none")
@pytest.mark.parametrize("text", ["causal & window(20, 0)", "heads([causal, strided(3)])"])
def test_layouts(text, options):
    layout = longspan.Pattern(text).compile(100, **options)
    for again in copies(layout):
        assert again == layout and hash(again) == hash(layout)
        for name in ("tokens_q", "tokens_k", "block", "batch", "heads", "active_pairs"):
            assert getattr(again, name) == getattr(layout, name)


@pytest.mark.parametrize("text", PATTERNS)
def test_layouts_of_every_kind(text):
    layout = longspan.Pattern(text).compile(100)
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_layout_computes_the_same(rng):
    q, k, v = (rng.standard_normal((3, 2, 100, 8), dtype="float32") for _ in range(3))
    pattern = longspan.heads(["causal", "window(9, 9)"])
    layout = pattern.compile(100, key_padding=[(0, 100), (40, 90), (0, 0)])
    again = pickle.loads(pickle.dumps(layout))
    assert numpy.array_equal(longspan.attention(q, k, v, layout), longspan.attention(q, k, v, again))


def test_dilated():
    for dilated in (
        longspan.Dilated([64, 128], [1, 2]),
        longspan.Dilated([64], [4], within="causal", also="window(9, 0)", overlap="union"),
        longspan.Dilated([64], [4], within="causal").padded([(0, 10), (3, 10)]),
        longspan.Dilated([64], [4]).packed_cu_seqlens([0, 4, 4, 10], [0, 5, 7, 20]),
    ):
        for again in copies(dilated):
            assert again == dilated and repr(again) == repr(dilated)


def bf16(rng, shape):
    """An Array of random bits, NaN and infinities among them."""
    bits = rng.integers(0, 1 << 16, shape, dtype="uint16")
    return longspan.Array._from_bytes(shape, bits.tobytes()), bits


@pytest.mark.parametrize("shape", [(1, 2, 40, 8), (3, 1, 5, 7), (0, 2, 3, 4)])
def test_arrays(rng, shape):
    array, bits = bf16(rng, shape)
    for again in copies(array):
        assert isinstance(again, longspan.Array) and again.shape == shape
        assert again == array
        assert numpy.array_equal(numpy.frombuffer(again._to_bytes(), "uint16"), bits.reshape(-1))
    assert array != "array"
    assert array != longspan.Array._from_bytes((1, 1, 1, 1), b"ab")
    with pytest.raises(TypeError):
        hash(array)


def test_arrays_that_calls_return(rng):
    x = rng.standard_normal((1, 2, 40, 8), dtype="float32")
    q = Producer((x.view("uint32") >> 16).astype("uint16"), code=4)
    out = longspan.attention(q, q, q, "causal")
    assert pickle.loads(pickle.dumps(out)) == out
    # The first query sees only itself.
    assert numpy.array_equal(out.to_numpy()[0, :, 0].view("uint32") >> 16, q.array[0, :, 0])


def test_arrays_in_numpy(rng):
    array, bits = bf16(rng, (2, 3, 4, 5))
    wide = (bits.astype("uint32") << 16).view("float32")
    for got in (array.to_numpy(), numpy.asarray(array, "float32"), numpy.array(array, dtype="float32")):
        assert got.dtype == numpy.float32 and got.flags.writeable
        assert numpy.array_equal(got.view("uint32"), wide.view("uint32"))
    finite = numpy.nan_to_num(array.to_numpy("float64"), posinf=0, neginf=0)
    assert finite.dtype == numpy.float64
    with pytest.raises(TypeError, match=r"holds bf16, which NumPy has no type for: use array.to_numpy\(\)"):
        numpy.asarray(array)
    with pytest.raises(TypeError, match="dtype is int32, expected a floating-point type"):
        array.to_numpy("int32")
    with pytest.raises(ValueError, match="there are 3 bytes, expected 2"):
        longspan.Array._from_bytes((1, 1, 1, 1), b"abc")


def test_arrays_as_ml_dtypes(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array, bits = bf16(rng, (2, 3, 4, 5))
    for got in (array.to_numpy(ml_dtypes.bfloat16), numpy.asarray(array, ml_dtypes.bfloat16)):
        assert got.dtype == ml_dtypes.bfloat16 and numpy.array_equal(got.view("uint16"), bits)
