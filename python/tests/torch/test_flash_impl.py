"""Longspan as torch's flash attention implementation: SDPA and ``varlen_attn`` on the CPU."""

import functools
import itertools

import dense
import oracle
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import longspan.torch
from longspan.torch import _mask_layouts, impl_calls

pytest.importorskip("torch.nn.attention.varlen", reason="torch has no registry of implementations")

from torch.nn.attention import (  # noqa: E402
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

#: batch, query heads, key heads, queries, keys, dim of keys, dim of values, which SDPA's kernel has equal.
SIZES = [(2, 4, 4, 130, 130, 64, 64), (2, 8, 2, 97, 97, 64, 64), (1, 4, 4, 50, 131, 16, 16)]


@pytest.fixture
def active():
    activate_flash_attention_impl("longspan")
    assert current_flash_attention_impl() == "longspan"
    yield
    restore_flash_attention_impl()


class calls:
    """How many calls a block makes: ``longspan`` and ``stock``."""

    def __enter__(self):
        self.before = impl_calls()
        return self

    def __exit__(self, *_):
        after = impl_calls()
        self.longspan, self.stock = (b - a for a, b in zip(self.before, after))


def stock(function):
    """What torch's own kernels compute."""
    was = current_flash_attention_impl()
    if was is not None:
        restore_flash_attention_impl()
    try:
        return function()
    finally:
        if was is not None:
            activate_flash_attention_impl(was)


def test_it_is_registered_and_not_active_by_itself():
    assert "longspan" in list_flash_attention_impls()
    assert current_flash_attention_impl() is None
    with calls() as made:
        F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 100, 16), is_causal=True)
    assert (made.longspan, made.stock) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_dense(rng, active, size, is_causal, dtype):
    q, k, v, dout = dense.tensors(rng, size, dtype)
    with calls() as made:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
    assert (made.longspan, made.stock) == (2, 0)
    mask = oracle.mask(dense.RULES["causal" if is_causal else "full"], q.shape[2], k.shape[2], query_offset=0)
    expected = dense.truth(q, k, v, mask, dout)
    dense.check(dict(zip(("dq", "dk", "dv"), gradients), out=out), expected, dtype)


@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3))), ids=str)
def test_strides(rng, active, order):
    """Any order of axes, gradients with strides as torch's kernel has them. torch calls that kernel where the
    elements of a head are adjacent."""
    q, k, v, dout = (x.detach() for x in dense.tensors(rng, SIZES[1]))
    back = [0] * 3
    for place, axis in enumerate(order):
        back[axis - 1] = place + 1
    q, k, v = (x.permute(0, *order).contiguous().permute(0, *back).requires_grad_() for x in (q, k, v))
    with calls() as made:
        out = F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
    if order[-1] != 3:
        assert (made.longspan, made.stock) == (0, 1)
        return
    assert (made.longspan, made.stock) == (2, 0)
    expected = dense.truth(q, k, v, oracle.mask(dense.RULES["full"], 97, 97), dout, scale=0.3)
    dense.check(dict(zip(("dq", "dk", "dv"), gradients), out=out), expected)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        traced = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*fakes)
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    assert [x.stride() for x in found] == [x.stride() for x in traced]


def test_autocast(rng, active):
    q, k, v, dout = dense.tensors(rng, SIZES[0])
    with torch.autocast("cpu", torch.bfloat16), calls() as made:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.dtype == torch.bfloat16 and made.longspan == 1
    gradients = torch.autograd.grad(out, (q, k, v), dout.bfloat16())
    rounded = [x.detach().bfloat16() for x in (q, k, v, dout)]
    expected = dense.truth(*rounded[:3], oracle.mask(dense.RULES["causal"], 130, 130), rounded[3])
    dense.check(dict(zip(("dq", "dk", "dv"), gradients), out=out), expected, torch.bfloat16)


@pytest.mark.parametrize("kind", ["dense", "masked"])
def test_compile_and_checkpoint(rng, active, kind):
    q, k, v, dout = dense.tensors(rng, (1, 2, 2, 200, 200, 32, 32))
    options = {"is_causal": True}
    if kind == "masked":
        options = {"attn_mask": torch.ones(200, 200, dtype=torch.bool).tril()}

    def attend(q, k, v):
        return F.scaled_dot_product_attention(2 * q, k, v, **options).sin()

    def results(function):
        out = function(q, k, v)
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    with calls() as made:
        expected = results(attend)
    assert (made.longspan, made.stock) == (2, 0)
    with calls() as made:
        again = results(lambda *x: checkpoint(attend, *x, use_reentrant=False))
    assert (made.longspan, made.stock) == (3, 0)
    for a, b in zip(again, expected, strict=True):
        assert a.equal(b)
    with calls() as made:
        compiled = results(torch.compile(attend, fullgraph=True))
    assert (made.longspan, made.stock) == (2, 0)
    for a, b in zip(compiled, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


def test_a_compiled_graph_follows_what_is_active(rng):
    q, k, v, _ = (x.detach() for x in dense.tensors(rng, SIZES[0]))
    attend = torch.compile(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), fullgraph=True)
    theirs = attend()
    activate_flash_attention_impl("longspan")
    try:
        with calls() as made:
            ours = attend()
    finally:
        restore_flash_attention_impl()
    assert made.longspan == 1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
    with calls() as made:
        assert attend().equal(theirs)
    assert made.longspan == 0


