"""What crosses between host and device, with fake CUDA tensors, whose data can't be read."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import longspan
from longspan.torch import _call_cache, _flex, _flex_support
from longspan.torch._flex import Compiled, FlexEngine
from longspan.torch._run import Places, Scores

pytestmark = pytest.mark.filterwarnings("default")

DEVICE = torch.device("cuda", 0)


class Copies(TorchDispatchMode):
    """Counts copies to the host; a read of data is torch's own error."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.to_host = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.__name__
        device = kwargs.get("device")
        if "_to_copy" in name and device is not None and torch.device(device).type == "cpu":
            self.to_host += 1
        assert "local_scalar_dense" not in name and name != "item.default"
        return func(*args, **kwargs)


@pytest.fixture
def engine(monkeypatch):
    """The engine up to torch's operators, which have rules for fake tensors."""
    monkeypatch.setattr(FlexEngine, "_compile", lambda self, function: Compiled(function, marks=False))
    monkeypatch.setattr(_flex, "_compiled_region", lambda: None)
    monkeypatch.setattr(_flex_support, "_check_device", lambda index: None)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def on_device(numbers, device):
        with contextlib.nullcontext() if torch._C._len_torch_dispatch_stack() else mode:
            return torch.empty(numbers.shape, dtype=getattr(torch, str(numbers.dtype)), device=device)

    monkeypatch.setattr(_call_cache, "on_device", on_device)
    _flex_support.unused_lists()
    return FlexEngine(), mode


def tensors(batch=1, tokens=1000, heads=(4, 2), dim=64):
    shape = lambda heads: (batch, heads, tokens, dim)
    return [torch.empty(shape(n), dtype=torch.bfloat16, device=DEVICE) for n in (heads[0], heads[1], heads[1])]


@pytest.mark.parametrize(
    "pattern, scores",
    [
        ("causal & (window(100, 0) | sinks(4))", Scores()),
        ("strided(16) | window(9, 9)", Scores(softcap=20.0)),
        (longspan.Dilated([128, 512], [1, 4], within="causal"), Scores()),
    ],
    ids=["pattern", "components", "branches"],
)
def test_cached_layouts_cost_no_synchronization(engine, pattern, scores):
    engine, mode = engine
    with mode:
        q, k, v = tensors()
        sinks = torch.empty(4, device=DEVICE)
        scores = scores._replace(sink_logits=sinks, alibi_slopes=torch.empty(4, device=DEVICE))
        for round in range(2):
            with Copies() as copies:
                found = engine.forward(q, k, v, pattern, scores, Places(), saves=True)
                engine.backward(q, k, v, found, found.out, found.lse, pattern, scores, Places())
            assert copies.to_host == 0, round
        assert found.out.shape == q.shape and found.out.device == DEVICE


def test_new_lengths_cost_one_copy(engine, monkeypatch):
    """Of each tensor of the device; none of what was seen, and none of numbers and tensors of the host."""
    engine, mode = engine
    values = {}
    read = Places.on_host

    def on_host(self):
        copied = read(self)  # counted; what it has can't be read
        return Places(*(values.get(id(x), y) for x, y in zip(self, copied)))

    monkeypatch.setattr(Places, "on_host", on_host)
    with mode:
        q, k, v = tensors()
        bounds = torch.empty(3, dtype=torch.int32, device=DEVICE)
    values[id(bounds)] = torch.tensor([0, 300, 1000])
    padding = torch.tensor([[3, 900]])
    for places, expected in (
        (Places(cu_seqlens_q=bounds, cu_seqlens_k=None), 1),
        (Places(cu_seqlens_q=bounds, cu_seqlens_k=None), 0),
        (Places(key_padding=padding, query_offset=5, key_offset=0), 0),
    ):
        with mode, Copies() as copies:
            engine.forward(q, k, v, "causal", Scores(), places, saves=False)
        assert copies.to_host == expected, places


def far(x, stride):
    """The same tensor with so many elements per token."""
    batch, heads, tokens, dim = x.shape
    return torch.empty_strided(x.shape, (tokens * stride, dim, stride, 1), dtype=x.dtype, device=x.device)


def test_offsets_of_32_bits(engine, monkeypatch):
    """Tokens whose offset exceeds 2^31 elements are copied, or refused where that doesn't help."""
    engine, mode = engine
    seen = []
    attend = FlexEngine.attend

    def spy(self, call, q, k, v, scores, saves):
        seen.append([max((x.shape[2] - 1) * x.stride(2), 0) for x in (q, k, v)])
        return attend(self, call, q, k, v, scores, saves)

    monkeypatch.setattr(FlexEngine, "attend", spy)
    with mode:
        tokens = 1 << 19
        q, k, v = tensors(1, tokens, (64, 64))
        # (batch, token, head, dim) with 4,096 elements per token.
        q, k, v = (far(x, 4_097) for x in (q, k, v))
        engine.forward(q, k, v, "causal & window(256, 0)", Scores(), Places(), saves=False)
        assert seen == [[(tokens - 1) * 64] * 3]
        seen.clear()
        # Every fourth token of a branch: a view whose last token is as far.
        branches = longspan.Dilated([1 << 19], [4])
        engine.forward(q, k, v, branches, Scores(), Places(), saves=False)
        assert seen and all(reach < 1 << 31 for call in seen for reach in call)
        x = torch.empty_strided((1, 1, 33554433, 64), (0, 0, 64, 1), dtype=torch.bfloat16, device=DEVICE)
        with pytest.raises(ValueError, match="q has 33554433 tokens of 64 elements per head.*2\\^31"):
            engine.forward(x, x, x, "window(128, 0)", Scores(), Places(), saves=False)
