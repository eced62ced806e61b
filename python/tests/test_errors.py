"""Every way to call it wrongly: what is raised, and that it says what to do."""

import numpy
import pytest

import longspan

X = numpy.zeros((1, 2, 40, 8), dtype="float32")


def call(q=X, k=X, v=X, pattern="causal", **options):
    return longspan.attention(q, k, v, pattern, **options)


def axes(*shape, dtype="float32"):
    return numpy.zeros(shape, dtype=dtype)


def named(value):
    """The arguments that a case is about."""
    return " ".join(value) if isinstance(value, dict) else None


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"q": X[0]}, r"q has 3 axes, expected 4: \(batch, heads, tokens, dim\); x\[None\] adds"),
        ({"v": axes(1, 1, 1, 1, 1)}, "v has 5 axes, expected 4"),
        ({"q": X[0], "order": "bshd"}, r"\(batch, tokens, heads, dim\)"),
        ({"k": axes(2, 2, 40, 8)}, "k has batch 2, expected 1"),
        ({"k": axes(1, 2, 40, 9)}, "k has head dim 9, expected 8"),
        ({"v": axes(1, 2, 41, 8)}, "v has tokens 41, expected 40"),
        ({"k": axes(1, 3, 40, 8), "v": axes(1, 3, 40, 8)}, "2 query heads and 3 key heads"),
        ({"v": axes(1, 2, 40, 257)}, "v has head dim 257, expected 1 to 256"),
        ({"pattern": longspan.causal().compile(41)}, "q has tokens 40, expected 41"),
        ({"pattern": longspan.heads(["full"])}, "1 patterns for 2 query heads"),
        ({"pattern": "documents([3])"}, "add up to 3, expected 40"),
        ({"pattern": "causal &"}, "expected a pattern"),
        ({"pattern": longspan.causal().compile(40), "block": 32}, "block: a layout has its own"),
        ({"pattern": longspan.causal().compile(40), "key_offset": 0}, "key_offset: a layout has"),
        ({"pattern": longspan.causal().compile(40), "key_padding": [(0, 40)]}, "key_padding: a layout"),
        ({"pattern": longspan.heads(["full"]).compile(40)}, "q has heads 2, expected 1"),
        ({"pattern": longspan.full().compile(40, key_padding=[(0, 40)] * 3)}, "q has batch 1, expected 3"),
        ({"block": 8}, "block size is 8, expected 16 to 256"),
        ({"block": -8}, "-8, expected 0 to"),
        ({"order": "bsdh"}, 'order is "bsdh", expected "bhsd"'),
        ({"key_padding": [(0, 40), (0, 40)]}, "2 pairs, expected 1"),
        ({"key_padding": [(0, 41)]}, "expected a range inside 0..40"),
        ({"scale": float("nan")}, "the scale is NaN, expected a finite number"),
        ({"softcap": 0.0}, "the softcap is 0, expected a positive, finite number"),
        ({"alibi_slopes": [1.0]}, "list of slopes has 1 elements, expected 2"),
        ({"threads": 0}, "threads is 0, expected 1 to 4096"),
        ({"threads": 5000}, "5000 threads asked for, expected 1 to 4096"),
        ({"isa": "sse9"}, "sse9.*expected portable, neon, avx2, avx512 or amx"),
        ({"precision": "f64"}, "precision \"f64\": expected highest .*, high .* or widened"),
        ({"isa": "neon"}, "instruction set neon asked for, this CPU has"),
        ({"out": axes(1, 2, 41, 8)}, "out has tokens 41, expected 40"),
        ({"out": X}, "out and q overlap"),
        ({"out": numpy.broadcast_to(axes(1, 1, 40, 8), X.shape)}, "out is read-only"),
        (
            {"out": numpy.lib.stride_tricks.as_strided(axes(1, 2, 40, 8), X.shape, (0, 0, 32, 4))},
            "elements overlap",
        ),
    ],
    ids=named,
)
def test_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        call(**arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"q": [[1.0]]}, "q is a list, expected a NumPy array or another tensor that has __dlpack__"),
        ({"k": None}, "k is a NoneType, expected a NumPy array"),
        ({"k": X.astype("float16")}, "k holds f16, expected f32 as q"),
        ({"out": X.astype("float16")}, "out holds f16, expected f32 as q"),
        ({"v": X.astype("float64")}, "v holds float64, expected f32, bf16 or f16: convert it first"),
        ({"pattern": 3}, "pattern is a int, expected a longspan.Pattern, its text, a"),
        ({"pattern": None}, "pattern is a NoneType"),
        ({"sclae": 1.0}, r'attention\(\) has no argument "sclae", expected one of order, block'),
        ({"scale": "1"}, "scale: "),
        ({"block": "64"}, "block: "),
        ({"threads": 1.5}, "threads: "),
        ({"order": 3}, "order: "),
        ({"key_padding": 5}, "key_padding: "),
        ({"alibi_slopes": ["a", "b"]}, "alibi_slopes: "),
        ({"return_lse": 3}, "bool"),
    ],
    ids=named,
)
def test_kinds(arguments, message):
    with pytest.raises(TypeError, match=message):
        call(**arguments)


