"""What each rank does in ``test_ring.py`` about sink logits: ``torchrun ring_sinks.py``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from longspan import Dilated
from longspan.torch import attention, ring_attention, ring_positions

TOKENS, HEADS = 97, 4
#: Key heads, sinks and tables are shared by heads of different offsets, and by both branches.
DILATED = Dilated([11, 40], [1, 3], within="causal", also="window(4, 0)")


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(1)
    q = torch.randn(2, HEADS, TOKENS, 16, generator=draw)
    k, v = torch.randn(2, 2, 2, TOKENS, 16, generator=draw)
    dout = torch.randn(2, HEADS, TOKENS, 16, generator=draw)
    dlse = torch.randn(2, HEADS, TOKENS, generator=draw)
    # Two layers of one problem, so of one ring, each with its own sinks.
    layers = torch.tensor([[0.5, -1.0, 3.0, 0.0], [2.0, 0.0, -torch.inf, 1.0]])

    def both(attend, inputs, dout, dlse):
        x, k, v = (y.clone().requires_grad_() for y in inputs)
        sinks = [layer.clone().requires_grad_() for layer in layers]
        first, lse = attend(x, k, v, sinks[0])
        second, _ = attend(x + first, k, v, sinks[1])
        gradients = torch.autograd.grad([second, lse], (x, k, v, *sinks), [dout, dlse])
        return second, lse, *gradients

    options = {"enable_gqa": True, "return_lse": True}
    for what in ("causal & window(20, 0)", "global_tokens(2) | window(5, 5)", "!full", DILATED):
        whole = both(
            lambda q, k, v, sinks: attention(q, k, v, what, sink_logits=sinks, **options),
            (q, k, v), dout, dlse,
        )
        mine = ring_positions(TOKENS, rank, ranks, "zigzag")
        part = both(
            lambda q, k, v, sinks: ring_attention(
                q, k, v, what, shards="zigzag", tokens=TOKENS, sink_logits=sinks, **options
            ),
            [x[:, :, mine] for x in (q, k, v)], dout[:, :, mine], dlse[:, :, mine],
        )
        *rows, first, second = part
        for got, expected in zip(rows, whole):
            torch.testing.assert_close(got, expected[:, :, mine], atol=2e-5, rtol=1e-4)
        # A rank has what its own queries contribute.
        for got, expected in zip((first, second), whole[-2:]):
            alone = got.clone()
            dist.all_reduce(got)
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
            assert ranks == 1 or what == "!full" or not torch.equal(alone, got)
    for what in ("global_tokens(2) | window(15, 5)", DILATED):
        additions(what, rank, ranks, (q, k, v), dout)
    # Refused on every rank before any of them waits for another.
    try:
        wrong = torch.full((HEADS,), torch.nan)
        ring_attention(q, k, v, "full", enable_gqa=True, sink_logits=wrong)
    except ValueError as error:
        assert "a sink logit is NaN" in str(error), error
    else:
        raise AssertionError("not refused")
    if rank == 0:
        print(f"sinks on {ranks} ranks")
    dist.destroy_process_group()


def additions(what, rank, ranks, inputs, dout):
    """A table, slopes and dropout, whose seed is that of the first rank's generator."""
    draw = torch.Generator().manual_seed(2)
    table, slopes = torch.randn(HEADS, 30, generator=draw), torch.rand(HEADS, generator=draw)
    options = {"enable_gqa": True, "bias_right": 4, "softcap": 3.0, "dropout_p": 0.4}

    def both(attend, inputs, dout, seed):
        parameters = [x.clone().requires_grad_() for x in (*inputs, table, slopes)]
        *qkv, one, other = parameters
        torch.manual_seed(seed)
        out = attend(*qkv, bias_table=one, alibi_slopes=other, **options)
        return out, *torch.autograd.grad(out, parameters, dout)

    for shards in ("zigzag", "striped"):
        whole = both(lambda q, k, v, **o: attention(q, k, v, what, **o), inputs, dout, 7)
        mine = ring_positions(TOKENS, rank, ranks, shards)
        parts = [x[:, :, mine] for x in inputs]
        part = both(
            lambda q, k, v, **o: ring_attention(q, k, v, what, shards=shards, tokens=TOKENS, **o),
            parts, dout[:, :, mine], 7 + 100 * rank,
        )
        for got, expected in zip(part[:4], whole):
            torch.testing.assert_close(got, expected[:, :, mine], atol=2e-5, rtol=1e-4)
        for got, expected in zip(part[4:], whole[4:]):
            dist.all_reduce(got)
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


main()
