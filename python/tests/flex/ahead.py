"""FlexAttention's kernels over Longspan's masks, compiled for GPUs that aren't there.

Tile sizes are what torch chooses for the device, compile options are Inductor's; ``ptxas`` of Triton's
wheel assembles the kernels and ``cuobjdump`` says what they take. A kernel that takes more shared memory
than a block of threads may have can't be launched, and one that keeps much of its state in local memory
(its stack: what doesn't fit into registers) is slow. Compiling isn't launching: no more is shown.

    python ahead.py 8.0,9.0,10.0 64,128 [4096,5003 [pattern]]

prints JSON, one line per kernel, for these capabilities, head dims and lengths. With a second length torch
makes lengths arguments of the kernels, as it does for whoever calls with many. It is a program because Triton either compiles or interprets, per process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence
from unittest import mock

import torch
import triton
from fake_device import install
from generated import Kernel, Program, execute
from lowering import lower, operators
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime import triton_helpers
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import longspan.torch
from longspan.torch._engine import in_place_of
from longspan.torch._flex import FlexEngine

PATTERN = "causal & (window(1024, 0) | sinks(64))"
QUERY_HEADS, KEY_HEADS = 8, 2


class Figures(NamedTuple):
    """What one kernel takes on one GPU."""

    capability: str
    kind: str
    dim: int
    #: Whether lengths are arguments.
    dynamic: bool
    tiles: dict[str, int]
    warps: int
    stages: int
    #: Bytes of a block of threads.
    shared: int
    registers: int
    #: Bytes of a thread.
    stack: int


class Autotuners(Program):
    """Generated code whose kernels are compiled by Triton and not run."""

    def triton(self, name: str, source: str, device_str: str) -> Any:
        with mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None):
            autotuner = execute(source, name)[name]
        meta = {"inductor_meta": autotuner.inductor_meta}
        self.kernels.append(Kernel(name, autotuner, meta, self.launched))
        return autotuner


class Compiler:
    """A backend of ``torch.compile`` that compiles attention for a GPU and returns uninitialized results."""

    def __init__(self, capability: tuple[int, int]):
        self.capability = capability
        self.kernels: list[Kernel] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return aot_autograd(fw_compiler=self.compile, decompositions=select_decomp_table)(graph, inputs)

    def compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        results = [node.meta["val"] for node in graph.graph.output_node().args[0]]
        # Values of symbols without a guard on them.
        hints = lambda sizes: [size_hint(n) for n in sizes]
        shapes = [(hints(x.shape), hints(x.stride()), x.dtype) for x in results]
        if operators(graph):
            with install(self.capability):
                self.kernels += Autotuners(lower(graph, inputs, self.capability)).kernels

        def run(args: list[Any]) -> list[torch.Tensor]:
            args.clear()
            return [torch.empty_strided(size, stride, dtype=dtype) for size, stride, dtype in shapes]

        run._boxed_call = True
        return run


def size_hint(size: int | torch.SymInt) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [str(tool), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout + said.stderr)
    assert found, said
    return int(found[1]), int(found[2])


def compiled(kernel: Kernel, capability: tuple[int, int], dim: int, dynamic: bool) -> Figures:
    autotuner = kernel.function
    (config,) = autotuner.configs
    meta = autotuner._create_compile_meta(config)
    source = ASTSource(autotuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    with install(capability):
        options = autotuner._create_compile_options(config, meta)
        binary = triton.compile(source, target=target, options=options)
    tiles = {name: size for name, size in kernel.options.items() if name.startswith("BLOCK_")}
    registers, stack = resources(binary.asm["cubin"])
    return Figures(
        f"{capability[0]}.{capability[1]}",
        kernel.attention,
        dim,
        dynamic,
        tiles,
        config.num_warps,
        config.num_stages,
        binary.metadata.shared,
        registers,
        stack,
    )


def figures(capability: tuple[int, int], dim: int, lengths: Sequence[int], pattern: str) -> Iterator[Figures]:
    """Of the kernels of a call of ``longspan.torch.attention`` and its gradient, in bf16."""
    torch._dynamo.reset()
    compiler = Compiler(capability)
    engine = FlexEngine(backend=compiler)
    for tokens in lengths:
        q, k, v = (
            torch.zeros(1, heads, tokens, dim, dtype=torch.bfloat16, requires_grad=True)
            for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
        )
        with in_place_of("cpu", engine):
            longspan.torch.attention(q, k, v, pattern, enable_gqa=True).sum().backward()
        for kernel in compiler.kernels:
            if kernel.attention:
                yield compiled(kernel, capability, dim, dynamic=tokens != lengths[0])
        compiler.kernels.clear()


def main(capabilities: str, dims: str, tokens: str = "4096", pattern: str = PATTERN) -> None:
    torch.set_num_threads(1)
    lengths = [int(length) for length in tokens.split(",")]
    for text in capabilities.split(","):
        major, minor = map(int, text.split("."))
        for dim in map(int, dims.split(",")):
            for found in figures((major, minor), dim, lengths, pattern):
                print(json.dumps(found._asdict()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