# --- Boolean masks


MASKS = [(256, 260), (1, 260), (2, 1, 256, 260), (1, 4, 256, 260), (2, 4, 256, 260), (4, 1, 260), (2, 1, 1, 260)]


@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_boolean_masks(rng, active, shape):
    q, k, v, dout = dense.tensors(rng, (2, 4, 2, 256, 260, 16, 16))
    mask = torch.from_numpy(rng.random(shape) < 0.4)
    mask[..., 3] = True
    with calls() as made:
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
    assert (made.longspan, made.stock) == (2, 0)
    expected = dense.truth(q, k, v, mask.expand(2, 4, 256, 260).numpy(), dout)
    dense.check(dict(zip(("dq", "dk", "dv"), gradients), out=out), expected)


def test_masks_are_read_once(rng, active, monkeypatch):
    read, reads = _mask_layouts._read, []
    monkeypatch.setattr(_mask_layouts, "_read", lambda *x: reads.append(x) or read(*x))
    q, k, v, dout = dense.tensors(rng, (1, 4, 4, 256, 256, 16, 16))
    mask = torch.ones(1, 1, 300, 300, dtype=torch.bool).tril()

    def attend():
        # A view of its own, as each layer of a model takes one.
        out = F.scaled_dot_product_attention(q, k, v, mask[..., :256, :256])
        return out, torch.autograd.grad(out, q, dout)

    first, again = attend(), attend()
    assert len(reads) == 1
    assert first[0].equal(again[0])
    mask[..., 0] = False
    mask[..., 0, 0] = True
    changed = attend()
    assert len(reads) == 2
    assert not changed[0].equal(first[0])
    # Another tensor, also where it has the address of one that is gone.
    where = mask.data_ptr()
    for _ in range(20):
        del mask
        mask = torch.zeros(1, 1, 300, 300, dtype=torch.bool)
        mask[..., 0] = True
        assert attend()[0].equal(v[..., :1, :].expand_as(v))
        if mask.data_ptr() == where:
            break
    with torch.inference_mode():
        # No versions are counted there: what was read is not kept.
        made, before = torch.ones(256, 256, dtype=torch.bool).tril(), len(reads)
        for _ in range(2):
            F.scaled_dot_product_attention(q, k, v, made)
    assert len(reads) == before + 2


def test_rows_without_keys_are_zero(rng, active):
    q, k, v, dout = dense.tensors(rng, (1, 2, 2, 256, 256, 16, 16))
    mask = torch.ones(256, 256, dtype=torch.bool).tril(-1)
    out = F.scaled_dot_product_attention(q, k, v, mask)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    assert out[..., 0, :].eq(0).all() and gradients[0][..., 0, :].eq(0).all()
    assert all(x.isfinite().all() for x in gradients)


# --- What goes to the kernels that were there


def handed_over():
    q, k, v = torch.randn(3, 2, 4, 100, 16)
    wide = torch.randn(3, 1, 2, 100, 300)
    tiny = torch.ones(100, 100, dtype=torch.bool).tril()
    return {
        "dropout": lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5),
        "floating mask": lambda: F.scaled_dot_product_attention(q, k, v, torch.linspace(-1, 1, 100)[None]),
        "f64": lambda: F.scaled_dot_product_attention(q.double(), k.double(), v.double()),
        "wide heads": lambda: F.scaled_dot_product_attention(*wide, is_causal=True),
        "other value dim": lambda: F.scaled_dot_product_attention(q, k, v[..., :7]),
        "small mask": lambda: F.scaled_dot_product_attention(q[:1], k[:1], v[:1], tiny),
        "infinite scale": lambda: F.scaled_dot_product_attention(q, k, v, scale=float("inf")),
    }


@pytest.mark.parametrize("name", handed_over())
def test_stock_kernels_compute_the_rest(active, name):
    torch.manual_seed(0)
    call = handed_over()[name]
    with calls() as made:
        torch.manual_seed(1)
        ours = call()
    assert (made.longspan, made.stock) == (0, 1)

    def theirs():
        torch.manual_seed(1)
        return call()

    torch.testing.assert_close(ours, stock(theirs), rtol=0, atol=0, equal_nan=True)


