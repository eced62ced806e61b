"""A backend of ``torch.compile`` that runs torch's CUDA kernels of FlexAttention on CPU tensors.

Graphs take the way that they take to a GPU: Dynamo, AOTAutograd, Inductor's lowering, generated code;
then kernels are run by Triton's interpreter instead of a GPU. So what is tested is what users call, and
what reads block lists: FlexAttention without compilation doesn't look at them. Not tested are races,
alignment, and the numerics of tensor cores.

    backend = InterpretedCuda()
    f = torch.compile(attend, backend=backend, fullgraph=True)
    with backend.watch() as launches:
        f(q, k, v)
    assert [launch.attention for launch in launches if launch.attention] == ["forward"]

The same object serves an outer compilation: forward and backward graphs of AOTAutograd are interpreted.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch
from generated import Kernel, Program
from lowering import lower, operators
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table


class Launch(NamedTuple):
    """A kernel that was run."""

    graph: Graph
    kernel: str
    #: ``forward``, ``backward`` or ``decode`` of an attention template.
    attention: str | None


@dataclass(eq=False)
class Graph:
    """A graph that was compiled: by ``torch.compile``, once per set of guards."""

    #: ``forward``, ``backward`` (of an outer compilation) or ``inference``.
    stage: str
    graph: torch.fx.GraphModule
    #: Calls of FlexAttention's operators in it.
    operators: int
    #: What Inductor generated; empty where there is no attention, which is run as it is.
    source: str = ""
    kernels: list[Kernel] = field(default_factory=list)
    #: Kernels of each call, in order.
    calls: list[list[Launch]] = field(default_factory=list)

    @property
    def attention(self) -> list[str]:
        """Attention templates in the generated code: ``forward``, ``backward``, ``decode``."""
        return [kernel.attention for kernel in self.kernels if kernel.attention]


class InterpretedCuda:
    """The backend, and what it saw.

    A decoding kernel splits keys over all multiprocessors of the device, whatever their number, so the device
    has few here.
    """

    def __init__(self, capability: tuple[int, int] = (9, 0), multiprocessors: int = 8):
        self.capability = capability
        self.multiprocessors = multiprocessors
        #: All graphs that were compiled.
        self.graphs: list[Graph] = []
        #: All kernels that were run.
        self.launches: list[Launch] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        stages = {
            "fw_compiler": "forward",
            "bw_compiler": "backward",
            "inference_compiler": "inference",
        }
        compilers = {
            name: lambda graph, inputs, stage=stage: self.compile(graph, inputs, stage)
            for name, stage in stages.items()
        }
        return aot_autograd(**compilers, decompositions=select_decomp_table)(graph, inputs)

    def compile(
        self, module: torch.fx.GraphModule, inputs: Sequence[Any], stage: str
    ) -> Callable[[list[Any]], Any]:
        """One graph of aten operators, as a function of a list of arguments."""
        graph = Graph(stage, module, operators(module))
        if graph.operators:
            graph.source = lower(module, inputs, self.capability, self.multiprocessors)
            program = Program(graph.source, lambda kernel: self.record(graph, kernel))
            graph.kernels = program.kernels
            if len(graph.attention) < graph.operators:
                raise AssertionError(
                    f"{graph.operators} calls of FlexAttention, but {len(graph.attention)} attention templates"
                )
        else:
            program = lambda args: torch.fx.Interpreter(module).boxed_run(args)
        self.graphs.append(graph)

        def run(args: list[Any]) -> Any:
            graph.calls.append([])
            return program(args)

        run._boxed_call = True
        return run

    def record(self, graph: Graph, kernel: Kernel) -> None:
        launch = Launch(graph, kernel.name, kernel.attention)
        graph.calls[-1].append(launch)
        self.launches.append(launch)

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[Launch]]:
        """Kernels that are run inside of it."""
        seen: list[Launch] = []
        first = len(self.launches)
        yield seen
        seen.extend(self.launches[first:])
