"""Score additions and dropout against the definition, in f64, with torch's own gradients."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import longspan
from longspan.torch import DilatedAttention, attention, flash_attention, scaled_dot_product_attention

BATCH, HEADS, KV_HEADS, TOKENS_Q, TOKENS_K, DIM = 2, 4, 2, 37, 53, 16


def splitmix64(x):
    with numpy.errstate(over="ignore"):
        z = x + numpy.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        return z ^ (z >> numpy.uint64(31))


def kept(p, seed, batch, heads, queries, keys):
    """What dropout multiplies probabilities by: ``(batch, heads, queries, keys)``."""
    streams = numpy.arange(batch * heads, dtype="uint64")
    streams = splitmix64(numpy.uint64(seed) ^ streams).reshape(batch, heads, 1)
    words = splitmix64(streams ^ numpy.asarray(queries, "int64").astype("uint64"))[..., None]
    a, c = words.astype("uint32"), (words >> numpy.uint64(32)).astype("uint32")
    with numpy.errstate(over="ignore"):
        x = numpy.asarray(keys, "int64").astype("uint32") ^ a
        x = (x ^ (x >> numpy.uint32(16))) * numpy.uint32(0x7FEB352D)
        x = (x ^ (x >> numpy.uint32(15))) + c
        x = x * numpy.uint32(0x846CA68B)
        r = x ^ (x >> numpy.uint32(16))
    return torch.from_numpy(numpy.where(r >= numpy.floor(p * 2.0**32), 1 / (1 - p), 0.0))


def dense(q, k, v, mask, *, softcap=None, table=None, right=0, slopes=None, sinks=None, keep=None,
          distance=None):
    """Output and log-sum-exp as the definition has them."""
    share = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    scores = q @ k.mT * q.shape[3] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if distance is None:
        at = torch.arange(q.shape[2]) + k.shape[2] - q.shape[2]
        distance = at[:, None] - torch.arange(k.shape[2])
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance.abs()
    if table is not None:
        scores = scores + table[:, distance.clamp(-right, table.shape[1] - 1 - right) + right]
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:1], -1, scores.shape[2], 1)], 3)
    lse = scores.logsumexp(-1)
    p = scores.softmax(-1)[..., : k.shape[2]]
    return (p if keep is None else p * keep) @ v, lse


def inputs(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    q = normal(BATCH, HEADS, TOKENS_Q, DIM)
    k, v = (normal(BATCH, KV_HEADS, TOKENS_K, DIM) for _ in range(2))
    learned = {
        "table": torch.randn(HEADS, 12, generator=generator).requires_grad_(),
        "slopes": (torch.rand(HEADS, generator=generator) / 4).requires_grad_(),
        "sinks": torch.randn(HEADS, generator=generator).requires_grad_(),
    }
    return (q, k, v), learned


def causal():
    at = torch.arange(TOKENS_Q) + TOKENS_K - TOKENS_Q
    return torch.arange(TOKENS_K) <= at[:, None]


def gradients(results, tensors, rounded=None):
    """Gradients of random weights of output and log-sum-exp, given the output that the backward pass has."""
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(x.shape, generator=generator).bfloat16().double() for x in results]
    if rounded is not None:
        # It takes the sum of each row's dP · P from that output. What rounding changes in it is the same
        # as so much less of a gradient of the row's log-sum-exp.
        weights[1] -= ((rounded.double() - results[0]) * weights[0]).sum(-1).detach()
    loss = sum((x.double() * weight).sum() for x, weight in zip(results, weights))
    return torch.autograd.grad(loss, tensors)


CASES = [
    {"table"},
    {"slopes"},
    {"sinks"},
    {"softcap"},
    {"table", "slopes", "softcap"},
    {"table", "slopes", "softcap", "sinks", "dropout"},
    {"dropout"},
]


def call(tensors, learned, chosen, pattern="causal", **options):
    names = {"table": "bias_table", "slopes": "alibi_slopes", "sinks": "sink_logits"}
    options |= {names[name]: learned[name] for name in chosen & names.keys()}
    if "table" in chosen:
        options["bias_right"] = 3
    if "softcap" in chosen:
        options["softcap"] = 2.0
    if "dropout" in chosen:
        options["dropout_p"] = 0.3
    return attention(*tensors, pattern, enable_gqa=True, return_lse=True, **options)


def reference(tensors, learned, chosen, seed, **options):
    wide = [x.detach().double().requires_grad_() for x in tensors]
    parameters = {name: x.detach().double().requires_grad_() for name, x in learned.items()}
    options |= {name: parameters[name] for name in chosen & parameters.keys()}
    if "table" in chosen:
        options["right"] = 3
    if "softcap" in chosen:
        options["softcap"] = 2.0
    if "dropout" in chosen:
        queries = numpy.arange(TOKENS_Q) + TOKENS_K - TOKENS_Q
        options["keep"] = kept(0.3, seed, BATCH, HEADS, queries, numpy.arange(TOKENS_K))
    return wide, parameters, dense(*wide, causal(), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", CASES, ids=lambda chosen: "-".join(sorted(chosen)))
def test_definition(chosen, dtype):
    tensors, learned = inputs(dtype=dtype)
    torch.manual_seed(3)
    seed = int(torch.randint(1 << 62, (), dtype=torch.int64))
    torch.manual_seed(3)
    results = call(tensors, learned, chosen)
    wide, parameters, expected = reference(tensors, learned, chosen, seed)
    names = sorted(chosen & learned.keys())
    got = gradients(results, [*tensors, *(learned[name] for name in names)])
    true = gradients(expected, [*wide, *(parameters[name] for name in names)], rounded=results[0].detach())
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 6e-2}
    for a, b in zip((*results, *got), (*expected, *true)):
        torch.testing.assert_close(a.double(), b.detach(), **tolerance)


def test_layouts_and_numpy_agree():
    tensors, learned = inputs()
    chosen = {"table", "slopes", "softcap", "sinks"}
    layout = longspan.causal().compile(TOKENS_Q, TOKENS_K)
    one, other = call(tensors, learned, chosen), call(tensors, learned, chosen, layout)
    parameters = [*tensors, *learned.values()]
    for a, b in zip((*one, *gradients(one, parameters)), (*other, *gradients(other, parameters))):
        assert torch.equal(a, b)
    options = {
        "bias_table": learned["table"].detach().numpy(),
        "bias_right": 3,
        "alibi_slopes": learned["slopes"].tolist(),
        "sink_logits": learned["sinks"].tolist(),
        "softcap": 2.0,
    }
    arrays = [x.detach().numpy() for x in tensors]
    output = longspan.forward(*arrays, "causal", **options)
    assert numpy.array_equal(output.out, one[0].detach().numpy())
    found = longspan.backward(*arrays, output, numpy.ones_like(output.out))
    expected = torch.autograd.grad(call(tensors, learned, chosen)[0].sum(), parameters)
    got = (*found, found.dbias_table, found.dalibi_slopes, found.dsink_logits)
    for a, b in zip(got, expected):
        numpy.testing.assert_allclose(a, b.numpy(), rtol=1e-5, atol=1e-5)


def test_sequences_have_distances_of_their_own():
    (q, k, v), learned = inputs()
    chosen = {"table", "slopes"}
    lengths = (10, 27), (31, 22)
    bounds = tuple(torch.tensor([0, a, a + b]) for a, b in lengths)
    packed = call((q, k, v), learned, chosen, "causal", cu_seqlens=bounds)
    apart = [
        call((q[:, :, i:j], k[:, :, m:n], v[:, :, m:n]), learned, chosen)
        for i, j, m, n in ((0, 10, 0, 31), (10, 37, 31, 53))
    ]
    for a, *b in zip(packed, *apart):
        torch.testing.assert_close(a, torch.cat(b, 2))


@pytest.mark.parametrize("way", ["eager", "compiled", "checkpointed"])
def test_dropout_is_a_function_of_the_generator(way):
    (q, k, v), _ = inputs()

    def step(q, k, v):
        return attention(q, k, v, "causal", enable_gqa=True, dropout_p=0.5).tanh()

    if way == "compiled":
        fast = torch.compile(step, fullgraph=True, backend="aot_eager")
    elif way == "checkpointed":
        def fast(q, k, v):
            return checkpoint(step, q, k, v, use_reentrant=False)
    else:
        fast = step
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = fast(q, k, v)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for a, b, c in zip(*results):
        assert torch.equal(a, b) and not torch.equal(a, c)


def test_both_passes_drop_the_same_pairs():
    """A gradient where no probability was kept would be one of another mask."""
    v = torch.eye(64).view(1, 1, 64, 64).requires_grad_()
    q = torch.zeros(1, 1, 64, 64)
    out = attention(q, q, v, "full", dropout_p=0.5)
    (dv,) = torch.autograd.grad(out.diagonal(dim1=2, dim2=3).sum(), v)
    weights = out[0, 0]
    assert torch.equal(dv[0, 0].diagonal() > 0, weights.diagonal() > 0)
    share = (weights > 0).float().mean().item()
    assert abs(share - 0.5) < 4 * 0.5 / 64


def test_torch_functions_have_dropout_and_slopes():
    (q, k, v), learned = inputs()
    torch.manual_seed(0)
    one = attention(q, k, v, "full", enable_gqa=True, dropout_p=0.25)
    torch.manual_seed(0)
    assert torch.equal(one, scaled_dot_product_attention(q, k, v, dropout_p=0.25, enable_gqa=True))
    torch.manual_seed(0)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    other = flash_attention(*turned, dropout_p=0.25, alibi_slopes=learned["slopes"])
    torch.manual_seed(0)
    slopes = learned["slopes"]
    expected = attention(q, k, v, "full", enable_gqa=True, dropout_p=0.25, alibi_slopes=slopes)
    assert torch.equal(other.transpose(1, 2), expected)


def test_dilated_dropout_in_training_alone():
    layer = DilatedAttention([16, 32], [1, 2], attention_dropout=0.4)
    q = torch.randn(1, 50, 4, 8)
    assert not torch.equal(layer(q, q, q), layer(q, q, q))
    layer.eval()
    plain = DilatedAttention([16, 32], [1, 2]).eval()
    assert torch.equal(layer(q, q, q), plain(q, q, q))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dropout_p": 1.0}, "dropout_p is 1.0, expected a number from 0 to below 1"),
        ({"dropout_p": -0.1}, "dropout_p is -0.1"),
        ({"bias_right": 2}, "bias_right is 2 without a bias_table"),
        ({"bias_table": torch.zeros(3, 5)}, r"shape \(3, 5\), expected .*for 4 heads"),
        ({"bias_table": torch.zeros(4, 5), "bias_right": 5}, "bias_right is 5 and bias_table has 5"),
        ({"bias_table": torch.full((4, 5), torch.inf)}, "a value of the bias table is inf"),
        ({"alibi_slopes": torch.zeros(4, 4)}, r"alibi_slopes is a float32 tensor of shape \(4, 4\)"),
        ({"alibi_slopes": torch.zeros(4, dtype=torch.int64)}, "alibi_slopes is a int64 tensor"),
    ],
)
def test_refusals(options, message):
    tensors, _ = inputs()
    with pytest.raises(ValueError, match=message):
        attention(*tensors, "causal", enable_gqa=True, **options)
    pattern = "packed([37], [53], full) | sinks(1)"
    with pytest.raises(ValueError, match="counts positions within sequences in one part"):
        attention(*tensors, pattern, enable_gqa=True, alibi_slopes=torch.ones(4))
