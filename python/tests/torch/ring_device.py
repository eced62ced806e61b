"""What each rank does in ``test_ring_device.py``: ``torchrun ring_device.py <equal or faults> <folder> [timeout]``.

Rings over an engine for devices, by one that computes on the CPU and rounds as FlexAttention does, are compared
with dense attention in f64 and with rings on the CPU, by the rule of ``oracle``.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import ring_ranks  # before the next ones: it sets the path to them

import dense
import numpy
import oracle
import torch
import torch.distributed as dist
from ring_ranks import LONG, around, joined
from rounding import Rounding

import longspan
from longspan.torch import _ranks, _ring, attention, ring_attention
from longspan.torch._engine import in_place_of
from longspan.torch._transfers import Transfers

TOKENS = 197
#: So that ranks have several blocks, of which the last is ragged.
_ranks.BLOCK = 32
SIZE = (2, 4, 2, TOKENS, TOKENS, 16, 24)
HEADS = ["causal", "causal", "window(40, 3)", "full"]
PATTERNS = {
    "causal": lambda q, k: k <= q,
    "causal & (window(60, 0) | sinks(5))": lambda q, k: k <= q and (q - k <= 60 or k < 5),
    "global_tokens(3) | window(40, 7)": lambda q, k: q < 3 or k < 3 or -7 <= q - k <= 40,
    "causal & documents([50, 0, 100, 47])": lambda q, k: k <= q
    and (q >= 50) == (k >= 50)
    and (q >= 150) == (k >= 150),
    "!strided(3)": lambda q, k: (q - k) % 3 != 0,
    "heads": None,
}


def mask_of(name):
    if name != "heads":
        return oracle.mask(PATTERNS[name], TOKENS, TOKENS)
    rules = [PATTERNS["causal"]] * 2 + [lambda q, k: -3 <= q - k <= 40, lambda q, k: True]
    return numpy.stack([oracle.mask(rule, TOKENS, TOKENS) for rule in rules])


def numbers(seed, dtype):
    rng = numpy.random.default_rng(seed)
    q, k, v, dout = dense.tensors(rng, SIZE, dtype)
    return q, k, v, dout, torch.from_numpy(rng.standard_normal(q.shape[:3], dtype="float32"))


def ring():
    return next(reversed(_ranks.ranks_of(ring_ranks.GROUP)[1]._rings.values())).ring


def on_device(all_of, pattern, number, shards, **options):
    """This rank's results by the engine for devices, and the bytes that it received: those that it needs."""
    with in_place_of("cpu", Rounding()) as engine:
        # Of a name of its own, so that a ring is made for this.
        engine.name = f"rounding for {_ranks.ranks_of(ring_ranks.GROUP)[1]._made}"
        mine = around(all_of, pattern, number, shards, **options)
    received, _ = ring().traffic()
    assert received == sum(ring().bytes_needed), (received, ring().bytes_needed)
    DEVICE_RINGS.append(ring())
    assert engine.counts["attend"] and engine.counts["differentiate"]
    return mine, received


DEVICE_RINGS = []


def errors(got, truth):
    """Root mean squares over those of the truth."""
    return {name: oracle.rms(dense.array(x) - getattr(truth, name)) for name, x in got.items()}


