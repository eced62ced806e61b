"""How much of the transfer `longspan.torch.ring_attention` hides behind computing, over Gloo.

    torchrun --nproc-per-node 2 benches/ring/torch_overlap.py
    benches/ring/namespaces 2 1gbit torchrun benches/ring/torch_overlap.py --json

As `longspan ring` measures it: 1 - (time waited) / (time that the same messages take with nothing to
compute). A rank by itself sees only how long it waited; so its messages are remembered, and sent
again alone. Times are sums over ranks, of one forward and one backward pass; the median run counts.
"""

import argparse
import json
import time

import torch
import torch.distributed as dist

import longspan
from longspan.torch import _ranks, ring_attention, ring_positions


#: The round at the end of a pass has messages of a few dozen bytes. What is waited there is waited
#: for the slowest rank, so it isn't counted, as in `longspan ring`.
SHORT = 1024


class Recorder(_ranks.Post):
    """Remembers the messages of rings, and how long was waited for them."""

    rings = []

    def __init__(self, group, tag):
        super().__init__(group, tag)
        self.hops, self.waited = [], 0.0
        Recorder.rings.append(self)

    def start(self, sends, receives):
        hop = [[(rank, length) for rank, _, length in way] for way in (sends, receives)]
        self.counts = max(length for way in hop for _, length in way) > SHORT
        if self.counts:
            self.hops.append(hop)
        begun = time.perf_counter()
        super().start(sends, receives)
        self.waited += self.counts * (time.perf_counter() - begun)

    def wait(self, patience):
        begun = time.perf_counter()
        ended = super().wait(patience)
        self.waited += self.counts * (time.perf_counter() - begun)
        return ended

    def forget(self):
        self.hops, self.waited = [], 0.0

    def replay(self):
        """Seconds of the same messages alone."""
        hops, total = self.hops, 0.0
        for ways in hops:
            buffers = [[(rank, torch.zeros(length, dtype=torch.uint8)) for rank, length in way] for way in ways]
            places = [[(rank, x.data_ptr(), x.numel()) for rank, x in way] for way in buffers]
            begun = time.perf_counter()
            super().start(*places)
            assert super().wait(60.0) is None
            total += time.perf_counter() - begun
        return total


def passes(q, k, v, dout, arguments):
    begun = time.perf_counter()
    out = ring_attention(q, k, v, arguments.pattern, shards=arguments.shards, tokens=arguments.tokens)
    out.backward(dout)
    return time.perf_counter() - begun


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pattern", default="causal")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shards", default="zigzag")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    _ranks.Post = Recorder
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    held = len(ring_positions(arguments.tokens, rank, ranks, arguments.shards))
    torch.manual_seed(rank)
    shape = (1, arguments.heads, held, arguments.dim)
    q, k, v, dout = (torch.randn(shape, dtype=getattr(torch, arguments.dtype)) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()

    passes(q, k, v, dout, arguments)
    # The first is the group's own, for what ranks tell each other before a pass.
    ring = Recorder.rings[-1]
    found = []
    for _ in range(arguments.repeat):
        ring.forget()
        dist.barrier()
        took, waited = passes(q, k, v, dout, arguments), ring.waited
        dist.barrier()
        found.append((took, waited, ring.replay()))
    every = [None] * ranks
    dist.all_gather_object(every, found)
    dist.destroy_process_group()
    if rank != 0:
        return
    runs = []
    for run in zip(*every):
        took, waited, alone = (list(column) for column in zip(*run))
        runs.append({
            "ms": 1e3 * max(took),
            "waiting_ms": 1e3 * sum(waited) / ranks,
            "transfer_ms": 1e3 * sum(alone) / ranks,
            "hidden_share": 1 - sum(waited) / sum(alone),
        })
    runs.sort(key=lambda run: run["hidden_share"])
    middle = runs[len(runs) // 2]
    report = {
        "version": longspan.__version__,
        "torch": torch.__version__,
        "carrier": "gloo",
        "ranks": ranks,
        **{name: getattr(arguments, name) for name in ("pattern", "tokens", "heads", "dim", "dtype", "shards", "threads")},
        **middle,
        "runs": runs,
    }
    if arguments.json:
        print(json.dumps(report))
        return
    for run in runs:
        print("  ".join(f"{name} {number:.3g}" for name, number in run.items()))


if __name__ == "__main__":
    main()
