"""``torch.func``: reverse mode and batches work, forward mode is refused."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import longspan
from longspan.torch import attention, scaled_dot_product_attention

DILATED = longspan.Dilated([8, 16], [1, 2])


def functions():
    return {
        "attention": lambda q, k, v: attention(q, k, v, "causal & window(7, 0)"),
        "lse": lambda q, k, v: attention(q, k, v, "causal", return_lse=True)[1],
        "sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
        "dilated": lambda q, k, v: attention(q, k, v, DILATED),
        "padded": lambda q, k, v: attention(q, k, v, "full", key_padding=torch.tensor([[2, 20]])),
    }


@pytest.fixture(params=list(functions()))
def function(request):
    return functions()[request.param]


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 24, 8, generator=generator) for _ in range(3)]


def reverse(function, tensors, weight):
    tensors = [x.clone().requires_grad_() for x in tensors]
    return torch.autograd.grad((function(*tensors) * weight).sum(), tensors)


def test_grad_and_vjp(function, tensors):
    weight = torch.randn(function(*tensors).shape)
    expected = reverse(function, tensors, weight)
    got = torch.func.grad(lambda *x: (function(*x) * weight).sum(), argnums=(0, 1, 2))(*tensors)
    out, pull = torch.func.vjp(function, *tensors)
    assert torch.equal(out, function(*tensors))
    for a, b, c in zip(got, expected, pull(weight)):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(c, b)


def test_jacrev(tensors):
    def function(q):
        return attention(q, *tensors[1:], "causal")[0, 0, 5]

    rows = torch.func.jacrev(function)(tensors[0])
    for n, row in enumerate(rows):
        q = tensors[0].clone().requires_grad_()
        torch.testing.assert_close(row, torch.autograd.grad(function(q)[n], q)[0])


def test_vmap(function, tensors):
    batches = [torch.stack([x, x.flip(2), 2 * x]) for x in tensors]
    expected = torch.stack([function(*one) for one in zip(*batches)])
    assert torch.equal(torch.func.vmap(function)(*batches), expected)
    q, k, v = batches
    got = torch.func.vmap(function, in_dims=(1, None, None))(q.movedim(0, 1), k[0], v[0])
    assert torch.equal(got, torch.stack([function(one, k[0], v[0]) for one in q]))
    weight = torch.randn(function(*tensors).shape)

    def gradient(*x):
        return torch.func.grad(lambda *x: (function(*x) * weight).sum())(*x)

    got = torch.func.vmap(gradient)(*batches)
    for a, *one in zip(got, *batches):
        torch.testing.assert_close(a, reverse(function, one, weight)[0])


def test_gradients_of_parameters(tensors):
    table = torch.randn(2, 5)

    def loss(table):
        return attention(*tensors, "causal", bias_table=table, alibi_slopes=table[:, 0]).square().sum()

    leaf = table.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(table), torch.autograd.grad(loss(leaf), leaf)[0])
    with pytest.raises(NotImplementedError, match="vmap over bias_table"):
        torch.func.vmap(loss)(torch.stack([table, table]))


def test_second_derivatives_are_refused(tensors):
    def loss(q):
        return attention(q, *tensors[1:], "causal").square().sum()

    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(tensors[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_forward_mode_is_refused(function, tensors):
    message = "no forward-mode differentiation"
    tangents = tuple(torch.ones_like(x) for x in tensors)
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(function, tuple(tensors), tangents)
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jacfwd(function)(*tensors)
    with pytest.raises(NotImplementedError, match=message):
        torch.func.hessian(lambda q: function(q, *tensors[1:]).sum())(tensors[0])
    with pytest.raises(NotImplementedError, match=message):
        torch.func.linearize(function, *tensors)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        function(*(forward_ad.make_dual(x, t) for x, t in zip(tensors, tangents)))
    with forward_ad.dual_level():
        plain = function(*tensors)
    assert torch.equal(plain, function(*tensors))