def equal():
    count = 0
    ranks = dist.get_world_size(ring_ranks.GROUP)
    for name in PATTERNS:
        pattern = str(longspan.heads(HEADS)) if name == "heads" else name
        mask = mask_of(name)
        for dtype in (torch.float32, torch.bfloat16):
            all_of = numbers(count, dtype)
            q, k, v, dout = map(dense.array, all_of[:4])
            truths = [oracle.attention(q, k, v, mask, dout, dlse) for dlse in (None, dense.array(all_of[4]))]
            for number, shards in enumerate(("contiguous", "zigzag", "striped")):
                mine, received = on_device(all_of, pattern, number, shards)
                on_host = around(all_of, pattern, number, shards)
                # The same bytes as on the CPU.
                assert received == ring().traffic()[0], (pattern, received, ring().traffic())
                got, host = joined(mine, shards, TOKENS), joined(on_host, shards, TOKENS)
                count += 1
                if got is None:
                    continue
                try:
                    truth, gross = truths[number % 2]
                    dense.check(got, (truth, gross), dtype)
                    host = oracle.Truth(**{name: dense.array(x) for name, x in host.items()})
                    dense.check(got, (host, gross), dtype)
                except AssertionError as error:
                    raise AssertionError(f"{pattern}, {shards}, {dtype}, {ranks} ranks") from error
    print(f"{count} cases on {ranks} ranks by an engine for devices", flush=True)


def per_hop():
    """Rounding once per hop costs at most half as much again as rounding once."""
    all_of = numbers(7, torch.bfloat16)
    mine, _ = on_device(all_of, "causal", 1, "zigzag")
    got = joined(mine, "zigzag", TOKENS)
    if got is None:
        return
    q, k, v, dout = map(dense.array, all_of[:4])
    truth, _ = oracle.attention(q, k, v, mask_of("causal"), dout, dense.array(all_of[4]))
    with in_place_of("cpu", Rounding()):
        q, k, v, dout, dlse = all_of
        out, lse = attention(q, k, v, "causal", enable_gqa=True, return_lse=True)
        one = dict(zip(got, (out, lse, *torch.autograd.grad([out, lse], (q, k, v), [dout, dlse]))))
    ring_errors, one_errors = errors(got, truth), errors(one, truth)
    ratios = {name: ring_errors[name] / one_errors[name] for name in got}
    print("errors of a ring over those of one process:", {k: round(v, 3) for k, v in ratios.items()}, flush=True)
    assert all(ratio <= 1.5 for ratio in ratios.values()), ratios


def options():
    """Sink logits count once, with gradients; softcap and slopes; other wire formats are refused."""
    q, k, v, dout, dlse = numbers(11, torch.float32)
    draw = torch.Generator().manual_seed(3)
    sinks = torch.randn(4, generator=draw, requires_grad=True)
    slopes = torch.rand(4, generator=draw)
    for learned in ({"sink_logits": sinks}, {"softcap": 2.0}, {"alibi_slopes": slopes}):
        results = []
        for engine in (Rounding(), None):
            with in_place_of("cpu", engine) if engine else torch.enable_grad():
                mine = around((q, k, v, dout, dlse), "causal | global_tokens(2)", 1, "striped", **learned)
                results.append(mine)
        for name, x in results[0].items():
            torch.testing.assert_close(x, results[1][name], atol=2e-6, rtol=2e-5)
    gradients = []
    for engine in (Rounding(), None):
        with in_place_of("cpu", engine) if engine else torch.enable_grad():
            x = q.detach()[:, :, :40]
            out = ring_attention(x, x, x, "causal", sink_logits=sinks, group=ring_ranks.GROUP)
            gradients += torch.autograd.grad(out.square().sum(), sinks)
    torch.testing.assert_close(*gradients)
    with in_place_of("cpu", Rounding()):
        with ring_ranks.refused(ValueError, "wire is 'bf16'"):
            ring_attention(x, x, x, "causal", wire="bf16", group=ring_ranks.GROUP)
    # One rank computes by another engine than the others.
    with in_place_of("cpu", Rounding()) if dist.get_rank() == 1 else torch.enable_grad():
        with ring_ranks.refused(longspan.RingError, "disagree about shapes and types"):
            ring_attention(x, x, x, "causal", group=ring_ranks.GROUP)
    assert torch.isfinite(ring_attention(x, x, x, "causal", group=ring_ranks.GROUP)).all()


DILATED = longspan.Dilated([32, 64, 256], [1, 2, 4], within="causal")


