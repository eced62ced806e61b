"""What a new packing costs a context-parallel training step: one after another with new sequences, and with the same once more.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 3 packing.py [TOKENS_PER_RANK [ROUNDS]]

A LongNet of six layers (hidden size 256, 8 heads, the paper's branches) over documents of log-normal lengths, 1,000 tokens
on average, packed side by side. A new packing is new for demand, messages and layouts; a step with the same one has
them all from before. Rounds are interleaved; the first warms up.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist

import longspan.torch as lt


def packing(tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Bounds of documents that fill the sequence, the same on every rank."""
    bounds = [0]
    while bounds[-1] < tokens:
        length = int(torch.randn((), generator=generator).mul(0.8).exp().mul(726).item()) + 1
        bounds.append(min(tokens, bounds[-1] + length))
    return torch.tensor(bounds)


def step(model: lt.LongNetLM, optimizer: torch.optim.Optimizer, ids: torch.Tensor, bounds: torch.Tensor) -> float:
    dist.barrier()
    begin = time.perf_counter()
    held = model.sharding(ids.shape[1], cu_seqlens=bounds)
    logits = model(held.shard(ids), cu_seqlens=bounds, tokens=ids.shape[1])
    lt.ring_loss(logits, held.next_tokens(ids, cu_seqlens=bounds)).backward()
    lt.sum_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    return time.perf_counter() - begin


def main() -> None:
    own, rounds = (int(x) for x in (sys.argv[1:] + ["16384", "6"][len(sys.argv) - 1 :])[:2])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    tokens = own * dist.get_world_size()
    sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 1024}
    model = lt.LongNetLM(**sizes, group=dist.group.WORLD, shards="zigzag")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    new, same = [], []
    for round in range(rounds + 1):
        ids, bounds = torch.randint(256, (1, tokens), generator=generator), packing(tokens, generator)
        times = step(model, optimizer, ids, bounds), step(model, optimizer, ids, bounds)
        if round > 0:
            new.append(times[0])
            same.append(times[1])
        if dist.get_rank() == 0:
            print(f"{len(bounds) - 1} documents: {times[0]:.2f} s, again {times[1]:.2f} s", flush=True)
    if dist.get_rank() == 0:
        more = [100 * (a / b - 1) for a, b in zip(new, same)]
        print(f"a new packing: {statistics.median(more):+.1f} % of a step (median of {rounds}, {min(more):+.1f} to {max(more):+.1f})")
        print(f"best of each: {100 * (min(new) / min(same) - 1):+.1f} %")
    dist.destroy_process_group()


main()