def test_the_math_backend_is_torchs(active):
    q = torch.randn(1, 2, 100, 16)
    with sdpa_kernel(SDPBackend.MATH), calls() as made:
        ours = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        theirs = stock(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    assert made.stock == 1 and ours.equal(theirs)


@pytest.mark.parametrize("masked", [False, True])
def test_forward_mode_and_transforms_are_torchs(active, masked):
    q = torch.randn(1, 4, 200, 16)
    mask = torch.ones(200, 200, dtype=torch.bool).tril() if masked else None
    attend = functools.partial(F.scaled_dot_product_attention, attn_mask=mask)

    def raised(function):
        try:
            return function()
        except Exception as error:
            return type(error), str(error)

    def forward_mode():
        return torch.func.jvp(lambda q: attend(q, q, q), (q,), (q,))

    def dual():
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(q, q)
            return torch.autograd.forward_ad.unpack_dual(attend(x, x, x)).tangent

    def reverse():
        return torch.func.grad(lambda q: attend(q, q, q).square().sum())(q)

    def batched():
        return torch.func.vmap(lambda q: attend(q, q, q))(torch.stack([q, 2 * q]))

    for function in (forward_mode, dual, reverse, batched):
        ours, theirs = raised(function), stock(functools.partial(raised, function))
        if isinstance(theirs, tuple) and isinstance(theirs[0], type):
            assert ours == theirs
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


# --- varlen_attn


WINDOWS = [(-1, -1), (-1, 0), (16, 0), (5, 9)]

#: Bounds of sequences of queries and of keys.
BOUNDS = [
    ([0, 30, 100], [0, 30, 100]),
    ([0, 1, 1, 40, 100], [0, 20, 25, 70, 117]),
    ([0, 100], [0, 37]),
]


def rule(window, is_causal=False):
    left, right = (None if side < 0 else side for side in window)
    return lambda q, k: (left is None or q - k <= left) and (right is None or k - q <= right)


def one_per_sequence(q, k, v, dout, bounds, window, dtype, scale=None):
    """Truth and sizes of each sequence, ``(1, head, token, dim)``."""
    for (q0, q1), (k0, k1) in zip(*(itertools.pairwise(x) for x in bounds)):
        own = [x[a:b].detach().transpose(0, 1)[None] for x, a, b in
               ((q, q0, q1), (k, k0, k1), (v, k0, k1), (dout, q0, q1))]
        mask = oracle.mask(rule(window), q1 - q0, k1 - k0)
        yield (slice(q0, q1), slice(k0, k1)), dense.truth(*own[:3], mask, own[3], scale=scale)


def check_sequences(got, tensors, bounds, window, dtype, scale=None):
    of_queries = ("out", "dq")
    for (queries, keys), expected in one_per_sequence(*tensors, bounds, window, dtype, scale):
        own = {
            name: x[queries if name in of_queries else keys].transpose(0, 1)[None]
            for name, x in got.items() if name != "lse"
        }
        if "lse" in got:
            own["lse"] = got["lse"][None, :, queries]
        own = {name: x for name, x in own.items() if x.numel()}
        dense.check(own, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_varlen(rng, active, bounds, window, dtype):
    tokens = [x[-1] for x in bounds]
    shapes = [(tokens[0], 4, 32), (tokens[1], 2, 32), (tokens[1], 2, 32), (tokens[0], 4, 32)]
    q, k, v, dout = (torch.from_numpy(rng.standard_normal(x, dtype="float32")).to(dtype) for x in shapes)
    for x in (q, k, v):
        x.requires_grad_()
    cu = [torch.tensor(x, dtype=torch.int32) for x in bounds]
    longest = [max(b - a for a, b in itertools.pairwise(x)) for x in bounds]

    def attend(q, k, v):
        return varlen_attn(q, k, v, *cu, *longest, window_size=window, enable_gqa=True,
                           return_aux=AuxRequest(lse=True))

    def results(function):
        out, lse = function(q, k, v)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        return dict(zip(("dq", "dk", "dv"), gradients), out=out, lse=lse)

    with calls() as made:
        found = results(attend)
    assert (made.longspan, made.stock) == (2, 0)
    check_sequences(found, (q, k, v, dout), bounds, window, dtype)
    again = checkpoint(lambda *x: attend(*x)[0], q, k, v, use_reentrant=False)
    assert again.equal(found["out"])
    assert torch.autograd.grad(again, q, dout)[0].equal(found["dq"])
    into = torch.full_like(found["out"], torch.nan)
    varlen_attn_out(into, q.detach(), k.detach(), v.detach(), *cu, *longest, window_size=window, enable_gqa=True)
    assert into.equal(found["out"])
    if dtype == torch.float32 and window == (16, 0):
        compiled = results(torch.compile(attend, fullgraph=True))
        for name, value in compiled.items():
            torch.testing.assert_close(value, found[name], rtol=1e-5, atol=2e-6)


def test_varlen_under_autocast(rng, active):
    """``varlen_attn`` has no rule of autocast: tensors keep the type that layers before it have made."""
    linear = torch.nn.Linear(16, 3 * 4 * 16)
    cu = torch.tensor([0, 20, 50], dtype=torch.int32)
    x = torch.from_numpy(rng.standard_normal((50, 16), dtype="float32"))
    with torch.autocast("cpu", torch.bfloat16), calls() as made:
        q, k, v = linear(x).unflatten(-1, (3, 4, 16)).unbind(1)
        out = varlen_attn(q, k, v, cu, cu, 30, 30, window_size=(8, 0))
    assert out.dtype == torch.bfloat16 and made.longspan == 1
    out.float().square().sum().backward()
    check_sequences({"out": out}, (q, k, v, out), ([0, 20, 50],) * 2, (8, 0), torch.bfloat16)
    assert linear.weight.grad.isfinite().all()


def test_varlen_with_used_keys_and_other_value_dims(rng, active):
    q, k, v = (torch.from_numpy(rng.standard_normal(x, dtype="float32"))
               for x in ((7, 4, 16), (60, 4, 16), (60, 4, 24)))
    cu_q, cu_k = torch.tensor([0, 1, 5, 7]).int(), torch.tensor([0, 20, 40, 60]).int()
    used = torch.tensor([20, 9, 13]).int()
    out = varlen_attn(q, k, v, cu_q, cu_k, 4, 20, window_size=(-1, 0), seqused_k=used, scale=0.2)
    own = [torch.cat([x[20 * i : 20 * i + n] for i, n in enumerate(used.tolist())]) for x in (k, v)]
    bounds = (cu_q.tolist(), [0, *used.cumsum(0).tolist()])
    check_sequences({"out": out}, (q, *own, out), bounds, (-1, 0), torch.float32, scale=0.2)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_splits": 1}, "num_splits is given.*leave it out|num_splits is given.*Longspan chooses"),
        ({"seqused_k": torch.tensor([41]).int()}, "seqused_k is \\[41\\].*0 to their length"),
        ({"max_k": 39}, "max_k is 39, but a sequence has 40 tokens"),
        ({"cu_seq_k": None}, "without cu_seq_q or cu_seq_k, expected both"),
    ],
    ids=["num_splits", "seqused_k", "max_k", "cu_seq_k"],
)
def test_what_varlen_refuses(active, options, message):
    q = torch.randn(40, 2, 16)
    cu = torch.tensor([0, 40], dtype=torch.int32)
    arguments = {"cu_seq_q": cu, "cu_seq_k": cu, "max_q": 40, "max_k": 40} | options
    with pytest.raises((ValueError, NotImplementedError), match=message):
        varlen_attn(q, q, q, **arguments)


