"""What Triton's interpreter computes in another way than a GPU does, put right.

The interpreter holds bf16 as the bits of it, ``uint16``, and forgets that in places: a dot product
multiplies the bits as whole numbers, arithmetic adds them, a conversion from f32 cuts bits off and may
lose the carry into the exponent. Here bf16 is widened to f32, computed with, and rounded to nearest
even, as the hardware does; what nobody needed yet is refused rather than left wrong. Functions of
``libdevice`` are those of NumPy.

It is also slow where it needn't be: it wraps all functions of ``tl`` anew for every call of a function
by a kernel, computes sums and products of integers a second time to find overflows, which it then
ignores, and calls the function of a reduction for every number by itself.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Callable, Iterator
from unittest import mock

import numpy
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    InterpreterBuilder,
    InterpreterOptions,
    ReduceOps,
    ReduceScanOpInterface,
    TensorHandle,
)

Binary = Callable[[numpy.ndarray, numpy.ndarray], numpy.ndarray]


def is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def widened(bits: numpy.ndarray) -> numpy.ndarray:
    """bf16 bits as f32, exactly."""
    return (bits.astype("uint32") << 16).view("float32")


def rounded(x: numpy.ndarray) -> numpy.ndarray:
    """The bits of the nearest bf16 numbers, ties to even."""
    x = numpy.ascontiguousarray(x, dtype="float32")
    bits = x.view("uint32")
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return numpy.where(numpy.isnan(x), 0x7FC0, nearest).astype("uint16")


def wide(handle: TensorHandle) -> TensorHandle:
    """The same numbers in a type that NumPy computes with."""
    return TensorHandle(widened(handle.data), tl.float32) if is_bf16(handle) else handle


def narrow(handle: TensorHandle) -> TensorHandle:
    """Rounded to bf16, unless it is the result of a comparison."""
    if handle.data.dtype == numpy.bool_:
        return handle
    return TensorHandle(rounded(handle.data), tl.bfloat16)


def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """``a @ b + d``, products of 16 bits summed up in f32."""
    operands = (wide(x).data.astype(d.data.dtype, copy=False) for x in (a, b))
    return TensorHandle(numpy.matmul(*operands) + d.data, d.dtype.scalar)


def cast(self, source, target):
    numbers = wide(source).data
    if target.scalar == tl.bfloat16:
        return TensorHandle(source.data if is_bf16(source) else rounded(numbers), tl.bfloat16)
    return TensorHandle(numbers.astype(interpreter._get_np_dtype(target)), target.scalar)


def binary(self, a, b, op: Binary, original=InterpreterBuilder.binary_op):
    if is_bf16(a) and is_bf16(b):
        return narrow(original(self, wide(a), wide(b), op))
    return original(self, a, b, op)


def unary(self, a, op, original=InterpreterBuilder.unary_op):
    return narrow(original(self, wide(a), op)) if is_bf16(a) else original(self, a, op)


def fma(self, a, b, c, original=InterpreterBuilder.create_fma):
    if is_bf16(c):
        return narrow(original(self, *(wide(x) for x in (a, b, c))))
    return original(self, a, b, c)


def reduction(self, inputs, original=ReduceScanOpInterface.apply):
    operands = inputs if isinstance(inputs, tuple) else (inputs,)
    if any(is_bf16(x.handle) for x in operands):
        raise NotImplementedError("reductions of bf16 in Triton's interpreter")
    return original(self, inputs)


def pairwise(self, inputs):
    """A reduction by any function: of neighbours, then of pairs, instead of one number after another."""
    arrays = [x.handle.data for x in inputs]
    dims = arrays[0].ndim
    if self.axis is None:
        arrays = [x.reshape(-1) for x in arrays]
    arrays = [numpy.moveaxis(x, self.axis or 0, 0) for x in arrays]
    while len(arrays[0]) > 1:
        halves = [
            self.to_tensor(numpy.ascontiguousarray(array[first::2]), x.dtype)
            for first in (0, 1)
            for array, x in zip(arrays, inputs)
        ]
        results = self.combine_fn.fn(*halves)
        results = results if isinstance(results, tuple) else (results,)
        arrays = [x.handle.data for x in results]
    results = [x[0] for x in arrays]
    if self.keep_dims:
        axes = self.axis if self.axis is not None else tuple(range(dims))
        results = [numpy.expand_dims(x, axes) for x in results]
    return [self.to_tensor(result, x.dtype) for result, x in zip(results, inputs)]


def elementwise(function: Callable[..., numpy.ndarray]) -> Callable[..., tl.tensor]:
    """A function of NumPy as one of ``libdevice``."""

    def apply(*operands: tl.tensor) -> tl.tensor:
        result = numpy.asarray(function(*(x.handle.data for x in operands)))
        handle = TensorHandle(result.astype(operands[0].handle.data.dtype), operands[0].dtype.scalar)
        return tl.tensor(handle, operands[0].type)

    return apply


class Patches:
    """Wraps the language for a kernel once, not again for every function that it calls."""

    def __init__(self, patch: Callable = interpreter._patch_lang):
        self.patch = patch
        self.modules: set[str] = set()
        self.scopes: list = []

    def __call__(self, function: Callable) -> Patches:
        """Called for the kernel, whose scope is restored after it, and for functions, whose is not."""
        names = function.__globals__.values()
        modules = {module.__name__ for module in (tl, tl.core) if any(module is x for x in names)}
        if not modules <= self.modules:
            self.scopes.append(self.patch(function))
            self.modules |= modules
        return self

    def restore(self) -> None:
        while self.scopes:
            self.scopes.pop().restore()
        self.modules.clear()


#: The functions that Inductor calls for what masks and scores may say.
LIBDEVICE = SimpleNamespace(
    **{
        name: elementwise(getattr(numpy, name))
        for name in ("ceil", "cos", "exp", "exp2", "expm1", "floor", "log", "log1p", "log2", "sin")
    },
    **{name: elementwise(getattr(numpy, name)) for name in ("fmod", "sqrt", "tanh", "trunc")},
    pow=elementwise(numpy.power),
    rsqrt=elementwise(lambda x: 1 / numpy.sqrt(x)),
    nearbyint=elementwise(numpy.rint),
)


@contextlib.contextmanager
def corrected() -> Iterator[None]:
    """Inside of it, interpreted kernels compute as a GPU does, and overflow is silent as there."""
    builder = {
        "create_dot": dot,
        "cast_impl": cast,
        "create_fp_to_fp": lambda self, source, target, rounding: cast(self, source, target),
        "binary_op": binary,
        "unary_op": unary,
        "create_fma": fma,
    }
    with (
        mock.patch.multiple(InterpreterBuilder, **builder),
        mock.patch.object(ReduceScanOpInterface, "apply", reduction),
        mock.patch.object(ReduceOps, "generic_reduce", pairwise),
        mock.patch.object(triton_helpers, "libdevice", LIBDEVICE),
        mock.patch.object(interpreter, "_patch_lang", Patches()),
        mock.patch.object(
            interpreter.interpreter_builder, "options", InterpreterOptions(sanitize_overflow=False)
        ),
        numpy.errstate(all="ignore"),
    ):
        yield
