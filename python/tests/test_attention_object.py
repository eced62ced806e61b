"""A pattern and options that both passes share, and what an output holds of its forward pass."""

import copy
import pickle

import longspan
import numpy
import pytest

RNG = numpy.random.default_rng(7)
Q, K, V, DOUT = (RNG.standard_normal((2, 2, 70, 16), dtype="float32") for _ in range(4))
DLSE = RNG.standard_normal((2, 2, 70), dtype="float32")
SLOPES = numpy.array([0.5, 0.25], dtype="float32")

OPTIONS = [
    {},
    {"scale": 0.7},
    {"softcap": 3.0},
    {"alibi_slopes": SLOPES},
    {"query_offset": 5, "key_offset": 2},
    {"key_padding": [(0, 70), (10, 60)]},
    {"order": "bshd"},
    {"block": 32, "threads": 1, "isa": "portable", "precision": "widened"},
]


def same(a, b):
    return all(numpy.array_equal(x, y) for x, y in zip(a, b, strict=True))


def plain(pattern, options):
    """The gradients of the functional calls, with every option given twice."""
    output = longspan.forward(Q, K, V, pattern, **options)
    return output, longspan.backward(Q, K, V, tuple(output), DOUT, pattern, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "none")
@pytest.mark.parametrize("pattern", ["causal & window(20, 0)", "heads([causal, full])"])
def test_both_passes_share_the_options(pattern, options):
    if options.get("order") == "bshd":
        pattern = "causal"
    output, gradients = plain(pattern, options)
    attention = longspan.Attention(pattern, **options)
    got = attention.forward(Q, K, V)
    assert same(got, output)
    assert same(attention.backward(Q, K, V, got, DOUT), gradients)
    assert same(attention.backward(Q, K, V, tuple(got), DOUT), gradients)
    assert numpy.array_equal(attention(Q, K, V), output.out)
    out, lse = attention(Q, K, V, return_lse=True)
    assert same((out, lse), output[:2])
    # What is left out of the functional call comes from the output.
    assert same(longspan.backward(Q, K, V, output, DOUT), gradients)
    assert same(longspan.backward(Q, K, V, output, DOUT, pattern, **options), gradients)


def test_dlse_and_out():
    attention = longspan.Attention("causal", scale=0.3)
    out = numpy.empty_like(Q)
    output = attention.forward(Q, K, V, out=out)
    assert output.out is out
    got = attention.backward(Q, K, V, output, DOUT, DLSE)
    want = longspan.backward(Q, K, V, tuple(output), DOUT, "causal", dlse=DLSE, scale=0.3)
    assert same(got, want)
    assert not same(got, attention.backward(Q, K, V, output, DOUT))


@pytest.mark.parametrize("pattern", ["layout", "dilated"])
def test_layouts_and_dilated_attention(pattern):
    if pattern == "layout":
        pattern = longspan.causal().compile(70)
        again = longspan.causal().compile(70)
    else:
        pattern = longspan.Dilated([16, 32], [1, 2])
        again = longspan.Dilated([16, 32], [1, 2])
    output, gradients = plain(pattern, {"scale": 0.2})
    assert same(longspan.backward(Q, K, V, output, DOUT), gradients)
    assert same(longspan.backward(Q, K, V, output, DOUT, again), gradients)
    attention = longspan.Attention(pattern, scale=0.2)
    assert same(attention.backward(Q, K, V, attention.forward(Q, K, V), DOUT), gradients)


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ({"scale": 0.7}, {"scale": 0.6}),
        ({}, {"scale": 0.6}),
        ({"softcap": 3.0}, {"softcap": 4.0}),
        ({}, {"softcap": 4.0}),
        ({}, {"alibi_slopes": SLOPES}),
        ({"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES + 1}),
        ({"query_offset": 5}, {"query_offset": 6}),
        ({}, {"key_offset": 1}),
        ({}, {"key_padding": [(0, 70), (10, 60)]}),
        ({}, {"order": "bshd"}),
    ],
)
def test_contradictions_are_refused(forward, backward):
    output = longspan.forward(Q, K, V, "full", **forward)
    (name,) = backward
    with pytest.raises(ValueError, match=f"^{name} is .*, but the forward pass had .*: leave {name} out"):
        longspan.backward(Q, K, V, output, DOUT, **backward)
    with pytest.raises(ValueError, match=name):
        longspan.Attention("full", **backward).backward(Q, K, V, output, DOUT)
    if forward:
        with pytest.raises(ValueError, match="is left out of this Attention"):
            longspan.Attention("full").backward(Q, K, V, output, DOUT)


@pytest.mark.parametrize("other", ["full", longspan.causal().compile(70), longspan.Dilated([8], [1])])
def test_another_pattern_is_refused(other):
    output = longspan.forward(Q, K, V, "causal")
    with pytest.raises(ValueError, match="^pattern is .*, but the forward pass had .*causal"):
        longspan.backward(Q, K, V, output, DOUT, other)


