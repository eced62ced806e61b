"""How often torch compiles: calls that differ in lengths, offsets and packing alone share a compilation."""

import numpy
import pytest
import torch

import longspan
import longspan.torch
from longspan._longspan import device_calls
from longspan.torch._call_cache import prepared
from longspan.torch._engine import in_place_of
from longspan.torch._flex import FlexEngine

pytestmark = pytest.mark.filterwarnings("default")

#: Primes, multiples of a block, and one below a block.
LENGTHS = (131, 128, 257, 200, 256, 127 + 128, 509, 300, 263, 384, 137, 311)
SHORT = (16, 127, 3, 61, 64, 100, 7, 32, 96, 120, 5, 13)


class Compiler:
    """A backend that counts graphs and runs them as they are."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward


@pytest.fixture
def engine():
    compiler = Compiler()
    engine = FlexEngine(backend=compiler)
    with in_place_of("cpu", engine):
        yield engine


def functions(engine):
    return engine._forward.cache_info().currsize + engine._backward.cache_info().currsize


def call(pattern, queries, keys, gradients=True, heads=2, **options):
    shape = lambda tokens: (1, heads, tokens, 16)
    q, k, v = (torch.randn(shape(n), requires_grad=gradients) for n in (queries, keys, keys))
    out = longspan.torch.attention(q, k, v, pattern, **options)
    if gradients:
        out.sum().backward()


@pytest.mark.parametrize("lengths", [LENGTHS, SHORT], ids=["long", "short"])
@pytest.mark.parametrize("gradients", [True, False])
def test_lengths_and_offsets(engine, lengths, gradients):
    for tokens in lengths:
        for offset in (0, 7, 100):
            call("causal & (window(90, 0) | sinks(4))", tokens, tokens + offset, gradients)
            call("causal & (window(90, 0) | sinks(4))", tokens, tokens, gradients, query_offset=offset)
    assert functions(engine) == (2 if gradients else 1)
    assert len(engine.backend.graphs) <= 2 * functions(engine)


def test_windows_and_numbers_of_heads_are_no_structure(engine):
    for window in range(20, 32):
        heads = ", ".join(f"causal & window({window * (h + 1)}, 0)" for h in range(2))
        call(f"heads([{heads}])", 200, 200)
    assert len(engine.backend.graphs) <= 2 * functions(engine) and functions(engine) == 2


def test_packings(engine):
    rng = numpy.random.default_rng(0)
    for _ in range(50):
        tokens = int(rng.integers(130, 400))
        cuts = rng.choice(tokens, size=rng.integers(1, 12), replace=False)
        bounds = torch.tensor([0, *sorted(int(x) for x in cuts if x), tokens])
        call("causal & window(40, 0)", tokens, tokens, cu_seqlens=bounds)
    assert functions(engine) == 2
    assert len(engine.backend.graphs) <= 4


def test_outside_of_a_compiled_region(engine):
    with torch.compiler.set_stance("force_eager"):
        with pytest.raises(RuntimeError, match="outside of a compiled region would materialize all scores"):
            call("causal", 200, 200, gradients=False)


def test_lists_of_one_row_have_equal_room(engine):
    """torch's decode kernel finds Full blocks by the sizes of the lists of Partial ones."""
    layout = longspan.batch(["causal", "causal & window(1800, 0)"]).compile(3, 2500, block=128)
    for call in prepared(device_calls(layout, 2, 4, 2), torch.device("cpu")):
        assert call.lists[1].shape == call.lists[3].shape


def test_what_is_kept(engine):
    """Equal calls find their lists; a tensor that was written to is read again."""
    made = []
    cache = engine.cache(torch.device("cpu"))
    get = cache.get
    cache.get = lambda key, made_from, make: get(key, made_from, lambda: made.append(key) or make())
    bounds = torch.tensor([0, 60, 200])
    for gradients in (True, False, True):
        call("causal", 200, 200, gradients, cu_seqlens=bounds)
        call("causal", 200, 200, gradients, query_offset=3)
        call(longspan.Pattern("causal"), 200, 200, gradients)
    # A pattern and its text are different keys: one is read into the other where it is needed.
    assert len(made) <= 5
    count = len(made)
    bounds[1] = 61
    call("causal", 200, 200, cu_seqlens=bounds)
    assert len(made) == count + 1
    call("causal", 200, 200, cu_seqlens=bounds.clone())
    assert len(made) == count + 2
    cache.most = 1
    call("causal", 201, 201)
    assert len(cache._entries) == 1
