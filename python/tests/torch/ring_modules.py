"""What each rank does in ``test_shards.py``: ``torchrun ring_modules.py <folder>``.

Modules with a process group are compared with the same modules in one process, which every first rank
of a group computes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pathlib
import re
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

import longspan
from longspan.torch import (
    LongNetEncoder,
    LongNetLM,
    MultiheadAttention,
    MultiheadDilatedAttention,
    Shards,
    ring_attention,
    ring_loss,
    scale_loss,
    sum_gradients,
)

FOLDER = pathlib.Path(sys.argv[1])
#: Longer than anything here takes.
LONG = 60.0
#: Divides by nothing here.
TOKENS, VOCAB, STEPS = 307, 11, 50
MODEL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
BRANCHES = {"segment_lengths": [32, 64, 512], "dilation_rates": [1, 2, 5]}
#: The same sequences on every rank; one is empty.
BOUNDS = torch.tensor([0, 100, 100, 131, TOKENS])


def drawn(*shape, seed=0):
    """The same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model_of(names, **options):
    torch.manual_seed(0)
    return LongNetLM(**MODEL, **names, **options)


def text(step):
    """Ids whose next ones can be learned."""
    first = torch.randint(VOCAB, (1, 1), generator=torch.Generator().manual_seed(step))
    return (first + torch.arange(TOKENS).square() % 7) % VOCAB


@functools.cache
def one_process(packed):
    """Losses of training in one process."""
    model, losses = model_of(BRANCHES), []
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    bounds = BOUNDS if packed else None
    for step in range(STEPS):
        ids = text(step)
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        if packed:
            labels[:, BOUNDS[1:] - 1] = -100
        loss = F.cross_entropy(model(ids, cu_seqlens=bounds)[0], labels[0])
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    return torch.tensor(losses)


def train(group, shards, packed=False, **options):
    """Losses of training over ranks are those of one process."""
    model, losses = model_of(BRANCHES, group=group, shards=shards, **options), []
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    bounds = BOUNDS if packed else None
    held = model.sharding(TOKENS, cu_seqlens=bounds)
    for step in range(STEPS):
        ids = text(step)
        # Once without: ranks tell each other then.
        tokens = TOKENS if step else None
        logits = model(held.shard(ids), cu_seqlens=bounds, tokens=tokens)
        labels = held.next_tokens(ids, cu_seqlens=bounds)
        loss = ring_loss(logits, labels, group=group)
        adam.zero_grad()
        loss.backward()
        sum_gradients(model, group=group)
        adam.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    dist.all_reduce(losses, group=group)
    if group.rank() == 0:
        torch.testing.assert_close(losses, one_process(packed), rtol=1e-4, atol=0)
    same = [torch.empty_like(model.layer_norm.weight) for _ in range(group.size())]
    dist.all_gather(same, model.layer_norm.weight.detach(), group=group)
    assert all(torch.equal(x, same[0]) for x in same)


def compare(group, ours, one, held, x, forward, scale=1e-5):
    """Rows and summed gradients of a module over ranks and of its copy in one process."""
    ours.load_state_dict(one.state_dict())
    dout = drawn(*forward(one, x, None).shape, seed=9)
    mine = held.shard(x).requires_grad_()
    out = forward(ours, mine, TOKENS)
    out.backward(held.shard(dout))
    sum_gradients(ours, group=group)
    whole = held.gather(out.detach()), held.gather(mine.grad)
    if group.rank():
        return
    x = x.clone().requires_grad_()
    expected = forward(one, x, None)
    one.zero_grad()
    expected.backward(dout)
    close(whole[0], expected, "out", scale)
    close(whole[1], x.grad, "the gradient of x", scale)
    # Sums over tokens, some of which cancel: as exact as the largest of the module.
    most = max(x.grad.abs().max().item() for x in one.parameters())
    for (name, got), right in zip(ours.named_parameters(), one.parameters()):
        close(got.grad, right.grad, name, scale, most)


def close(got, expected, name, scale, most=None):
    most = expected.abs().max().item() if most is None else most
    error = (got - expected).abs().max().item()
    assert got.shape == expected.shape and error <= scale * most, f"{name}: {error} of {most}"


def shaken(module):
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.add_(0.2 * drawn(*parameter.shape, seed=index))
    return module


