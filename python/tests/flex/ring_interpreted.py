"""What each rank does in ``test_ring_interpreted.py``: ``torchrun ring_interpreted.py [patterns]``.

A ring of a Gloo group by the code for CUDA devices: torch's kernels in Triton's interpreter on each rank's tensors,
messages as tensors of the group.
"""

from __future__ import annotations

import os
import pathlib
import sys

os.environ["TRITON_INTERPRET"] = "1"
sys.path.append(str(pathlib.Path(__file__).parents[1]))

import numpy
import oracle
import torch
import torch.distributed as dist
from interpreter import InterpretedCuda
from operators import TILES

import longspan
from longspan.torch import _ranks, attention, ring_attention, ring_positions
from longspan.torch._engine import in_place_of
from longspan.torch._flex import FlexEngine

#: Batch entries, heads of queries and of keys, tokens (prime), head dim.
BATCH, HEADS, KEY_HEADS, TOKENS, DIM = 1, 2, 1, 401, 32
#: Longer than the slowest rank's kernels take.
LONG = 900.0
WINDOW = ("causal & (window(100, 0) | sinks(8))", lambda q, k: k <= q and (q - k <= 100 or k < 8))
# Global queries are sent to the keys.
GLOBAL = ("global_tokens(3) | window(40, 7)", lambda q, k: q < 3 or k < 3 or -7 <= q - k <= 40)
LONGNET = (longspan.Dilated([64, 300], [1, 2], within="causal"), None)
CASES = {
    "window": (*WINDOW, "contiguous"),
    "global": (*GLOBAL, "contiguous"),
    "longnet": (*LONGNET, "zigzag"),
}


def whole():
    draw = torch.Generator().manual_seed(0)
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    tensors = [torch.randn(BATCH, count, TOKENS, DIM, generator=draw) for count in heads]
    return *tensors, torch.randn(BATCH, HEADS, TOKENS, generator=draw)


def results(call, q, k, v, dout, dlse):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = call(q, k, v)
    gradients = torch.autograd.grad([out, lse], (q, k, v), [dout, dlse])
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *gradients)))


def run(name):
    pattern, rule, shards = CASES[name]
    everything = whole()
    mine = ring_positions(TOKENS, dist.get_rank(), dist.get_world_size(), shards)
    backend = InterpretedCuda()
    engine = FlexEngine(backend=backend, options=dict.fromkeys(TILES, 64))
    with in_place_of("cpu", engine):
        got = results(
            lambda q, k, v: ring_attention(
                q, k, v, pattern, shards=shards, tokens=TOKENS, enable_gqa=True, return_lse=True, timeout=LONG
            ),
            *(x.index_select(2, mine) for x in everything),
        )
    launched = {launch.attention for launch in backend.launches}
    assert {"forward", "backward"} <= launched, launched
    ring = next(reversed(_ranks.ranks_of(None)[1]._rings.values())).ring
    received, _ = ring.traffic()
    assert received == sum(ring.bytes_needed), (received, ring.bytes_needed)
    graphs = [graph for graph in backend.graphs if graph.operators]
    print(
        f"{name}: rank {dist.get_rank()} received {received} of {sum(ring.bytes_needed)} bytes, "
        f"{len(backend.launches)} kernels of {len(graphs)} graphs",
        flush=True,
    )
    if rule is None:
        one = results(
            lambda q, k, v: attention(q, k, v, pattern, enable_gqa=True, return_lse=True), *everything
        )
        for what, x in got.items():
            torch.testing.assert_close(x, one[what][:, :, mine], atol=5e-6, rtol=5e-5)
        return
    mask = oracle.mask(rule, TOKENS, TOKENS)
    truth, gross = oracle.attention(*everything[:3], mask, *everything[3:])
    for what, x in got.items():
        own, size = ([numpy.take(y, mine.numpy(), 2) for y in z] for z in (truth, gross))
        oracle.check(what, x, oracle.Truth(*own), oracle.Truth(*size))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in sys.argv[1:] or CASES:
        run(case)
    dist.barrier()
    dist.destroy_process_group()
