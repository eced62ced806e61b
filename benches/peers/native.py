"""Longspan over ctypes: the other side of native/src/lib.rs."""

import ctypes as c
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def give_back_memory() -> None:
    """Has glibc return what it was told to keep: what a step leaves free is gigabytes."""
    trim = getattr(c.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


class Failed(Exception):
    """Longspan refused a call; the text is its own."""


class Request(c.Structure):
    _fields_ = [
        ("pattern", c.c_char_p),
        ("isa", c.c_char_p),
        ("dtype", c.c_char_p),
        ("queries", c.c_uint64),
        ("keys", c.c_uint64),
        ("threads", c.c_size_t),
    ]


class Extents(c.Structure):
    _fields_ = [
        (name, c.c_size_t) for name in ("batch", "queries", "keys", "heads", "kv_heads", "dim")
    ]


def _pointers(*names: str) -> type[c.Structure]:
    fields = [(name, c.c_void_p) for name in names]
    return type("Pointers", (c.Structure,), {"_fields_": fields})


InputTensors = _pointers("q", "k", "v")
OutputTensors = _pointers("out", "lse", "lse_lo")
SavedTensors = _pointers("out", "lse", "lse_lo", "dout")
GradientTensors = _pointers("dq", "dk", "dv")


class Library:
    """The loaded library. Every call lets go of Python's lock."""

    def __init__(self, path: Path) -> None:
        self._native = c.CDLL(str(path))
        text = c.c_void_p  # not c_char_p, which would copy the text and lose the pointer
        by_ref = c.c_void_p
        self._declare("peers_plan", text, by_ref, by_ref)
        self._declare("peers_free_plan", None, c.c_void_p)
        self._declare("peers_pairs", c.c_uint64, c.c_void_p)
        self._declare("peers_forward", text, c.c_void_p, by_ref, by_ref, by_ref)
        self._declare("peers_backward", text, c.c_void_p, by_ref, by_ref, by_ref, by_ref)
        self._declare("peers_best_isa", text)
        self._declare("peers_fma_peak", text, c.c_char_p, c.c_size_t, by_ref)
        self._declare("peers_amx_peak", text, c.c_size_t, by_ref)
        self._declare("peers_read_bandwidth", text, c.c_void_p, c.c_size_t, c.c_size_t, by_ref)
        self._declare("peers_free_text", None, c.c_void_p)

    def _declare(self, name: str, result: type | None, *arguments: type) -> None:
        function = getattr(self._native, name)
        function.restype, function.argtypes = result, arguments

    def plan(
        self, pattern: str, queries: int, keys: int, dtype: str, threads: int, isa: str | None
    ) -> "Plan":
        name = isa and isa.encode()
        request = Request(pattern.encode(), name, dtype.encode(), queries, keys, threads)
        handle = c.c_void_p()
        self._run(self._native.peers_plan, c.byref(request), c.byref(handle))
        return Plan(self, handle)

    def best_isa(self) -> str:
        return self._take(self._native.peers_best_isa())

    def fma_peak(self, threads: int, isa: str | None) -> float:
        """GFLOP/s of all threads together."""
        rate = c.c_double()
        self._run(self._native.peers_fma_peak, isa and isa.encode(), threads, c.byref(rate))
        return rate.value

    def amx_peak(self, threads: int) -> float:
        """GFLOP/s of all threads together; 0 where this machine has no AMX."""
        rate = c.c_double()
        self._run(self._native.peers_amx_peak, threads, c.byref(rate))
        return rate.value

    def read_bandwidth(self, address: int, numbers: int, threads: int) -> float:
        """GB/s of all threads together that read so many f32."""
        rate = c.c_double()
        self._run(self._native.peers_read_bandwidth, address, numbers, threads, c.byref(rate))
        return rate.value

    def _run(self, function: Callable[..., int | None], *arguments: object) -> None:
        error = function(*arguments)
        if error is not None:
            raise Failed(self._take(error))

    def _take(self, text: int) -> str:
        taken = c.string_at(text).decode()
        self._native.peers_free_text(text)
        return taken


@dataclass
class Plan:
    """A compiled pattern. Pointers are those of contiguous tensors, [batch, head, token, dim]."""

    library: Library
    handle: c.c_void_p

    def __del__(self) -> None:
        self.library._native.peers_free_plan(self.handle)

    @property
    def pairs(self) -> int:
        """Pairs of query and key that one head computes."""
        return int(self.library._native.peers_pairs(self.handle))

    def forward(self, extents: Extents, inputs: c.Structure, output: c.Structure) -> None:
        function = self.library._native.peers_forward
        arguments = (extents, inputs, output)
        self.library._run(function, self.handle, *map(c.byref, arguments))

    def backward(
        self,
        extents: Extents,
        inputs: c.Structure,
        arrived: c.Structure,
        gradients: c.Structure,
    ) -> None:
        function = self.library._native.peers_backward
        arguments = (extents, inputs, arrived, gradients)
        self.library._run(function, self.handle, *map(c.byref, arguments))