def multihead(group):
    """Over a pattern, packed or not, and over branches, with padding on either side."""
    padding = torch.zeros(2, TOKENS, dtype=torch.bool)
    padding[0, :41], padding[1, 250:] = True, True
    dilated = longspan.Dilated([16, 100], [1, 3], also="window(5, 0)")
    for pattern, shards, causal, places in (
        ("causal & (window(20, 0) | sinks(3))", "zigzag", False, {}),
        ("window(20, 4) | sinks(3)", "balanced", True, {"cu_seqlens": BOUNDS}),
        (dilated, "striped", True, {}),
        (dilated, "balanced", False, {"key_padding_mask": padding}),
        (dilated, "contiguous", True, {"cu_seqlens": BOUNDS}),
    ):
        sizes = {"pattern": pattern, "num_kv_heads": 2, "batch_first": True}
        one = shaken(MultiheadAttention(24, 4, **sizes))
        ours = MultiheadAttention(24, 4, **sizes, group=group, shards=shards)
        held = ours.sharding(TOKENS, causal, **places)

        def forward(module, x, tokens):
            return module(x, x, x, is_causal=causal, tokens=tokens, **places)[0]

        x = drawn(1 if "cu_seqlens" in places else 2, TOKENS, 24, seed=1)
        compare(group, ours, one, held, x, forward)


def dilated_modules(group):
    """Padding as ranges and as a mask; an encoder, whose positions begin with each sequence."""
    x, ranges = drawn(2, TOKENS, 32, seed=2), torch.tensor([[41, TOKENS], [3, 250]])
    mask = (torch.arange(TOKENS) >= ranges[:, :1]) & (torch.arange(TOKENS) < ranges[:, 1:])
    lists = BRANCHES["segment_lengths"], BRANCHES["dilation_rates"]
    names = {name: value for name, value in MODEL.items() if name != "vocab_size"} | BRANCHES
    pattern = {"attention": {"pattern": "window(30, 4)"}}
    sizes = {name: value for name, value in names.items() if name not in BRANCHES}
    for make, shards, causal, places in (
        (lambda **o: MultiheadDilatedAttention(32, 4, *lists[::-1], **o), "balanced", True, ranges),
        (lambda **o: LongNetEncoder(**names, **o), "zigzag", False, mask),
        (lambda **o: LongNetEncoder(**sizes, **pattern, **o), "balanced", True, None),
    ):
        one = shaken(make())
        ours = make(group=group, shards=shards, checkpoint=True)
        held = ours.sharding(TOKENS, causal, key_padding=places)

        def forward(module, x, tokens):
            options = {"key_padding": places, "tokens": tokens}
            if isinstance(module, LongNetEncoder):
                return module(x, causal, **options)
            return module(x, x, x, causal, **options)[0]

        compare(group, ours, one, held, x, forward, 5e-5)


def same_bits(group):
    """Checkpointing changes none, with dropout too; ranks draw from generators of their own."""
    x = drawn(1, 50, 32, seed=dist.get_rank())
    options = {"dropout": 0.3, "group": group}
    layer = MultiheadDilatedAttention(32, 4, [1, 2], [16, 64], **options)
    again = copy.deepcopy(layer)
    again.checkpoint = True
    found = []
    for module in (layer, again):
        torch.manual_seed(dist.get_rank())
        given = x.clone().requires_grad_()
        out = module(given, given, given)[0]
        found.append([out, *torch.autograd.grad(out.square().sum(), [given, *module.parameters()])])
    assert all(torch.equal(*pair) for pair in zip(*found))


def gradients(group):
    """Of half types too, of parameters that some ranks have none for, and of none at all."""
    rank, size = group.rank(), group.size()
    weights = [torch.nn.Parameter(torch.zeros(3, 2, dtype=dtype)) for dtype in
               (torch.float32, torch.bfloat16, torch.float64, torch.float32)]
    if rank == size - 1:
        weights[0].grad = torch.full((3, 2), 2.0)
    for weight in weights[1:3]:
        weight.grad = torch.full_like(weight, rank + 1)
    sum_gradients(iter(weights), group=group)
    assert torch.equal(weights[0].grad, torch.full((3, 2), 2.0))
    for weight in weights[1:3]:
        assert torch.equal(weight.grad, torch.full_like(weight, size * (size + 1) / 2))
    assert weights[3].grad is None
    assert scale_loss(torch.tensor(1.5), group=group).item() == 1.5 * size
    held = Shards(2, group=group)
    # Some ranks hold no token.
    logits = drawn(1, 2, 5).requires_grad_()
    mine = ring_loss(held.shard(logits), held.shard(torch.tensor([[1, 4]])), group=group)
    mine.backward()
    total = mine.detach().clone()
    dist.all_reduce(total, group=group)
    torch.testing.assert_close(total, F.cross_entropy(logits[0].detach(), torch.tensor([1, 4])))


