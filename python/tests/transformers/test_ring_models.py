"""Models whose sequence the ranks of a process group hold together, under the real ``torchrun``.

Ranks run ``ring_models.py``, all of it in one launch: starting transformers takes longer than what it computes.
"""

import pathlib
import re
import sys

import pytest
import torch.distributed as dist
from launching import launched
from transformers import LlamaConfig, LlamaModel

import longspan
import longspan.transformers
from longspan.transformers import _ring

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not dist.is_available(), reason="needs torchrun and Gloo"
)

HERE = pathlib.Path(__file__).parent
RANKS = 3
GUIDE = HERE.parents[2] / "docs" / "context-parallel.md"


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    (block,) = [x for x in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL) if "transformers" in x]
    guide = tmp_path_factory.mktemp("ring") / "guide.py"
    guide.write_text(block)
    return launched(RANKS, HERE / "ring_models.py", guide)


@pytest.mark.parametrize("what", ["equal", "refused", "families", "guide"])
def test_ranks(output, what):
    assert re.search(rf"\d+ {what} on {RANKS} ranks", output), output


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(_ring, "rings", {})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_names_with_groups(alone):
    with pytest.raises(ValueError, match="shards is 'zigzag' and group is None"):
        longspan.transformers.register("longspan_alone", shards="zigzag")
    with pytest.raises(ValueError, match="shards is 'balanced', expected 'contiguous', 'zigzag' or 'striped': layers"):
        longspan.transformers.register("longspan_alone", group=dist.group.WORLD, shards="balanced")
    with pytest.raises(ValueError, match="shards is 'zig', expected 'contiguous', 'zigzag' or 'striped'$"):
        longspan.transformers.register("longspan_alone", group=dist.group.WORLD, shards="zig")
    with pytest.raises(NotImplementedError, match="selector and group"):
        selector = longspan.BlockSelector("full", mass=0.9)
        longspan.transformers.register("longspan_alone", group=dist.group.WORLD, selector=selector)
    with pytest.raises(ValueError, match="group is 3, expected a process group"):
        longspan.transformers.register("longspan_alone", group=3)
    assert not _ring.rings
    longspan.transformers.register("longspan_alone", group=dist.group.WORLD)
    with pytest.raises(ValueError, match="registered with a process group, and group is None"):
        longspan.transformers.register("longspan_alone")


def test_group_that_is_gone(alone):
    longspan.transformers.register("longspan_gone", group=dist.group.WORLD, shards="zigzag")
    config = LlamaConfig(vocab_size=9, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaModel._from_config(config, attn_implementation="longspan_gone")
    ids = longspan.torch.ring_positions(9, 0, 1)[None]
    model(input_ids=ids, position_ids=ids, use_cache=False)
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="the process group of attn_implementation='longspan_gone' is gone"):
        model(input_ids=ids, position_ids=ids, use_cache=False)
