"""``MultiheadAttention`` beside torch's module of that name, with the same weights."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

import longspan
from longspan.torch import MultiheadAttention

EMBED, HEADS, TOKENS = 24, 4, 37


def shaken(module, seed=0):
    """Weights that are nowhere 0, so that one which is left out shows."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw))
    return module


def drawn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def results(call, module, inputs):
    """The output and gradients of all inputs and parameters."""
    given = [x.detach().clone().requires_grad_() for x in inputs]
    out = call(*given)
    wanted = [*given, *module.parameters()]
    return [out, *torch.autograd.grad(out, wanted, drawn(*out.shape, seed=2).to(out.dtype))]


def compare(found, expected):
    """f32 against f64: a few units of the largest element of all gradients, some of which are sums of
    elements that cancel."""
    assert len(found) == len(expected)
    for part in (slice(0, 1), slice(1, None)):
        most = max(x.abs().max().item() for x in expected[part])
        for got, right in zip(found[part], expected[part]):
            error = (got.double() - right).abs().max().item()
            assert error <= 3e-6 * most, f"off by {error}, the largest element is {most}"


def both(ours, theirs, inputs, our_options, their_options):
    """Outputs and gradients are those of torch's module in f64."""
    def call(module, options):
        def run(*given):
            out, weights = module(*given, need_weights=False, **options)
            assert weights is None
            return out

        return run

    double = copy.deepcopy(theirs).double()
    expected = results(call(double, their_options), double, [x.double() for x in inputs])
    compare(results(call(ours, our_options), ours, inputs), expected)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 10, "vdim": 6}], ids=["same", "kdim"])
@pytest.mark.parametrize("bias", [True, False])
def test_equal_to_torch(batch_first, sizes, bias):
    options = {"batch_first": batch_first, "bias": bias, **sizes}
    torch.manual_seed(3)
    ours = MultiheadAttention(EMBED, HEADS, **options)
    torch.manual_seed(3)
    theirs = torch.nn.MultiheadAttention(EMBED, HEADS, **options)
    for name, x in theirs.state_dict().items():
        assert torch.equal(x, ours.state_dict()[name]), name
    shaken(theirs)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    turn = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    inputs = [
        turn(drawn(2, TOKENS, size, seed=index))
        for index, size in enumerate((EMBED, sizes.get("kdim", EMBED), sizes.get("vdim", EMBED)))
    ]
    both(ours, theirs, inputs, {}, {})
    both(ours, theirs, inputs, {"is_causal": True}, {"attn_mask": later(TOKENS)})
    holes = torch.zeros(2, TOKENS, dtype=torch.bool)
    holes[0, 30:] = holes[1, :5] = holes[1, 9] = True
    both(ours, theirs, inputs, {"key_padding_mask": holes}, {"key_padding_mask": holes})
    alone = [turn(x)[0] for x in inputs]
    both(ours, theirs, alone, {"key_padding_mask": holes[0]}, {"key_padding_mask": holes[0]})


def later(tokens):
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


def dense(module, x, allowed):
    """Grouped queries, written out; ``allowed`` is ``(…, query, key)``."""
    dim, heads, key_heads = module.head_dim, module.num_heads, module.num_kv_heads
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = module.in_proj_bias.split([w.shape[0] for w in weights])
    q, k, v = (
        (x @ w.T + b).reshape(*x.shape[:2], -1, dim).transpose(1, 2)
        for w, b in zip(weights, biases)
    )
    k, v = (y.repeat_interleave(heads // key_heads, 1) for y in (k, v))
    scores = (q @ k.mT * dim**-0.5).masked_fill(~allowed, -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return module.out_proj(out)


def test_fewer_key_heads():
    layer = shaken(
        MultiheadAttention(EMBED, HEADS, batch_first=True, num_kv_heads=2, pattern="window(5, 2)")
    )
    shapes = {name: tuple(x.shape) for name, x in layer.state_dict().items()}
    assert shapes == {
        "q_proj_weight": (24, 24),
        "k_proj_weight": (12, 24),
        "v_proj_weight": (12, 24),
        "in_proj_bias": (48,),
        "out_proj.weight": (24, 24),
        "out_proj.bias": (24,),
    }
    double, x = copy.deepcopy(layer).double(), drawn(2, TOKENS, EMBED)
    step = torch.arange(TOKENS) - torch.arange(TOKENS)[:, None]
    near = (-5 <= step) & (step <= 2)
    for causal, allowed in ((False, near), (True, near & (step <= 0))):
        expected = results(lambda x: dense(double, x, allowed), double, [x.double()])
        found = results(lambda x: layer(x, x, x, is_causal=causal)[0], layer, [x])
        compare(found, expected)


def test_packed_sequences():
    layer = shaken(MultiheadAttention(EMBED, HEADS, pattern="causal & sinks(2)", batch_first=True))
    x, bounds = drawn(1, TOKENS, EMBED), torch.tensor([0, 20, 20, TOKENS])
    out = layer(x, x, x, cu_seqlens=bounds)[0]
    parts = [x[:, :20], x[:, 20:]]
    alone = torch.cat([layer(part, part, part)[0] for part in parts], 1)
    torch.testing.assert_close(out, alone)


def test_dilated_is_cut_causal():
    dilated = longspan.Dilated([8, 16], [1, 2], also="window(1, 1)", overlap="union")
    layer = shaken(MultiheadAttention(EMBED, HEADS, pattern=dilated, batch_first=True))
    assert layer.causal == longspan.Dilated(
        [8, 16], [1, 2], within="causal", also="window(1, 1)", overlap="union"
    )
    x = drawn(2, TOKENS, EMBED)
    out, causal = layer(x, x, x)[0], layer(x, x, x, is_causal=True)[0]
    changed = x.clone()
    changed[:, 20:] += 1
    again = layer(changed, changed, changed, is_causal=True)[0]
    torch.testing.assert_close(again[:, :20], causal[:, :20])
    assert not torch.allclose(out[:, :20], causal[:, :20], atol=1e-2)


def test_dropout_in_training_alone():
    layer = MultiheadAttention(EMBED, HEADS, dropout=0.5, batch_first=True)
    x = drawn(2, TOKENS, EMBED)
    torch.manual_seed(0)
    assert not torch.allclose(layer(x, x, x)[0], layer(x, x, x)[0])
    layer.eval()
    assert torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])


def test_inside_of_torchs_encoder_layer():
    """Which has a way past the module in evaluation."""
    layer = torch.nn.TransformerEncoderLayer(EMBED, HEADS, 32, dropout=0.0, batch_first=True)
    layer.self_attn = shaken(MultiheadAttention(EMBED, HEADS, batch_first=True, pattern="window(2, 2)"))
    x = drawn(1, TOKENS, EMBED)
    expected = layer(x)
    layer.eval()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"add_bias_kv": True}, "add_bias_kv asks for .*bias_k.*leave it out"),
        ({"add_zero_attn": True}, "add_zero_attn asks for"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3, expected a divisor of num_heads, which is 4"),
        ({"embed_dim": 25}, "embed_dim is 25, expected a multiple of num_heads"),
        ({"dropout": 1.0}, "dropout is 1.0, expected"),
        ({"pattern": "windw(3)"}, "windw"),
        ({"shards": "zigzag"}, "shards is 'zigzag' without a group, expected it left out"),
    ],
    ids=str,
)
def test_what_constructor_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(**{"embed_dim": EMBED, "num_heads": HEADS, **arguments})