def test_options_that_say_the_same_are_taken():
    output = longspan.forward(Q, K, V, "causal & full")
    want = longspan.backward(Q, K, V, output, DOUT)
    pattern = longspan.causal() & longspan.full()
    got = longspan.backward(Q, K, V, output, DOUT, pattern, scale=0.25, order="bhsd", key_offset=0)
    assert same(got, want)
    # How it is computed may differ.
    assert same(longspan.backward(Q, K, V, output, DOUT, threads=1), want)
    near = longspan.backward(Q, K, V, output, DOUT, isa="portable", block=16, precision="widened")
    assert all(numpy.allclose(a, b, atol=1e-4) for a, b in zip(near, want))


def test_what_an_output_holds():
    slopes = SLOPES.copy()
    output = longspan.forward(Q, K, V, "causal", alibi_slopes=slopes, scale=0.5)
    want = longspan.backward(Q, K, V, output, DOUT)
    assert output.pattern == "causal"
    assert output.options == {"alibi_slopes": (0.5, 0.25), "scale": 0.5}
    slopes[:] = 9
    assert same(longspan.backward(Q, K, V, output, DOUT), want)
    out, lse, lse_lo = output
    assert (out is output.out, lse is output[1], len(output)) == (True, True, 3)
    for held in (
        output._replace(out=out.copy()),
        pickle.loads(pickle.dumps(output)),
        copy.copy(output),
        copy.deepcopy(output),
    ):
        assert type(held) is longspan.Output
        assert same(longspan.backward(Q, K, V, held, DOUT), want)
    by_hand = longspan.Output(out, lse, lse_lo)
    with pytest.raises(TypeError, match="pattern is missing.*give pattern"):
        longspan.backward(Q, K, V, by_hand, DOUT)
    options = {"alibi_slopes": SLOPES, "scale": 0.5}
    assert same(longspan.backward(Q, K, V, by_hand, DOUT, "causal", **options), want)


def test_the_object():
    attention = longspan.Attention("causal", scale=0.5, key_padding=[(0, 70), (3, 9)])
    assert attention.pattern == longspan.causal()
    assert attention.options == {"scale": 0.5, "key_padding": ((0, 70), (3, 9))}
    text = 'longspan.Attention(longspan.Pattern("causal"), key_padding=((0, 70), (3, 9)), scale=0.5)'
    assert repr(attention) == text
    again = eval(text)
    assert attention == again and hash(attention) == hash(again)
    assert attention != longspan.Attention("causal") and attention != "causal"
    for held in (pickle.loads(pickle.dumps(attention)), copy.deepcopy(attention)):
        assert held == attention
        assert same(held.forward(Q, K, V), attention.forward(Q, K, V))


@pytest.mark.parametrize(
    ("pattern", "options", "error", "message"),
    [
        ("causal &", {}, ValueError, "expected"),
        (3, {}, TypeError, "pattern is a int"),
        ("causal", {"scale": "x"}, TypeError, "scale"),
        ("causal", {"order": "hsd"}, ValueError, "order"),
        ("causal", {"dropout_p": 0.5}, ValueError, "dropout_seed"),
        (longspan.causal().compile(70), {"block": 64}, ValueError, "block: a layout has its own"),
        (longspan.Dilated([8], [1]), {"key_offset": 1}, ValueError, "key_offset: dilated"),
    ],
)
def test_what_is_wrong_is_refused_at_once(pattern, options, error, message):
    with pytest.raises(error, match=message):
        longspan.Attention(pattern, **options)


def test_bytes_needed_are_those_of_results_and_workspace():
    x = numpy.broadcast_to(numpy.float32(0), (1, 4, 50_000, 64))  # takes no memory
    tensor = 4 * 50_000 * 64 * 4
    attention = longspan.Attention("window(300, 0)", threads=1)
    forward = attention.bytes_needed(x, x, x)
    assert tensor < forward < 1.2 * tensor
    assert 3 * tensor < attention.bytes_needed(x, x, x, backward=True) < 3.5 * tensor
    assert forward == longspan.bytes_needed(x, x, x, "window(300, 0)", threads=1)
    half = x.astype("float16")
    # Gradients are summed up in f32.
    assert attention.bytes_needed(half, half, half, backward=True) > 4.5 * tensor
    dilated = longspan.Dilated([1000, 10_000], [1, 10])
    assert longspan.bytes_needed(x, x, x, dilated, threads=1) > tensor
    with pytest.raises(ValueError, match="heads"):
        longspan.bytes_needed(x, x[:, :3], x[:, :3], "causal")
    with pytest.raises(TypeError, match="no argument"):
        longspan.bytes_needed(x, x, x, "causal", speed=3)
