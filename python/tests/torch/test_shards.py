"""Data, loss and gradients of a sequence over ranks: what one process can tell. ``ring_modules.py`` has
the rest."""

import sys

import pytest
import test_ring
import torch
import torch.distributed as dist

from longspan.torch import Shards, ring_loss, ring_positions, scale_loss, sum_gradients

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs Gloo")


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_labels(alone):
    shards, ids = Shards(7), torch.arange(14).view(2, 7)
    assert shards.next_tokens(ids)[1].tolist() == [8, 9, 10, 11, 12, 13, -100]
    packed = shards.next_tokens(ids, -1, cu_seqlens=torch.tensor([0, 3, 3, 7]))
    assert packed[0].tolist() == [1, 2, -1, 4, 5, 6, -1]
    assert ids[0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert repr(shards) == "Shards(7, shards='contiguous'): 7 tokens of rank 0 of 1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gathered(alone, dtype, dim):
    shards = Shards(5, shards="striped")
    x = torch.randn(5, 5, 5).to(dtype)
    assert torch.equal(shards.gather(shards.shard(x, dim), dim), x)


def test_what_shards_refuse(alone):
    with pytest.raises(ValueError, match="x has 4 tokens on axis 1, expected 5: the whole sequence"):
        Shards(5).shard(torch.zeros(5, 4))
    with pytest.raises(ValueError, match="x has 4 tokens on axis 1, expected 5, which this rank holds"):
        Shards(5).gather(torch.zeros(5, 4))
    with pytest.raises(ValueError, match="ids has 1 axes"):
        Shards(5).next_tokens(torch.zeros(5))
    with pytest.raises(ValueError, match='pattern is None with shards="balanced"'):
        Shards(5, shards="balanced")
    with pytest.raises(ValueError, match="labels have shape"):
        ring_loss(torch.zeros(2, 5, 3), torch.zeros(2, 4, dtype=torch.long))


def test_loss_of_one_rank(alone):
    logits = torch.randn(2, 9, 5, requires_grad=True)
    labels = torch.randint(5, (2, 9))
    labels[0, 3:] = -1
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
    loss = ring_loss(logits, labels, ignore_index=-1)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits) for x in (loss, expected)))
    assert scale_loss(loss).item() == loss.item()


def test_gradients_that_are_refused(alone):
    table = torch.nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="parameter 0 has a Tensor of layout torch.sparse_coo"):
        sum_gradients(table)
    sum_gradients([torch.zeros(3)])


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_balanced_shards(ranks):
    """As many tokens each, and nearly as many pairs: over contiguous ranges the last rank has twice the
    mean of them."""
    parts = [ring_positions(1000, rank, ranks, "balanced", pattern="causal") for rank in range(ranks)]
    assert torch.cat(parts).sort().values.equal(torch.arange(1000))
    work = [(part + 1).sum().item() for part in parts]
    assert max(work) <= 1.05 * sum(work) / ranks
    with pytest.raises(ValueError, match="pattern is None"):
        ring_positions(1000, 0, ranks, "balanced")


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """What 2 and 3 ranks write, in one launch."""
    folder = tmp_path_factory.mktemp("modules")
    with test_ring.Launch(folder, 3, test_ring.HERE / "ring_modules.py", folder) as started:
        status, output = started.wait(2 * test_ring.LIMIT)
    assert status == 0, output
    return output


@pytest.mark.skipif(sys.platform != "linux", reason="needs torchrun and Gloo")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "what", ["training", "multihead", "dilated_modules", "same_bits", "gradients", "mistakes"]
)
def test_equal_to_one_process(modules, what, ranks):
    assert modules.count(f"{what} on {ranks} ranks") == ranks, modules


@pytest.mark.skipif(sys.platform != "linux", reason="needs torchrun and Gloo")
def test_example_of_the_page(modules):
    assert modules.count("example on 3 ranks") == 3, modules
