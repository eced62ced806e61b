#!/usr/bin/env python3
"""Data parallel × context parallel with FSDP2: a small LongNet on 2 × 2 processes, on the CPU.

    torchrun --standalone --nproc-per-node 4 examples/context_parallel/fsdp.py --check

The mesh has two dimensions. Ranks along "context" hold one sequence together: each has some of its tokens, and their
gradients are parts of one gradient, which have to be **summed**. Ranks along "data" have different sequences, whose
gradients are **averaged**. Weights are the same everywhere, so FSDP2 shards them over all four ranks, and its
reduce-scatter averages over all four: it sums, and divides by data × context. `scale_loss` multiplies by context
beforehand, and what is left is the sum along "context" and the average along "data".
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from longspan.torch import LongNetLM, ring_loss, scale_loss
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, TOKENS, BATCH, DATA, CONTEXT = 20, 301, 2, 2, 2
#: Of SGD, which a factor of gradients changes: with Adam, a sum and an average would train alike.
RATE = 0.3
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
BRANCHES: dict[str, Any] = {"segment_lengths": [32, 128], "dilation_rates": [1, 2]}


def batch(step: int) -> torch.Tensor:
    """The sequences of a step, `(DATA × BATCH, TOKENS)`: each counts on from somewhere."""
    starts = torch.randint(256, (DATA * BATCH, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(TOKENS)) % 256


def model(group: dist.ProcessGroup | None = None) -> LongNetLM:
    """The same weights on every rank: they are seeded."""
    torch.manual_seed(0)
    return LongNetLM(**SIZES, **BRANCHES, group=group, shards="zigzag" if group else "contiguous")


def train() -> list[float]:
    mesh = init_device_mesh("cpu", (DATA, CONTEXT), mesh_dim_names=("data", "context"))
    context = mesh["context"].get_group()
    lm = model(context)
    shards = lm.sharding(TOKENS)
    # Over all ranks, the default mesh: tokens are sharded along "context", weights over everything.
    for layer in lm.layers:
        fully_shard(layer)
    fully_shard(lm)
    optimizer = torch.optim.SGD(lm.parameters(), lr=RATE, momentum=0.9)
    losses = []
    for step in range(STEPS):
        # Along "data" other sequences, along "context" other tokens of the same ones.
        ids = batch(step).chunk(DATA)[mesh.get_local_rank("data")]
        logits = lm(shards.shard(ids), tokens=TOKENS)
        # Labels are shifted over the whole sequence, then sharded; the loss is this rank's part of the mean.
        loss = ring_loss(logits, shards.next_tokens(ids), group=context)
        scale_loss(loss, group=context).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        # For reading: the sum along "context" and the average along "data".
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / DATA)
    return losses


def one_process() -> list[float]:
    """The same training of the whole batch without any group."""
    lm, losses = model(), []
    optimizer = torch.optim.SGD(lm.parameters(), lr=RATE, momentum=0.9)
    for step in range(STEPS):
        ids = batch(step)
        loss = F.cross_entropy(lm(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare every loss with one process")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    losses = train()
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {STEPS} steps on {DATA} × {CONTEXT} ranks")
        if options.check:
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(one_process()), rtol=1e-4, atol=0)
            print(f"all {STEPS} losses are within 1e-4 of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
