"""Tensors that come and go by DLPack: who frees what, and how often."""

import gc
import sys

import numpy
import pytest
from producer import Legacy, Producer, Versioned, zeros

import longspan

SHAPE = (1, 2, 40, 8)


@pytest.mark.parametrize("kind", [Legacy, Versioned])
@pytest.mark.parametrize("strided", [True, False])
def test_tensor_is_freed_once(rng, kind, strided):
    arrays = [rng.standard_normal(SHAPE, dtype="float32") for _ in range(4)]
    q, k, v, dout = [Producer(array, kind, strided=strided) for array in arrays]
    expected = longspan.forward(*arrays[:3], "causal")
    output = longspan.forward(q, k, v, "causal")
    assert numpy.array_equal(output.out, expected.out)
    got = longspan.backward(q, k, v, output, dout, "causal")
    for a, b in zip(got, longspan.backward(*arrays[:3], expected, arrays[3], "causal")):
        assert numpy.array_equal(a, b)
    for tensor, made in ((q, 2), (k, 2), (v, 2), (dout, 1)):
        assert tensor.made == made
        tensor.assert_freed_once()


def test_producer_without_versions():
    q = zeros(*SHAPE, kind=Legacy, accepts_version=False)
    longspan.attention(q, q, q, "causal")
    assert q.made == 3
    q.assert_freed_once()


def test_capsule_that_is_used_twice():
    q = zeros(*SHAPE, one_capsule=True)
    with pytest.raises(BufferError, match="k: __dlpack__ returned no DLPack capsule, or one that"):
        longspan.attention(q, q, q, "causal")
    assert q.made == 1
    q.assert_freed_once()


def test_capsule_that_is_never_used():
    q = zeros(*SHAPE)
    q.__dlpack__()
    q.assert_freed_once()


@pytest.mark.parametrize(
    "bad",
    [
        {"k": zeros(1, 2, 40, 9)},
        {"v": zeros(1, 2, 41, 8)},
        {"k": numpy.zeros(SHAPE, dtype="float64")},
        {"v": zeros(*SHAPE, device=(2, 0))},
        {"v": zeros(*SHAPE, major=2)},
        {"k": zeros(40, 8)},
        {"v": [1, 2, 3]},
        {"pattern": "windw"},
        {"pattern": "documents([3])"},
        {"out": zeros(*SHAPE, flags=1)},
        {"out": zeros(1, 2, 40, 9)},
    ],
    ids=" ".join,
)
def test_an_exception_midway(bad):
    good = {name: zeros(*SHAPE) for name in ("q", "k", "v", "out")}
    call = {**good, "pattern": "causal", **bad}
    with pytest.raises((ValueError, TypeError, BufferError)):
        longspan.attention(**call)
    for tensor in call.values():
        if isinstance(tensor, Producer):
            tensor.assert_freed_once()


def test_capsule_of_another_version_is_freed_unread():
    q = zeros(*SHAPE, major=2)
    with pytest.raises(BufferError, match="q: a tensor of DLPack 2.0, expected 1.x"):
        longspan.attention(q, q, q, "causal")
    q.assert_freed_once()


@pytest.mark.parametrize("kind", [Legacy, Versioned])
def test_the_device_inside_a_capsule_counts(kind):
    q = zeros(*SHAPE, kind=kind, device=(2, 1), said=(1, 0))
    with pytest.raises(ValueError, match="q is on CUDA 1"):
        longspan.attention(q, zeros(*SHAPE), zeros(*SHAPE), "causal")
    q.assert_freed_once()


@pytest.mark.parametrize("device, name", [((2, 1), "CUDA 1"), ((8, 0), "Metal 0"), ((99, 0), "99")])
def test_gpu_is_refused_before_it_is_asked(device, name):
    q = zeros(*SHAPE, device=device)
    with pytest.raises(ValueError, match=f"q is on .*{name}.*Layout.to_block_mask"):
        longspan.attention(q, q, q, "causal")
    assert q.made == 0


def test_producers_own_error_says_which_tensor():
    class Refuses:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **options):
            raise BufferError("no")

    q = zeros(*SHAPE)
    with pytest.raises(BufferError, match="no") as error:
        longspan.attention(q, Refuses(), q, "causal")
    assert sys.version_info < (3, 11) or error.value.__notes__ == ["while k was read"]
    q.assert_freed_once()


def test_read_only_may_be_read_but_not_written(rng):
    q = rng.standard_normal(SHAPE, dtype="float32")
    q.flags.writeable = False
    out = longspan.attention(q, q, q, "causal")
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        longspan.attention(q, q, q, "causal", out=out)


def test_copy_is_not_written():
    q, out = zeros(*SHAPE), zeros(*SHAPE, flags=2)
    with pytest.raises(ValueError, match="out: __dlpack__ made a copy"):
        longspan.attention(q, q, q, "causal", out=out)
    out.assert_freed_once()


@pytest.mark.parametrize(
    "dtype, code, name",
    [
        ("float64", 2, "f64"),
        ("int32", 0, "i32"),
        ("uint8", 1, "u8"),
        ("complex64", 5, "complex64"),
        ("bool", 6, "bool"),
        ("uint16", 99, "DLPack type 99 of 16 bits"),
    ],
)
def test_other_numbers_are_refused(dtype, code, name):
    q = numpy.zeros(SHAPE, dtype=dtype)
    with pytest.raises(TypeError, match=f"q holds {dtype}, expected f32, bf16 or f16"):
        longspan.attention(q, q, q, "causal")
    q = Producer(q, code=code)
    with pytest.raises(TypeError, match=f"q holds {name}, expected f32, bf16 or f16"):
        longspan.attention(q, q, q, "causal")
    q.assert_freed_once()


