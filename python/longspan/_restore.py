"""What pickles call, and elements of an ``Array`` for NumPy."""

from __future__ import annotations

from typing import Any

import numpy
from numpy.typing import DTypeLike, NDArray

from longspan import _longspan


def layout(
    text: str, tokens_q: int, tokens_k: int, options: dict[str, Any]
) -> _longspan.Layout:
    """The layout of a pickle: compiled again from its pattern, which gives the same blocks."""
    return _longspan.Pattern(text).compile(tokens_q, tokens_k, **options)


def dilated(
    branches: tuple[list[int], list[int]],
    options: dict[str, Any],
    key_padding: list[tuple[int, int]] | None,
    cu_seqlens: tuple[list[int], list[int]] | None,
) -> _longspan.Dilated:
    """The branches of a pickle, for sequences of its lengths."""
    made = _longspan.Dilated(*branches, **options)
    if key_padding is not None:
        return made.padded(key_padding)
    return made if cu_seqlens is None else made.packed_cu_seqlens(*cu_seqlens)


def array(shape: tuple[int, int, int, int], data: bytes) -> _longspan.Array:
    """The array of a pickle."""
    return _longspan.Array._from_bytes(shape, data)


def to_numpy(array: _longspan.Array, dtype: DTypeLike) -> NDArray[Any]:
    """A copy of the elements as another type."""
    bits = numpy.frombuffer(array._to_bytes(), dtype=numpy.uint16).reshape(array.shape)
    dtype = numpy.dtype(dtype)
    if dtype.name == "bfloat16":
        return bits.view(dtype).copy()
    if dtype.kind != "f":
        raise TypeError(f"dtype is {dtype}, expected a floating-point type, as float32")
    # The upper half of an f32 is a bf16. NaNs of any kind stay NaN without a warning.
    wide = (bits.astype(numpy.uint32) << 16).view(numpy.float32)
    with numpy.errstate(invalid="ignore"):
        return wide.astype(dtype, copy=False)
