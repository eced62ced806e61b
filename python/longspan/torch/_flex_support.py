"""What FlexAttention's kernels need of torch, of the device and of a call; what they can't do is refused by name."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

if TYPE_CHECKING:
    from longspan.torch._flex import FlexEngine

#: The first version whose compiler takes the operators as ``_flex`` calls them.
_OLDEST = (2, 12)
#: The last version that was tested. Newer ones have to pass a canary.
_NEWEST = (2, 15)

#: FlexAttention on compute capability 7.0 was reported ten times slower than dense attention.
_CAPABILITY = (8, 0)

#: Elements per head of Triton's smallest matrix product.
_LEAST_DIM = 16

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def unused_lists() -> tuple[None, ...]:
    """Entries of a ``BlockMask`` behind its eight lists, which versions of torch differ in: orders of gradients
    for other backends."""
    from torch.nn.attention.flex_attention import BlockMask

    empty = torch.zeros((1, 1, 1), dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(empty, empty[..., None], BLOCK_SIZE=128)
    # Two lengths before the lists, two block sizes and the mask function behind.
    return (None,) * (len(mask.as_tuple()) - 13)


def version() -> tuple[int, int]:
    """That of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@contextlib.contextmanager
def score_gradients(used: bool) -> Iterator[None]:
    """Inside of it, torch's compiler derives the gradient of any score function. Without it, torch 2.12 to 2.15 use
    one tensor that is not traced for the gradient that arrives, and refuse functions that multiply by it."""
    if not used:
        yield
        return
    from torch._guards import detect_fake_mode

    # As an attribute its name is the operator's.
    flex_attention = importlib.import_module("torch._higher_order_ops.flex_attention")
    derive = flex_attention.create_fw_bw_graph

    def traced(score_mod: Any, index_values: Any, other_buffers: Any) -> Any:
        with detect_fake_mode(index_values) or contextlib.nullcontext():
            return derive(score_mod, index_values, other_buffers)

    with mock.patch.object(flex_attention, "create_fw_bw_graph", traced):
        yield


def check_call(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses what FlexAttention can't compute."""
    if version() < _OLDEST:
        raise RuntimeError(
            f"torch is {torch.__version__}, expected 2.12 or later for tensors on {q.device}: earlier "
            "compilers don't take FlexAttention's operators with tensors in masks; upgrade torch, or compute "
            "on the CPU"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in _DTYPES:
            raise TypeError(
                f"{name} holds {x.dtype}, expected float32, bfloat16 or float16: FlexAttention has no other "
                f"kernels, x.float() converts"
            )
        if x.shape[3] < _LEAST_DIM:
            raise ValueError(
                f"{name} has {x.shape[3]} elements per head, expected at least {_LEAST_DIM} for "
                "FlexAttention: pad them with zeros and give scale, or compute on the CPU"
            )


def check_device(device: torch.device, engine: FlexEngine) -> None:
    """Refuses a GPU that FlexAttention has no kernels for."""
    _check_device(device.index if device.index is not None else torch.cuda.current_device())
    if version() > _NEWEST:
        _canary(device, engine)


@functools.cache
def _check_device(index: int) -> None:
    if torch.version.hip is not None:
        raise RuntimeError(
            "this torch is built for ROCm, expected CUDA: Longspan's masks were never compiled for AMD GPUs; "
            "use torch's flex_attention with Layout.to_block_mask, or compute on the CPU"
        )
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            "FlexAttention's kernels are compiled by Triton, which is missing: pip install triton, in the "
            "version that torch asks for"
        ) from error
    capability = torch.cuda.get_device_capability(index)
    if capability < _CAPABILITY:
        raise RuntimeError(
            f"cuda:{index} has compute capability {capability[0]}.{capability[1]}, expected 8.0 or more (A100 "
            "and later): FlexAttention was reported slower than dense attention on earlier ones; use torch's "
            "scaled_dot_product_attention there, or compute on the CPU"
        )


_passed: set[torch.device] = set()


def _canary(device: torch.device, engine: FlexEngine) -> None:
    """Compares the engine with dense attention once per process and device, where torch is newer than what was
    tested: the meaning of the operators' log-sum-exp and of its gradient isn't documented."""
    if device in _passed:
        return
    from longspan.torch._flex_canary import errors

    _passed.add(device)
    try:
        found = errors(engine, device)
    except Exception:
        _passed.discard(device)
        raise
    # TF32 products have 11 bits; a log-sum-exp of another base is off by a third.
    wrong = {name: error for name, error in found.items() if not error < 1e-2}
    if wrong:
        _passed.discard(device)
        raise RuntimeError(
            f"torch {torch.__version__} computes {', '.join(wrong)} otherwise than torch 2.12 to 2.15, with "
            f"which Longspan was tested (errors {wrong}): install torch 2.15, and report this"
        )
