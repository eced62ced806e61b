"""An NVIDIA GPU that isn't there, for as long as Inductor generates code for it.

Inductor asks torch for the properties of the device (tile sizes and the number of parts of a split
depend on them) and Triton for its driver. Both are answered here, from public data sheets. Nothing runs
on the device: tensors of it exist under ``FakeTensorMode`` alone.
"""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Iterator, NamedTuple
from unittest import mock

import torch
import torch._dynamo.device_interface as device_interface
import torch._inductor.runtime.hints
import torch._inductor.utils
import torch.utils._triton
import triton
from triton.backends.compiler import GPUTarget

KIB = 1024
DEVICE = torch.device("cuda", 0)


class Gpu(NamedTuple):
    """What tile sizes and grids depend on."""

    name: str
    multiprocessors: int
    #: The most shared memory of one block of threads, in bytes.
    shared_memory: int
    l2_cache: int


#: By compute capability.
GPUS = {
    (8, 0): Gpu("NVIDIA A100", 108, 163 * KIB, 40 * KIB**2),
    (9, 0): Gpu("NVIDIA H100", 132, 227 * KIB, 50 * KIB**2),
    (10, 0): Gpu("NVIDIA B200", 148, 227 * KIB, 126 * KIB**2),
}

#: Modules whose cached functions depend on the device.
CACHES = ("torch._inductor.utils", "torch._inductor.runtime.hints", "torch.utils._triton")


def properties(capability: tuple[int, int], gpu: Gpu) -> SimpleNamespace:
    """What ``torch.cuda.get_device_properties`` returns, as far as Inductor reads it."""
    return SimpleNamespace(
        name=gpu.name,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=gpu.multiprocessors,
        total_memory=80 * KIB**3,
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 * KIB,
        shared_memory_per_block_optin=gpu.shared_memory,
        shared_memory_per_multiprocessor=gpu.shared_memory + KIB,
        L2_cache_size=gpu.l2_cache,
        gcnArchName="",
    )


class Driver:
    """Triton's driver of the device: it knows its target and can't launch anything."""

    def __init__(self, capability: tuple[int, int], gpu: Gpu):
        self.capability = capability
        limits = {
            "max_shared_mem": gpu.shared_memory,
            "max_num_regs": 65536,
            "multiprocessor_count": gpu.multiprocessors,
            "warpSize": 32,
        }
        self.utils = SimpleNamespace(get_device_properties=lambda device: limits)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability[0] * 10 + self.capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return self.capability

    def get_active_torch_device(self) -> torch.device:
        return DEVICE


def forget() -> None:
    """Empties what Inductor remembers of devices."""
    for name in CACHES:
        for value in vars(sys.modules[name]).values():
            for function in (value, getattr(value, "create", None)):
                if callable(getattr(function, "cache_clear", None)):
                    function.cache_clear()
    for cache in ("caching_worker_device_properties", "caching_worker_current_devices"):
        getattr(device_interface, cache).pop("cuda", None)


@contextlib.contextmanager
def install(capability: tuple[int, int], multiprocessors: int | None = None) -> Iterator[None]:
    """Inside of it, device 0 is an NVIDIA GPU of this compute capability; outside of it nothing changes."""
    gpu = GPUS[capability]
    gpu = gpu._replace(multiprocessors=multiprocessors or gpu.multiprocessors)
    props = properties(capability, gpu)
    of_torch = {
        "is_available": lambda: True,
        "_is_compiled": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
        "get_device_properties": lambda device=None: props,
        "get_device_capability": lambda device=None: capability,
        "get_arch_list": lambda: [f"sm_{capability[0]}{capability[1]}"],
        "is_bf16_supported": lambda *args, **kwargs: True,
    }
    # Dynamo's interface of the device holds functions of `torch.cuda` by value.
    interface = device_interface.CudaInterface
    of_interface = {
        name: staticmethod(function) for name, function in of_torch.items() if hasattr(interface, name)
    }
    for name in ("exchange_device", "maybe_exchange_device"):
        of_interface[name] = staticmethod(lambda device: 0)
    of_interface["set_device"] = staticmethod(lambda device: None)
    of_interface["get_raw_stream"] = staticmethod(lambda device: 0)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **of_torch))
        stack.enter_context(mock.patch.multiple(interface, **of_interface))
        driver = triton.runtime.driver
        stack.callback(setattr, driver, "_active", driver._active)
        driver.set_active(Driver(capability, gpu))
        stack.callback(forget)
        forget()
        yield