def test_none_means_left_out():
    names = ("order", "block", "query_offset", "key_offset", "key_padding", "scale", "softcap")
    names += ("alibi_slopes", "threads", "isa", "precision", "out")
    assert numpy.array_equal(call(**dict.fromkeys(names)), call())


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"output": 3}, TypeError, "output is a int, expected what forward returned"),
        ({"output": (X,)}, TypeError, "expected what forward returned"),
        ({"dout": X[:, :, 1:]}, ValueError, "dout has tokens 39, expected 40"),
        ({"dout": X.astype("float16")}, TypeError, "dout holds f16, expected f32 as q"),
        ({"lse": axes(1, 2, 41)}, ValueError, r"lse has shape \[1, 2, 41\], expected \[1, 2, 40\]"),
        ({"lse": axes(1, 40, 2).transpose(0, 2, 1)}, ValueError, "lse isn't contiguous"),
        ({"lse": axes(1, 2, 40, dtype="float16")}, TypeError, "lse holds f16, expected f32"),
        ({"lse_lo": axes(2, 40)}, ValueError, r"lse_lo has shape \[2, 40\]"),
        ({"dlse": axes(1, 2, 40, 1)}, ValueError, r"dlse has shape \[1, 2, 40, 1\]"),
        ({"out": axes(1, 2, 40, 9)}, ValueError, "out has head dim 9, expected 8"),
    ],
    ids=named,
)
def test_backward(changes, error, message):
    found = longspan.forward(X, X, X, "causal")._asdict()
    found.update({name: value for name, value in changes.items() if name in found})
    output = changes.get("output", tuple(found.values()))
    dout, dlse = changes.get("dout", X), changes.get("dlse")
    with pytest.raises(error, match=message):
        longspan.backward(X, X, X, output, dout, "causal", dlse=dlse)


def test_misaligned():
    bytes_ = numpy.zeros(X.nbytes + 1, dtype="uint8")
    odd = bytes_[1:].view("float32").reshape(X.shape)
    with pytest.raises(ValueError, match="expected a non-null multiple of 4"):
        call(q=odd)
    with pytest.raises(ValueError, match="lse isn't aligned to 4 bytes"):
        lse = bytes_[1 : 1 + 4 * 80].view("float32").reshape(1, 2, 40)
        longspan.backward(X, X, X, (X, lse), X, "causal")


@pytest.mark.parametrize("name, value", [("LONGSPAN_ISA", "fast"), ("LONGSPAN_THREADS", "many")])
def test_environment(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f'environment variable {name} is "{value}"'):
        call()


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: longspan.window(256), TypeError, r"right is missing or None: `window` takes two integers"),
        (lambda: longspan.window(None, 0), TypeError, "left is missing or None: .*give the number of tokens"),
        (lambda: longspan.window("a", 0), TypeError, "left is 'a', a str, expected an integer, 0 or more"),
        (lambda: longspan.window(1, -1), ValueError, "an integer is -1, expected 0 to"),
        (lambda: longspan.sinks(None), TypeError, "None, expected an integer, 0 or more"),
        (lambda: longspan.sinks(True), TypeError, "True, a bool, expected an integer"),
        (lambda: longspan.documents(3), TypeError, "3, a int, expected a list of integers"),
        (lambda: longspan.documents([1, 2.5]), TypeError, "element 1 is 2.5, a float, expected an integer"),
        (lambda: longspan.documents(numpy.ones((2, 2), int)), TypeError, r"element 0 is \[1, 1\], a list"),
        (lambda: longspan.blocks(64, 3), TypeError, "rows is 3, a int, expected a boolean matrix"),
        (lambda: longspan.blocks(64, [3]), TypeError, r"rows\[0\] is 3, a int, expected a list"),
        (
            lambda: longspan.blocks(64, [[True]]),
            TypeError,
            r"rows\[0\]\[0\] is True, a bool, expected the index of a key block.*boolean matrix as an array",
        ),
        (lambda: longspan.blocks(64, numpy.ones((2, 2))), ValueError, "rows is an array of float64 with 2 axes"),
        (lambda: longspan.blocks(64, numpy.ones(2, bool)), ValueError, "bool with 1 axes, expected a boolean"),
        (lambda: longspan.causal() & 3, TypeError, "&"),
        (lambda: longspan.causal() & "casual", ValueError, "casual"),
        (lambda: longspan.Pattern("heads([causal]) & full"), ValueError, r"heads\(\[…\]\) is outermost: combine"),
        (lambda: longspan.Pattern("(heads([causal]))"), ValueError, r"heads\(\[…\]\) is outermost: combine"),
        (lambda: longspan.heads("causal"), TypeError, "heads: 'causal', a str, expected a list of patterns"),
    ],
)
def test_primitives(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_what_primitives_take():
    assert longspan.causal() & "window(3, 0)" == longspan.Pattern("causal & window(3, 0)")
    assert "causal" & longspan.window(3, 0) == longspan.Pattern("causal & window(3, 0)")
    assert "causal" | longspan.window(3, 0) == longspan.Pattern("causal | window(3, 0)")
    assert longspan.window(left=3, right=1) == longspan.window(3, 1)
    assert longspan.documents(numpy.array([3, 4])) == longspan.documents([3, 4])
    mask = numpy.array([[True, False, True], [True, True, False], [False, False, False]])
    assert longspan.blocks(16, mask) == longspan.blocks(16, [[0, 2], [(0, 2)], []])
    assert longspan.blocks(16, [numpy.flatnonzero(row) for row in mask]) == longspan.blocks(16, mask)
