"""Code that Inductor generated for a GPU, run on CPU tensors.

The code is a Python module: sources of Triton kernels, and a function that allocates buffers and
launches kernels. It is executed as it is, with the names of CUDA that it imports standing for the CPU;
kernels are run by Triton's interpreter, which reads and writes the tensors where they are.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import types
from dataclasses import dataclass, field
from typing import Any, Callable
from unittest import mock

import torch
import torch._C._dynamo.guards as guards
import torch._inductor.async_compile
from arithmetic import LIBDEVICE, corrected
from torch._inductor.runtime import triton_helpers, triton_heuristics
from triton.runtime.interpreter import InterpretedFunction

#: The most numbers that a block of a pointwise kernel or a reduction has.
BLOCK = 1 << 14
#: What decorates kernels in generated code, as far as it is interpreted.
HEURISTICS = ("template", "pointwise", "reduction", "persistent_reduction")

unique = itertools.count()


def execute(source: str, name: str) -> dict[str, Any]:
    """The names that a module defines. Triton reads the source of functions, so it is kept."""
    file = f"<{name} {next(unique)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = types.ModuleType(name)
    module.__file__ = file
    exec(compile(source, file, "exec"), module.__dict__)
    return module.__dict__


def power_of_two(n: int) -> int:
    """The least that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


@dataclass
class Kernel:
    """One kernel of the generated code."""

    name: str
    function: InterpretedFunction
    #: What Inductor notes about it.
    meta: dict[str, Any]
    launched: Callable[[Kernel], None]

    @property
    def options(self) -> dict[str, Any]:
        """Constants of a template: tile sizes among them."""
        return self.meta["inductor_meta"].get("config_args", {})

    @property
    def attention(self) -> str | None:
        """``forward``, ``backward`` or ``decode`` of FlexAttention's templates."""
        if "SPARSE_KV_BLOCK_SIZE" not in self.options:
            return None
        if "BLOCK_M1" in self.options:
            return "backward"
        return "decode" if "SPLIT_KV" in self.options else "forward"

    def run(self, *args: Any, stream: object = None) -> None:
        """What generated code calls to launch it."""
        self.launched(self)
        with corrected():
            if self.meta["inductor_meta"]["grid_type"] == "FixedGrid":
                self.function[args[-3:]](*args[:-3])
            else:
                blocks, grid = self.shape(dict(zip(self.function.arg_names, args)))
                self.function[grid](*args, **blocks)

    def shape(self, values: dict[str, Any]) -> tuple[dict[str, int], tuple[int, ...]]:
        """Sizes of blocks, which a GPU's autotuner chooses, and the grid that they make."""
        numels = {name: value for name, value in values.items() if name.endswith("numel")}
        blocks: dict[str, int] = {}
        left = BLOCK
        # Reductions first: a row that fits is one block.
        for name in sorted(self.function.arg_names):
            if name.endswith("BLOCK"):
                numel = numels[f"{name[:2].lower()}_numel" if name[0] == "R" else f"{name[0].lower()}numel"]
                blocks[name] = min(left, power_of_two(numel))
                left = max(1, left // blocks[name])
        grid = triton_heuristics.GridExpr.from_meta(self.meta["inductor_meta"], blocks)
        return blocks, grid.eval_slow(numels)


@dataclass
class Program:
    """A module of generated code that is ready to be called."""

    source: str
    launched: Callable[[Kernel], None] = lambda kernel: None
    kernels: list[Kernel] = field(default_factory=list)

    def __post_init__(self) -> None:
        imports = [
            mock.patch.object(torch._inductor.async_compile, "AsyncCompile", lambda: self),
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True),
            mock.patch.object(guards, "_empty_strided_cuda", guards._empty_strided_cpu),
        ]
        with contextlib.ExitStack() as stack:
            for patch in imports:
                stack.enter_context(patch)
            names = execute(self.source, "generated")
        names["device"] = lambda *args, **kwargs: torch.device("cpu")
        self.function: Callable[[list[Any]], Any] = names["call"]

    def triton(self, name: str, source: str, device_str: str) -> Kernel:
        """What generated code calls to compile a kernel."""

        def decorator(**meta: Any) -> Callable[[InterpretedFunction], Kernel]:
            return lambda function: Kernel(name, function, meta, self.launched)

        stand_ins = dict.fromkeys(HEURISTICS, decorator)
        with (
            mock.patch.multiple(triton_heuristics, **stand_ins),
            mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        ):
            names = execute(source, name)
        names["libdevice"] = LIBDEVICE
        kernel = names[name]
        assert isinstance(kernel, Kernel), f"{name} is decorated by none of {HEURISTICS}"
        assert isinstance(kernel.function, InterpretedFunction), "TRITON_INTERPRET=1 came too late"
        self.kernels.append(kernel)
        return kernel

    def wait(self, names: dict[str, Any]) -> None:
        """What generated code calls when all its kernels are there."""

    def __call__(self, args: list[Any]) -> Any:
        """Takes the list of arguments and empties it, as AOTAutograd wants."""
        with (
            mock.patch.object(torch.cuda, "_DeviceGuard", lambda device: contextlib.nullcontext()),
            mock.patch.object(torch.cuda, "set_device", lambda device: None),
            torch.no_grad(),
        ):
            return self.function(args)