@pytest.mark.parametrize("name", ["alibi_slopes", "seqused_k"])
def test_what_the_backward_pass_does_not_know_of(active, name):
    """torch refuses these under gradients in ``varlen_attn``; its operator would ignore them."""
    q, cu = torch.randn(40, 2, 16), torch.tensor([0, 40], dtype=torch.int32)
    option = {"alibi_slopes": torch.tensor([0.5, 0.1]), "seqused_k": torch.tensor([30], dtype=torch.int32)}
    call = functools.partial(torch.ops.aten._flash_attention_forward, cum_seq_q=cu, cum_seq_k=cu, max_q=40, max_k=40,
                             dropout_p=0.0, is_causal=False, return_debug_mask=False, **{name: option[name]})
    assert not call(q, q, q)[0].equal(call(q, q, q, **{name: None})[0])
    q.requires_grad_()
    with torch.no_grad():
        call(q, q, q)
    with pytest.raises(NotImplementedError, match=f"{name} with gradients"):
        call(q, q, q)


def test_activation_by_others_and_twice(active):
    q = torch.randn(1, 2, 100, 16)
    activate_flash_attention_impl("longspan")
    with calls() as made:
        F.scaled_dot_product_attention(q, q, q)
    assert made.longspan == 1
    restore_flash_attention_impl()
    with calls() as made:
        F.scaled_dot_product_attention(q, q, q)
    assert (made.longspan, made.stock) == (0, 0)
    with pytest.raises(NotImplementedError):
        varlen_attn(*torch.randn(3, 10, 2, 8), *[torch.tensor([0, 10]).int()] * 2, 10, 10)