def branches():
    """LongNet's branches, sequences padded and packed, are as on the CPU; padding has no sink."""
    sinks = torch.zeros(4, requires_grad=True)
    padding = torch.tensor([(0, TOKENS), (30, 180)])
    ends = torch.tensor([0, 90, 91, TOKENS])
    q, k, v, dout, dlse = numbers(13, torch.float32)
    one = [x[:1] for x in (q, k, v, dout, dlse)]
    for number, (all_of, options) in enumerate(
        [
            ((q, k, v, dout, dlse), {}),
            ((q, k, v, dout, dlse), {"key_padding": padding, "sink_logits": sinks}),
            (one, {"cu_seqlens": ends}),
            (one, {"cu_seqlens": ends, "pattern": "causal & window(99, 0)"}),
        ]
    ):
        pattern = options.pop("pattern", DILATED)
        number += number % 2 == 0
        mine, _ = on_device(all_of, pattern, number, "zigzag", **options)
        host = around(all_of, pattern, number, "zigzag", **options)
        for name, x in mine.items():
            torch.testing.assert_close(x, host[name], atol=3e-6, rtol=3e-5)


def trees():
    """Tokens that many ranks need are forwarded, and gradients of them summed on the way."""
    all_of = numbers(17, torch.float32)
    mine, _ = on_device(all_of, "causal & (window(60, 0) | sinks(5))", 1, "contiguous")
    host = around(all_of, "causal & (window(60, 0) | sinks(5))", 1, "contiguous")
    for name, x in mine.items():
        torch.testing.assert_close(x, host[name], atol=3e-6, rtol=3e-5)
    parts = [part for _, sends, _, _ in DEVICE_RINGS[-1].forward_steps for _, some in sends for part in some]
    forwards = torch.tensor(any(part[0] == "forwarded_keys" for part in parts))
    dist.all_reduce(forwards, dist.ReduceOp.MAX)
    assert forwards


def beside():
    """Where a group has no Gloo, ranks agree in one that they make beside it."""
    backends, made = _ranks._backends, dist.new_group
    group = made(list(range(dist.get_world_size())), timeout=timedelta(seconds=LONG))
    ring_ranks.GROUP, gloo = group, []

    def count(*arguments, **options):
        gloo.append(made(*arguments, **options))
        return gloo[-1]

    # As if the group had no Gloo, and tensors were those of a device.
    _ranks._backends = lambda of: {"cuda": "nccl"} if of is group else backends(of)
    _ring.check_backend = lambda of, device: _ranks.check_backend(of, torch.device("cuda"))
    dist.new_group = count
    try:
        for turn in range(2):
            on_device(numbers(19, torch.float32), "causal", turn, "contiguous")
    finally:
        _ranks._backends, dist.new_group = backends, made
        _ring.check_backend = _ranks.check_backend
    assert len(gloo) == 1


def main():
    (ring_ranks.FOLDER / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    dist.init_process_group("gloo", timeout=timedelta(seconds=10 * LONG))
    size = dist.get_world_size()
    for count in map(int, sys.argv[3:]):
        limit = timedelta(seconds=LONG)
        ring_ranks.GROUP = dist.new_group(list(range(count)), timeout=limit)
        if dist.get_rank() < count:
            equal()
            options()
            branches()
            if count == 4:
                per_hop()
        dist.barrier()
    assert size >= 6, "too few for a tree"
    ring_ranks.GROUP = None
    trees()
    beside()
    print(f"trees on {size} ranks", flush=True)
    dist.destroy_process_group()


def faults(timeout):
    """Those of ``ring_ranks``, on rings over the engine for devices."""
    post = Transfers.post

    def count_steps(self, group, watch, transfers):
        ring_ranks.at_hop([])
        return post(self, group, watch, transfers)

    Transfers.post = count_steps
    with in_place_of("cpu", Rounding()):
        ring_ranks.faults(timeout)


if __name__ == "__main__":
    main() if sys.argv[1] == "equal" else faults(sys.argv[3])