def test_layouts_are_refused():
    with pytest.raises(TypeError, match="pattern is a Layout, expected a longspan.Pattern"):
        MultiheadAttention(EMBED, HEADS, pattern=longspan.causal().compile(10))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"need_weights": True}, "need_weights asks for"),
        ({"attn_mask": later(TOKENS)}, "attn_mask asks for .*give what it allows as pattern="),
        ({"average_attn_weights": False}, "average_attn_weights=False asks for"),
        ({"key_padding_mask": torch.zeros(2, TOKENS)}, "key_padding_mask is float32, expected bool"),
        ({"tokens": 40}, "tokens is 40 without a group, expected 37"),
        (
            {
                "key_padding_mask": torch.zeros(2, TOKENS, dtype=torch.bool),
                "cu_seqlens": torch.tensor([0, TOKENS]),
            },
            "key_padding and cu_seqlens: expected one of both",
        ),
    ],
    ids=str,
)
def test_what_calls_refuse(arguments, message):
    layer, x = MultiheadAttention(EMBED, HEADS, batch_first=True), drawn(2, TOKENS, EMBED)
    with pytest.raises(ValueError, match=message):
        layer(x, x, x, **arguments)
    with pytest.raises(ValueError, match="key has 2 axes, expected 3"):
        layer(x, x[0], x)
    with pytest.raises(ValueError, match="sharding: this module has no group"):
        layer.sharding(TOKENS)


@pytest.mark.parametrize("pattern", ["causal", longspan.Dilated([8, 16], [1, 2])], ids=str)
def test_checkpointing_has_the_same_bits(pattern):
    layer = shaken(MultiheadAttention(EMBED, HEADS, 0.3, pattern=pattern, batch_first=True))
    again = copy.deepcopy(layer)
    again.checkpoint = True
    x, found = drawn(2, TOKENS, EMBED), []
    for module in (layer, again):
        torch.manual_seed(5)
        found.append(results(lambda x: module(x, x, x)[0], module, [x]))
    assert all(torch.equal(*pair) for pair in zip(*found))


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_group_of_one_rank(alone):
    """Copies share a group; saving one is refused."""
    plain = shaken(MultiheadAttention(EMBED, HEADS, pattern="causal", batch_first=True))
    layer = MultiheadAttention(
        EMBED, HEADS, pattern="causal", batch_first=True, group=dist.group.WORLD, shards="zigzag"
    )
    layer.load_state_dict(plain.state_dict())
    again = copy.deepcopy(layer)
    assert again.context.group is layer.context.group is dist.group.WORLD
    assert again.out_proj.weight is not layer.out_proj.weight
    assert "group of 1 ranks, shards='zigzag'" in repr(again)
    x = drawn(2, TOKENS, EMBED)
    torch.testing.assert_close(again(x, x, x)[0], plain(x, x, x)[0])
    assert again.sharding(TOKENS).positions.tolist() == list(range(TOKENS))
    with pytest.raises(TypeError, match=r"holds a process group.*save its state_dict\(\)"):
        pickle.dumps(layer)
    mask = torch.zeros(2, TOKENS, dtype=torch.bool)
    with pytest.raises(ValueError, match="key_padding beside a pattern: expected None over ranks"):
        layer(x, x, x, mask)
    with pytest.raises(ValueError, match="key has 36 tokens|k has 36 tokens"):
        layer(x, x[:, 1:], x)
    with pytest.raises(ValueError, match="diagonal"):
        MultiheadAttention(EMBED, HEADS, group=dist.group.WORLD, shards="diagonal")
