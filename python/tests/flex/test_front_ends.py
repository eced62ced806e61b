"""Modules and the names of other libraries by FlexAttention, compared with Longspan's own kernels."""

import numpy
import pytest
import torch
from interpreter import InterpretedCuda
from operators import TILES

import longspan
import longspan.torch
from longspan.torch._engine import in_place_of
from longspan.torch._flex import FlexEngine

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def both(function):
    """Results by FlexAttention and by Longspan's kernels."""
    backend = InterpretedCuda()
    engine = FlexEngine(backend=backend, dynamic=False, options=dict.fromkeys(TILES, 64))
    own = function()
    with in_place_of("cpu", engine), backend.watch() as launches:
        other = function()
    assert any(launch.attention for launch in launches)
    for a, b in zip(own, other, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        size = b[torch.isfinite(b)].abs().max()
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5 * float(size))


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def with_gradients(function, *inputs):
    def run():
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, normal(*out.shape).to(out.dtype))]

    return run


def test_scaled_dot_product_attention():
    q, k = normal(1, 2, 40, 16), normal(1, 2, 70, 16)
    attend = longspan.torch.scaled_dot_product_attention
    both(with_gradients(lambda q, k: attend(q, k, k, is_causal=True), q, k))
    mask = torch.from_numpy(numpy.tri(40, 70, 9, dtype=bool))
    both(with_gradients(lambda q, k: attend(q, k, k, attn_mask=mask), q, k))


def test_flash_attention():
    q, k = normal(90, 4, 16), normal(90, 2, 16)
    bounds = torch.tensor([0, 30, 90], dtype=torch.int32)
    attend = longspan.torch.flash_attention
    both(
        with_gradients(
            lambda q, k: attend(q, k, k, causal=True, window_size=(20, 0), cu_seqlens_q=bounds), q, k
        )
    )


def test_modules():
    x = normal(2, 70, 32)
    torch.manual_seed(0)
    pattern = "causal & (window(20, 0) | sinks(4))"
    layer = longspan.torch.MultiheadAttention(32, 2, batch_first=True, pattern=pattern, num_kv_heads=1)
    both(with_gradients(lambda x: layer(x, x, x)[0], x))
    layer = longspan.torch.MultiheadDilatedAttention(
        embed_dim=32, num_heads=2, dilation_rates=[1, 2], segment_lengths=[16, 64]
    )
    both(with_gradients(lambda x: layer(x, x, x, is_causal=True)[0], x))


def test_padded_branches_without_rows():
    """Queries outside of padded sequences have no sink either."""
    layer = longspan.torch.DilatedAttention([16, 64], [1, 2])
    q, sinks = normal(2, 70, 2, 16), torch.tensor([0.3, -0.2])
    padding = torch.tensor([[0, 70], [20, 55]])
    both(
        with_gradients(
            lambda q, sinks: layer(q, q, q, key_padding=padding, sink_logits=sinks), q, sinks
        )
    )


def test_rows_of_padding_have_no_part_in_gradients_of_sinks():
    q, sinks = normal(1, 2, 70, 16), torch.tensor([0.3, -0.2], requires_grad=True)
    branches, padding = longspan.Dilated([16], [1]), torch.tensor([[20, 55]])

    def run():
        out, lse = longspan.torch.attention(
            q, q, q, branches, key_padding=padding, sink_logits=sinks, return_lse=True
        )
        return torch.autograd.grad([out, lse], sinks, [out, torch.ones_like(lse)])

    both(run)


def test_neighborhood_attention():
    q = normal(1, 2, 12 * 15, 16)
    attend = longspan.torch.neighborhood_attention
    both(with_gradients(lambda q: attend(q, q, q, (12, 15), (2, 3)), q))


def test_autocast():
    q = normal(1, 2, 64, 16)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            out = longspan.torch.attention(q, q, q, "causal")
        assert out.dtype == torch.bfloat16
        return [out]

    backend = InterpretedCuda()
    (own,) = run()
    engine = FlexEngine(backend=backend, dynamic=False, options=dict.fromkeys(TILES, 64))
    with in_place_of("cpu", engine):
        (other,) = run()
    torch.testing.assert_close(own, other, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    "tensors, pattern, options, message",
    [
        ((1, 2, 9, 8), "causal", {}, "q has 8 elements per head, expected at least 16"),
        ((1, 2, 9, 16), "causal", {"dropout_p": 0.5}, "dropout_p is 0.5 .*FlexAttention has no dropout"),
        ((1, 2, 9, 16), "causal", {"bias_table": torch.zeros(2, 3, requires_grad=True)}, "bias_table requires a gradient"),
        ((1, 2, 9, 16), "causal", {"alibi_slopes": torch.zeros(2, requires_grad=True)}, "alibi_slopes requires a gradient"),
    ],
)
def test_what_is_refused(tensors, pattern, options, message):
    x = normal(*tensors)
    with in_place_of("cpu", FlexEngine()):
        with pytest.raises((ValueError, NotImplementedError), match=message):
            longspan.torch.attention(x, x, x, pattern, **options)
        with pytest.raises(TypeError, match="q holds torch.float64"):
            longspan.torch.attention(*[normal(1, 2, 9, 16).double()] * 3, "causal")


def test_devices_are_refused_with_what_to_do(monkeypatch):
    from longspan.torch import _flex_support

    check = _flex_support._check_device
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    with pytest.raises(RuntimeError, match="compute capability 7.0, expected 8.0 or more"):
        check.__wrapped__(0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(RuntimeError, match="built for ROCm"):
        check.__wrapped__(0)
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    x = normal(1, 2, 9, 16)
    with pytest.raises(RuntimeError, match="torch is 2.11.0, expected 2.12 or later"):
        _flex_support.check_call(x, x, x)
    meta = x.to("meta")
    with pytest.raises(ValueError, match="q is on meta, expected the CPU or a CUDA device"):
        longspan.torch.attention(meta, meta, meta, "causal")
    with pytest.raises(ValueError, match="k is on meta, expected the CPU, as q"):
        longspan.torch.attention(x, meta, meta, "causal")


def test_no_rows_and_no_keys():
    with in_place_of("cpu", FlexEngine()):
        for queries, keys in ((0, 5), (5, 0), (0, 0)):
            q, k = (torch.zeros(1, 2, n, 16, requires_grad=True) for n in (queries, keys))
            out, lse = longspan.torch.attention(q, k, k, "full", return_lse=True)
            out.sum().backward()
            assert not out.any() and (lse == -torch.inf).all() and not q.grad.any() and not k.grad.any()
        x = torch.zeros(1, 2, 5, 16)
        assert not longspan.torch.attention(x, x, x, "!full").any()


def test_a_newer_torch_has_to_pass_the_canary(monkeypatch):
    from longspan.torch import _flex_canary, _flex_support

    device, engine = torch.device("cpu"), FlexEngine(
        backend=InterpretedCuda(), dynamic=False, options=dict.fromkeys(TILES, 64)
    )
    _flex_support._passed.clear()
    errors = _flex_canary.errors(engine, device)
    assert set(errors) == {"out", "lse", "dq", "dk", "dv"} and max(errors.values()) < 1e-5
    monkeypatch.setattr(_flex_canary, "errors", lambda *_: {**errors, "lse": 0.3})
    with pytest.raises(RuntimeError, match="computes lse otherwise"):
        _flex_support._canary(device, engine)
    monkeypatch.undo()
    # A log-sum-exp of another base is found.
    monkeypatch.setattr("longspan.torch._flex._LN2", 1.0)
    assert _flex_canary.errors(engine, device)["lse"] > 0.1
