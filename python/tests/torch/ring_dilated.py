"""What each rank does in ``test_ring.py`` about ``Dilated``: ``ring_dilated.py equal <folder>``.

Results of a ring and of one process are compared with the paper's equations in f64 (``longnet``),
by the rule of ``oracle``.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import NamedTuple

import ring_ranks  # before the next ones: it sets the path to them

import dense
import longnet
import numpy
import oracle
import torch
import torch.distributed as dist

from longspan import Dilated
from longspan.torch import _ranks, attention, ring_attention

RULES = {
    "full": lambda q, k: True,
    "causal": lambda q, k: k <= q,
    "window(9, 3)": lambda q, k: q - 9 <= k <= q + 3,
    "causal & documents([30, 0, 41, 26])": lambda q, k: (
        k <= q
        and numpy.searchsorted(ring_ranks.EDGES, q, "right")
        == numpy.searchsorted(ring_ranks.EDGES, k, "right")
    ),
}


class Case(NamedTuple):
    branches: tuple[tuple[int, int], ...]
    tokens: int
    heads: tuple[int, int]
    """Of queries and of keys."""
    within: str = "causal"
    also: str | None = None
    overlap: str = "weighted"

    def dilated(self) -> Dilated:
        options = {"within": self.within, "also": self.also, "overlap": self.overlap}
        return Dilated(*zip(*self.branches), **options)


PAPER = ((64, 1), (128, 2), (256, 4))
#: Short last segments, queries that no branch has, more offsets than heads, one longer than the
#: sequence.
ODD = ((10, 2), (14, 3), (50, 7), (1000, 71))
CASES = [
    Case(PAPER, 512, (4, 4)),
    # Segments of over 256 tokens of a branch are views of their own.
    Case(((64, 1), (514, 2)), 541, (2, 1)),
    Case(ODD, 97, (6, 6)),
    Case(ODD, 97, (6, 2), "full"),
    Case(((16, 2), (64, 8)), 131, (6, 2), also="window(9, 3)"),
    Case(((16, 2), (64, 8)), 131, (6, 2), also="window(9, 3)", overlap="union"),
    Case(PAPER, 301, (8, 2), overlap="union"),
    Case(ODD, 97, (4, 1), "causal & documents([30, 0, 41, 26])"),
    # Some ranks hold nothing.
    *(Case(((2, 1), (4, 2)), tokens, (2, 1)) for tokens in (0, 1, 2, 5)),
]


class Numbers(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor


@functools.cache
def numbers(index, dtype):
    """The same on every rank."""
    case, rng = CASES[index], numpy.random.default_rng(index)
    q, k, v, dout = dense.tensors(rng, (1, *case.heads, case.tokens, case.tokens, 16, 24), dtype)
    dlse = torch.from_numpy(rng.standard_normal(q.shape[:3], dtype="float32"))
    return Numbers(q, k, v, dout, dlse)


@functools.cache
def pairs(text, tokens):
    return torch.from_numpy(oracle.mask(RULES[text], tokens, tokens))


@functools.cache
def truth(index, dtype, with_dlse):
    """In f64, once for all shards and numbers of ranks."""
    case, (*tensors, dlse) = CASES[index], numbers(index, dtype)
    q, k, v, dout = (longnet.turned(x) for x in tensors)
    allowed = pairs(case.within, case.tokens)
    also = None if case.also is None else pairs(case.also, case.tokens)
    dlse = dlse.mT if with_dlse else None
    if also is None and case.overlap == "weighted":
        return longnet.truth(q, k, v, case.branches, allowed, dout, dlse)
    once = case.overlap == "union"
    return longnet.side_by_side(q, k, v, case.branches, allowed, dout, dlse, once=once, also=also)


@functools.cache
def one_process(index, dtype, with_dlse):
    q, k, v, dout, dlse = numbers(index, dtype)
    out, lse = attention(q, k, v, CASES[index].dilated(), enable_gqa=True, return_lse=True)
    used = 1 + with_dlse
    gradients = torch.autograd.grad([out, lse][:used], (q, k, v), [dout, dlse][:used])
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients)))


def check(index, dtype, shards, number):
    case = CASES[index]
    mine = ring_ranks.around(numbers(index, dtype), case.dilated(), number, shards)
    got = ring_ranks.joined(mine, shards, case.tokens)
    if got is None:
        return
    one = one_process(index, dtype, number % 2)
    assert [x.shape for x in got.values()] == [x.shape for x in one.values()]
    if case.tokens == 0:
        return
    expected = truth(index, dtype, number % 2)
    try:
        dense.check(got, expected, dtype)
        dense.check(one, expected, dtype)
    except AssertionError as error:
        raise AssertionError(f"{case}, {shards}, {dtype}, number {number}") from error


def all_cases():
    count = 0
    for index in range(len(CASES)):
        for dtype in (torch.float32, torch.bfloat16):
            for shards in ("contiguous", "zigzag", "striped"):
                # With and without a gradient of the log-sum-exp, with other strides.
                check(index, dtype, shards, count + index)
                count += 1
    assert count > 60
    what_travels()
    print(f"{count} dilated cases on {dist.get_world_size(ring_ranks.GROUP)} ranks", flush=True)


def what_travels():
    """Equal branches share a ring, segments within a shard send nothing, ``wire`` is used."""
    group, draw = ring_ranks.GROUP, torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 128, 16, generator=draw)
    ranks = _ranks.ranks_of(group)[1]

    def call(segment, **options):
        dilated = Dilated([32, segment], [1, 2], within="causal")
        out = ring_attention(x, x, x, dilated, group=group, **options)
        return out, next(reversed(ranks._rings.values())).ring.traffic()

    first, traffic = call(64)
    assert traffic == (0, 0)
    made = ranks._made
    assert torch.equal(call(64)[0], first)
    assert ranks._made == made
    exact, (received, sent) = call(4096)
    near, shorter = call(4096, wire="bf16")
    assert ranks._made == made + 2
    # Values are below 5, of which bf16 is off by 1/256.
    torch.testing.assert_close(near, exact, atol=0.05, rtol=0.05)
    if ranks.size > 1:
        assert 0 < sum(shorter) < received + sent


def main():
    (ring_ranks.FOLDER / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    dist.init_process_group("gloo", timeout=timedelta(seconds=10 * ring_ranks.LONG))
    for count in range(1, dist.get_world_size() + 1):
        limit = timedelta(seconds=ring_ranks.LONG)
        ring_ranks.GROUP = dist.new_group(list(range(count)), timeout=limit)
        if dist.get_rank() < count:
            all_cases()
        dist.barrier()
    dist.destroy_process_group()


main()
