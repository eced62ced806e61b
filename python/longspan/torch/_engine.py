"""Which engine computes on which tensors: Longspan's kernels on the CPU, FlexAttention's on CUDA devices.

An engine takes whatever ``attention`` takes, after validation, and returns results in its own layout, which
``empty`` tells without computing anything: operators trace with that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from longspan.torch import _run
from longspan.torch._run import Found, Places, Scores

#: Tokens per block of layouts for other engines than Longspan's: what FlexAttention's kernels are tuned for.
BLOCK = 128


class Engine(Protocol):
    """Attention over a pattern, its text, a layout or a ``Dilated``, forward and backward."""

    name: str

    def empty(self, q: Tensor, v: Tensor, saves: bool) -> Found:
        """Room for results; ``saves`` where a backward pass may follow."""

    def empty_gradient(self, x: Tensor) -> Tensor:
        """Room for the gradient of a tensor."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        what: Any,
        scores: Scores,
        places: Places,
        saves: bool,
    ) -> Found:
        """Output and log-sum-exp."""

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        found: Found,
        dout: Tensor | None,
        dlse: Tensor | None,
        what: Any,
        scores: Scores,
        places: Places,
        wanted: Sequence[bool] = (True, True, True),
    ) -> tuple[Tensor, ...]:
        """Gradients of ``q``, ``k``, ``v``, sink logits, bias table and slopes."""


class CpuEngine:
    """Longspan's own kernels."""

    name = "Longspan"

    def empty(self, q: Tensor, v: Tensor, saves: bool) -> Found:
        return _run.empty_found(q, v) if saves else _run.empty_output(q, v)

    def empty_gradient(self, x: Tensor) -> Tensor:
        return _run.empty(x, x.shape)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        what: Any,
        scores: Scores,
        places: Places,
        saves: bool,
    ) -> Found:
        return _run.forward(self.empty(q, v, saves), q, k, v, what, scores, places)

    backward = staticmethod(_run.backward)


_CPU = CpuEngine()
_in_place: dict[str, Engine] = {}


@functools.cache
def _flex() -> Engine:
    # It imports torch's compiler, in seconds, for those too who never compute on a GPU.
    from longspan.torch._flex import FlexEngine

    return FlexEngine()


def engine_of(device: torch.device) -> Engine:
    """The engine for tensors of a device, or an error."""
    if device.type in _in_place:
        return _in_place[device.type]
    if device.type == "cpu":
        return _CPU
    check_device_type(device)
    return _flex()


def check_device_type(device: torch.device) -> None:
    """Refuses a device that no engine computes on. Compilers trace it, so it makes no engine."""
    if device.type not in ("cpu", "cuda") and device.type not in _in_place:
        raise ValueError(
            f"q is on {device}, expected the CPU or a CUDA device: copy it there, or stay on the device with torch's "
            "flex_attention and the mask that Layout.to_block_mask makes"
        )


def described(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else str(device)


def check_learned(q: Tensor, scores: Scores) -> None:
    """Refuses what only Longspan's own kernels have, where autograd can still be asked."""
    if is_own(q.device):
        return
    if scores.dropout_p:
        raise NotImplementedError(
            f"dropout_p is {scores.dropout_p} with tensors on {q.device}, expected 0: FlexAttention has no dropout; "
            "drop elements of the output, or compute on the CPU"
        )
    for name, x in (("bias_table", scores.bias_table), ("alibi_slopes", scores.alibi_slopes)):
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name} requires a gradient with tensors on {q.device}, where FlexAttention computes none for it: "
                "detach it, or compute on the CPU"
            )


def is_own(device: torch.device) -> bool:
    """Whether Longspan's kernels compute on tensors of a device."""
    return device.type == "cpu" and not _in_place


@contextlib.contextmanager
def in_place_of(device_type: str, engine: Engine) -> Iterator[Engine]:
    """Computes on tensors of a type of device by another engine. For tests and ``longspan.torch.verify``, which
    run one engine's code on the tensors of another."""
    before = dict(_in_place)
    _in_place[device_type] = engine
    try:
        yield engine
    finally:
        _in_place.clear()
        _in_place.update(before)