def test_arrays_that_only_look_plain(rng):
    q = rng.standard_normal(SHAPE, dtype="float32")
    with pytest.raises(TypeError, match="q holds .f4 in foreign byte order"):
        longspan.attention(q.astype(">f4" if q.dtype.str == "<f4" else "<f4"), q, q, "causal")
    with pytest.raises(TypeError, match="k is a masked array, and its mask would be ignored"):
        longspan.attention(q, numpy.ma.array(q), q, "causal")
    records = numpy.zeros(SHAPE, dtype=[("number", "f4"), ("other", "u1")])
    with pytest.raises(ValueError, match="v has a stride of 5 bytes, expected a multiple of 4"):
        longspan.attention(q, q, records["number"], "causal")


def test_numpy_arrays_are_not_held_afterwards(rng):
    q = rng.standard_normal(SHAPE, dtype="float32")
    before = sys.getrefcount(q)
    output = longspan.forward(q, q, q, "causal")
    longspan.backward(q, q, q, output, q, "causal")
    for bad in ("windw", 3):
        with pytest.raises((ValueError, TypeError)):
            longspan.attention(q, q, q, bad)
    assert sys.getrefcount(q) == before


def bf16(array):
    """Bits of bf16 as a tensor that isn't NumPy's."""
    bits = (array.astype("float32").view("uint32") >> 16).astype("uint16")
    return Producer(bits, code=4)


def test_bf16_that_is_not_numpys(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    numbers = rng.standard_normal(SHAPE, dtype="float32")
    q = bf16(numbers)
    out = longspan.attention(q, q, q, "causal")
    assert isinstance(out, longspan.Array)
    assert (out.shape, out.dtype) == (SHAPE, "bfloat16")
    assert repr(out) == "<longspan.Array of bfloat16, shape (1, 2, 40, 8)>"
    bits = q.array.view(ml_dtypes.bfloat16)
    expected = longspan.attention(bits, bits, bits, "causal")
    room = numpy.zeros(SHAPE, dtype=ml_dtypes.bfloat16)
    assert longspan.attention(q, q, q, "causal", out=room) is room
    assert numpy.array_equal(room.view("uint16"), expected.view("uint16"))
    # An Array is a tensor like any other.
    again = longspan.forward(out, out, out, "causal")
    assert isinstance(longspan.backward(out, out, out, again, out, "causal").dk, longspan.Array)
    q.assert_freed_once()


def test_an_array_is_freed_once():
    out = longspan.attention(*[bf16(numpy.zeros(SHAPE))] * 3, "causal")
    gc.collect()
    assert out._owners == 1
    for version in (None, (0, 8), (1, 0), (2, 3)):
        capsule = out.__dlpack__(max_version=version)
        assert out._owners == 2
        del capsule
        assert out._owners == 1
    longspan.attention(out, out, out, "causal")
    assert out._owners == 1
    capsule = out.__dlpack__(copy=True)
    assert out._owners == 1
    del capsule
    with pytest.raises(BufferError, match="stream"):
        out.__dlpack__(stream=1)
    with pytest.raises(BufferError, match=r"dl_device is \(2, 0\), expected \(1, 0\)"):
        out.__dlpack__(dl_device=(2, 0))
    assert out._owners == 1


def test_result_that_does_not_fit_memory():
    """A petabyte of results, of one number that is read again and again."""
    one = numpy.zeros((1, 1, 1, 1), dtype="uint16")
    q = Producer(numpy.lib.stride_tricks.as_strided(one, (1 << 24, 1, 1, 256), (0, 0, 0, 0)), code=4)
    v = Producer(numpy.lib.stride_tricks.as_strided(one, (1 << 24, 1, 1, 256), (0, 0, 0, 0)), code=4)
    many = Producer(
        numpy.lib.stride_tricks.as_strided(one, (1 << 24, 1 << 20, 1, 256), (0, 0, 0, 0)), code=4
    )
    with pytest.raises(MemoryError):
        longspan.attention(many, q, v, "full")
    for tensor in (q, v, many):
        tensor.assert_freed_once()


def test_raw_tensors(rng):
    from longspan import _longspan

    q, k, v, dout = (rng.standard_normal(SHAPE, dtype="float32") for _ in range(4))

    def raw(array):
        strides = [stride // array.itemsize for stride in array.strides]
        return (array.ctypes.data, array.shape, strides, array.dtype.name)

    expected = longspan.forward(q, k, v, "causal")
    out, lse, rest = (numpy.empty_like(x) for x in expected)
    read = [raw(x) for x in (q, k, v)]
    _longspan.raw_forward(*read, raw(out), raw(lse), raw(rest), "causal")
    for got, want in zip((out, lse, rest), expected):
        assert numpy.array_equal(got, want)
    gradients = [numpy.empty_like(x) for x in (q, k, v)]
    saved = [raw(x) for x in (out, lse, rest, dout)]
    _longspan.raw_backward(*read, *saved, None, *[raw(x) for x in gradients], "causal")
    for got, want in zip(gradients, longspan.backward(q, k, v, expected, dout, "causal")):
        assert numpy.array_equal(got, want)
    with pytest.raises(TypeError, match="q holds int64"):
        address, shape, strides, _ = read[0]
        _longspan.raw_forward((address, shape, strides, "int64"), *read[1:], *saved[:3], "causal")
    with pytest.raises(ValueError, match="q has 4 axes and 3 strides"):
        _longspan.raw_forward((address, shape, strides[1:], "float32"), *read[1:], *saved[:3], "causal")
