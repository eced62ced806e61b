"""From a graph of CPU tensors to the code that Inductor generates for a GPU."""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import torch
from fake_device import DEVICE, install
from torch._inductor import config
from torch._inductor.compile_fx import fake_tensor_prop, view_to_reshape
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

OPERATORS = (
    torch.ops.higher_order.flex_attention,
    torch.ops.higher_order.flex_attention_backward,
)

#: One process, nothing kept between runs.
INDUCTOR = {"compile_threads": 1, "fx_graph_cache": False, "fx_graph_remote_cache": False}


def modules(graph: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """It and the functions that it calls: masks and scores."""
    return (module for module in graph.modules() if isinstance(module, torch.fx.GraphModule))


def operators(graph: torch.fx.GraphModule) -> int:
    return sum(node.target in OPERATORS for module in modules(graph) for node in module.graph.nodes)


def move(graph: torch.fx.GraphModule) -> None:
    """Has it make its tensors on the device."""
    cpu = torch.device("cpu")
    for module in modules(graph):
        for node in module.graph.nodes:
            move_to = lambda x: DEVICE if isinstance(x, torch.device) and x == cpu else x
            node.args = torch.fx.node.map_aggregate(node.args, move_to)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, move_to)
        module.recompile()


def lower(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    capability: tuple[int, int],
    multiprocessors: int | None = None,
) -> str:
    """The code that Inductor generates for a GPU of this compute capability."""
    modes = (x.fake_mode for x in inputs if isinstance(x, FakeTensor))
    mode = next(modes, None) or FakeTensorMode(allow_non_fake_inputs=True)

    def on_device(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)

    move(graph)
    view_to_reshape(graph)
    with install(capability, multiprocessors), config.patch(INDUCTOR), torch.no_grad():
        with mode:
            inputs = [on_device(x) for x in inputs]
        fake_tensor_prop(graph, inputs, force_allow_non_fake_inputs=True)
        lowering = GraphLowering(
            graph, example_inputs=inputs, shape_env=mode.shape_env, is_inference=True
        )
        with (
            V.set_debug_handler(DebugContext()),
            V.set_graph_handler(lowering),
            V.set_fake_mode(mode),
            V.set_extern_kernel_nodes([]),
        ):
            lowering.run(*inputs)
            source, _ = lowering.codegen()
    return source.value
