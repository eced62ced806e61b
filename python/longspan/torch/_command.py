"""What ``longspan.torch.verify`` and ``longspan.torch.bench`` have in common: the device, and what computes on it."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import torch

import longspan
from longspan.torch._device_engine import DeviceEngine
from longspan.torch._engine import Engine, engine_of

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="cuda",
        help="cuda, cuda:1, …: FlexAttention's kernels; cpu: Longspan's own (default: %(default)s)",
    )


def opened(parser: argparse.ArgumentParser, name: str) -> tuple[torch.device, Engine]:
    """A device and the engine that computes on it; ends the command where there is none."""
    try:
        device = torch.device(name)
        if device.type == "cuda":
            _check_cuda(device)
        engine = engine_of(device)
        if isinstance(engine, DeviceEngine):
            x = torch.zeros(1, 1, 1, 16, device=device)
            engine.check(x, x, x)
    except (RuntimeError, ValueError, TypeError) as error:
        parser.error(f"--device {name}: {error}")
    return device, engine


def _check_cuda(device: torch.device) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count > (device.index or 0):
        return
    build = "for CUDA " + torch.version.cuda if torch.version.cuda else "without CUDA"
    raise RuntimeError(
        f"there is no such CUDA device: torch {torch.__version__}, built {build}, sees {count}. Check `nvidia-smi` "
        "and the build of torch, or pass --device cpu for Longspan's own kernels"
    )


def title(device: torch.device, engine: Engine) -> str:
    """What computes on what, for the first line."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        where = f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    else:
        where = f"{device}, {torch.get_num_threads()} threads"
    return f"longspan {longspan.__version__}, torch {torch.__version__}, {where}, kernels: {engine.name}"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def highest_precision() -> Iterator[None]:
    """Products of f32 in f32, not TF32: FlexAttention and Longspan's kernels both follow this setting."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