@contextlib.contextmanager
def refused(kind, pattern):
    """The body raises such an error, soon."""
    start = time.monotonic()
    try:
        yield
    except kind as error:
        assert re.search(pattern, str(error)), str(error)
    else:
        raise AssertionError(f"nothing was raised, expected {kind.__name__}: {pattern}")
    assert time.monotonic() - start < 10


def mistakes(group):
    """Each of rank 1 is an error on every rank, soon; then all go on."""
    odd = group.rank() == 1
    layer = MultiheadAttention(24, 4, group=group, batch_first=True)
    model = model_of(BRANCHES, group=group)
    x, ids = drawn(1, 10, 24), torch.zeros(1, 10, dtype=torch.long)
    table = torch.nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    held = Shards(10 * group.size(), group=group)
    for kind, what, right, wrong in (
        (RuntimeError, "shape", lambda: layer(x, x, x), lambda: layer(x[..., 1:], x, x)),
        (ValueError, "need_weights", lambda: layer(x, x, x), lambda: layer(x, x, x, need_weights=True)),
        (IndexError, "range", lambda: model(ids), lambda: model(ids + VOCAB)),
        (ValueError, "labels have", lambda: ring_loss(x, ids, group=group),
         lambda: ring_loss(x, ids[:, 1:], group=group)),
        (IndexError, "out of bounds", lambda: ring_loss(x, ids, group=group),
         lambda: ring_loss(x, ids + 24, group=group)),
        (TypeError, "sparse", lambda: sum_gradients([], group=group),
         lambda: sum_gradients(table, group=group)),
        (ValueError, "x has 9", lambda: held.gather(x), lambda: held.gather(x[:, 1:])),
        (ValueError, "without tokens between", lambda: padded(group, [1] * 10),
         lambda: padded(group, [1, 0] * 5)),
    ):
        with refused(kind, what) if odd else refused(longspan.RingError, "rank 1 raised an error"):
            (wrong if odd else right)()
        right()
    with refused(longspan.RingError, "disagree about shapes and types"):
        sum_gradients([torch.nn.Parameter(torch.zeros(3 + odd))], group=group)
    with refused(longspan.RingError, "disagree about which pass"):
        sum_gradients([], group=group) if odd else ring_loss(x, ids, group=group)
    with refused(longspan.RingError, "disagree about the pattern"):
        padded(group, [1] * 9 + [1 - odd])
    with refused(ValueError, "generate: this model has a group"):
        model.generate(ids, 1)
    with refused(ValueError, "x has 10 tokens, expected") if odd else refused(Exception, ""):
        model(ids, tokens=10 * group.size() + 7)
    assert layer(x, x, x)[0].isfinite().all()


def padded(group, mask):
    """Of ten tokens on each rank."""
    mask, x = torch.tensor(mask * group.size()).bool(), drawn(1, 2, 10, 8)
    mask[: len(mask) - 10] = True
    dilated = longspan.Dilated([4, 16], [1, 2])
    return ring_attention(x, x, x, dilated, key_padding=mask[None], group=group)


def main():
    (FOLDER / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    dist.init_process_group("gloo", timeout=timedelta(seconds=10 * LONG))
    for count in (2, 3):
        group = dist.new_group(list(range(count)), timeout=timedelta(seconds=LONG))
        if dist.get_rank() < count:
            if count == 2:
                train(group, "contiguous")
            else:
                train(group, "zigzag")
                train(group, "striped", packed=True)
            train(group, "balanced", checkpoint=True)
            print(f"training on {count} ranks", flush=True)
            for check in (multihead, dilated_modules, same_bits, gradients, mistakes):
                check(group)
                print(f"{check.__name__} on {count} ranks", flush=True)
        dist.barrier()
    example()
    dist.destroy_process_group()


def example():
    """That of the page about LongNet, in the group that is there."""
    page = pathlib.Path(__file__).parents[3] / "docs" / "longnet.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "ring_loss" in block]
    lines = ('dist.init_process_group("gloo")\n', "dist.destroy_process_group()\n")
    for line in lines:
        assert line in block
        block = block.replace(line, "")
    exec(block, {})
    print(f"example on {dist.get_world_size()} ranks", flush=True)


if __name__ == "__main__":
    main()
