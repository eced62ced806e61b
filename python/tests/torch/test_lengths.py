"""Padded and packed sequences in LongNet's modules, beside one call per sequence; and checkpointing."""

import copy

import pytest
import torch
import torch.distributed as dist

from longspan.torch import (
    DilatedAttention,
    LongNetEncoder,
    LongNetLM,
    MultiheadDilatedAttention,
    rotary_table,
)

TOKENS = 71
#: Left padding, right padding, both, none, and an entry without tokens.
RANGES = [(20, TOKENS), (0, 33), (5, 60), (0, TOKENS), (7, 7)]
#: One is empty.
BOUNDS = [0, 30, 30, 61, TOKENS]
BRANCHES = ([8, 24, 512], [1, 3, 5])
SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
}
NAMES = {**SIZES, "segment_lengths": BRANCHES[0], "dilation_rates": BRANCHES[1]}


def drawn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shaken(module):
    """Weights that are nowhere 0 or 1, so that one which is left out shows."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.add_(0.3 * drawn(*parameter.shape, seed=index))
    return module


def mask_of(ranges):
    at = torch.arange(TOKENS)
    return torch.stack([(first <= at) & (at < end) for first, end in ranges])


def ways():
    """Arguments of a call, and the batch entry and range of each of its sequences."""
    padded = [(entry, first, end) for entry, (first, end) in enumerate(RANGES) if first < end]
    packed = [(0, first, end) for first, end in zip(BOUNDS, BOUNDS[1:]) if first < end]
    yield "ranges", {"key_padding": torch.tensor(RANGES)}, padded
    yield "mask", {"key_padding": mask_of(RANGES)}, padded
    yield "packed", {"cu_seqlens": torch.tensor(BOUNDS, dtype=torch.int32)}, packed


WAYS = pytest.mark.parametrize("places, sequences", [way[1:] for way in ways()], ids=[w[0] for w in ways()])


def batch_of(places):
    return len(RANGES) if "key_padding" in places else 1


def compare(module, call, x, places, sequences, seed=7):
    """Outputs, and gradients of inputs and parameters, of one call and of one call per sequence."""
    parameters = list(module.parameters())
    x = x.requires_grad_()
    out = call(x, **places)
    held = torch.zeros(out.shape[:2], dtype=torch.bool)
    alone = torch.zeros_like(out)
    for entry, first, end in sequences:
        held[entry, first:end] = True
        alone[entry, first:end] = call(x[entry : entry + 1, first:end])[0]
    weights = drawn(*out.shape, seed=seed) * held.view(*held.shape, *[1] * (out.ndim - 2))
    # Matrix products of other sizes round otherwise, here and in gradients.
    torch.testing.assert_close(out * (weights != 0), alone * (weights != 0), atol=1e-5, rtol=1e-5)
    found, expected = (
        torch.autograd.grad((y * weights).sum(), [x, *parameters], retain_graph=True)
        for y in (out, alone)
    )
    most = max(gradient.abs().max().item() for gradient in expected)
    for got, right in zip(found, expected):
        assert (got - right).abs().max() <= 1e-5 * most
    return out, found[0], held


@WAYS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"also": "window(4, 2)", "overlap": "union"}], ids=str)
def test_dilated_attention(places, sequences, causal, options):
    attention = DilatedAttention(*BRANCHES, **options)
    x = drawn(batch_of(places), TOKENS, 8, 16)

    def call(x, **places):
        q, k, v = x.unflatten(2, (2, 4))[:, :, 0], x[:, :, 4:6], x[:, :, 6:]
        return attention(q, k, v, is_causal=causal, **places)

    out, gradient, held = compare(attention, call, x, places, sequences)
    # Also where a gradient arrives in rows outside.
    assert not out[~held].any() and not gradient[~held].any()
    again = torch.autograd.grad(call(x, **places).sum(), x)[0]
    assert not again[~held].any()


@WAYS
def test_layer(places, sequences):
    layer = shaken(MultiheadDilatedAttention(24, 4, *BRANCHES[::-1]))
    x = drawn(batch_of(places), TOKENS, 24)
    compare(layer, lambda x, **places: layer(x, x, x, True, **places)[0], x, places, sequences)


@WAYS
@pytest.mark.parametrize("causal", [False, True])
def test_encoder(places, sequences, causal):
    model = shaken(LongNetEncoder(**NAMES))
    x = drawn(batch_of(places), TOKENS, 24)
    compare(model, lambda x, **places: model(x, causal, **places), x, places, sequences)


@WAYS
@pytest.mark.parametrize("attention", [{}, {"attention": {"pattern": "window(9, 3)"}}], ids=["dilated", "pattern"])
def test_language_model(places, sequences, attention):
    names = NAMES if not attention else {**SIZES, **attention}
    model = shaken(LongNetLM(**names, positions={"rotary": {"base": 20.0}}))
    ids = torch.randint(256, (batch_of(places), TOKENS), generator=torch.Generator().manual_seed(0))
    # Of one-hot vectors, which have gradients.
    one_hot = torch.nn.functional.one_hot(ids, 256).float()

    def call(x, **places):
        y = model.run(x @ model.embed_tokens.weight, True, None, **places)
        return model.output_projection(y)

    compare(model, call, one_hot, places, sequences)
    torch.testing.assert_close(model(ids, **places), call(one_hot, **places))


def test_rows_of_packed_sequences_begin_anew():
    """With absolute positions in place of relative ones, models would be off in the last bits alone: so
    the table itself."""
    from longspan.torch._lengths import places_in_sequences

    bounds = torch.tensor([[0, 3, 3, 7], [0, 5, 7, 7]])
    rows = places_in_sequences(7, None, bounds, torch.device("cpu"))
    assert rows.tolist() == [[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]]
    rows = places_in_sequences(4, torch.tensor([[1, 3], [0, 4]]), None, torch.device("cpu"))
    assert rows.tolist() == [[-1, 0, 1, 2], [0, 1, 2, 3]]
    table = rotary_table(5, 8, first=2)
    assert torch.equal(table[0], rotary_table(7, 8)[0][2:])


def test_compiled():
    torch._dynamo.reset()
    model = shaken(LongNetLM(**{**NAMES, "num_hidden_layers": 1}))
    fast = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (20, 33):
        ids = torch.randint(256, (2, tokens))
        padding = torch.tensor([[4, tokens], [0, tokens - 3]])
        torch.testing.assert_close(fast(ids, key_padding=padding), model(ids, key_padding=padding))
    torch._dynamo.reset()


def test_what_is_refused():
    model, x = LongNetEncoder(**NAMES), drawn(2, TOKENS, 24)
    both = {"key_padding": torch.tensor([[0, 5], [1, 5]]), "cu_seqlens": torch.tensor([0, TOKENS])}
    with pytest.raises(ValueError, match="key_padding and cu_seqlens: expected one of both"):
        model(x, **both)
    holes = mask_of([(0, 5), (1, 9)])
    holes[1, 5] = False
    with pytest.raises(ValueError, match="key_padding has .*batch entry 1, expected one"):
        model(x, key_padding=holes)
    with pytest.raises(ValueError, match="tokens is 70 without a group, expected 71"):
        model(x, tokens=70)
    with pytest.raises(ValueError, match="sharding: this module has no group"):
        model.sharding(TOKENS)
    with pytest.raises(ValueError, match="shards is 'striped' without a group"):
        LongNetLM(**NAMES, shards="striped")
    with pytest.raises(ValueError, match="shards is 'striped' without a group"):
        DilatedAttention(*BRANCHES, shards="striped")


def results(module, call, x):
    torch.manual_seed(3)
    out = call(module, x)
    wanted = [p for p in module.parameters()]
    wanted += [x] if x.requires_grad else []
    return [out, *torch.autograd.grad(out.square().sum(), wanted)]


@pytest.mark.parametrize(
    "make, x, call",
    [
        (lambda: DilatedAttention(*BRANCHES, attention_dropout=0.3), drawn(1, TOKENS, 4, 8),
         lambda m, x: m(x, x, x)),
        (lambda: MultiheadDilatedAttention(24, 4, *BRANCHES[::-1], dropout=0.3), drawn(1, TOKENS, 24),
         lambda m, x: m(x, x, x)[0]),
        (lambda: LongNetEncoder(**NAMES), drawn(1, TOKENS, 24), lambda m, x: m(x, True)),
        (lambda: LongNetLM(**SIZES, attention={"pattern": "window(9, 0)"}), torch.arange(TOKENS)[None],
         lambda m, x: m(x)),
    ],
    ids=["attention", "layer", "encoder", "language model"],
)
def test_checkpointing_has_the_same_bits(make, x, call):
    module = shaken(make())
    again = copy.deepcopy(module)
    again.checkpoint = True
    assert "checkpoint=True" in repr(again) or isinstance(module, MultiheadDilatedAttention)
    x = x.requires_grad_() if x.is_floating_point() else x
    plain, other = results(module, call, x), results(again, call, x)
    assert all(torch.equal(*pair) for pair in zip(plain, other))


def test_checkpointing_keeps_no_activations():
    def saved(checkpoint):
        model, bytes_kept = LongNetEncoder(**NAMES, checkpoint=checkpoint), []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: bytes_kept.append(t.numel() * t.element_size()) or t, lambda t: t
        ):
            model(drawn(1, 500, 24))
        return sum(bytes_kept)

    assert saved(True) < 0.2 * saved(False)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_saved_models_have_no_group(alone, tmp_path):
    options = {"group": dist.group.WORLD, "shards": "zigzag", "checkpoint": True}
    model = shaken(LongNetLM(**NAMES, **options))
    plain = LongNetLM(**NAMES)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model.config == plain.config
    model.save(tmp_path)
    plain = LongNetLM.load(tmp_path)
    assert plain.context is None and not plain.checkpoint
    again = LongNetLM.load(tmp_path, **options)
    assert again.context.shards == "zigzag" and again.checkpoint
    ids = torch.randint(256, (1, TOKENS))
    torch.testing.assert_close(again(ids), plain(ids))
    copied = copy.deepcopy(again)
    assert copied.context is again.context
    torch.testing.assert_close(copied(ids), plain(ids))
    with pytest.raises(TypeError, match=r"save its state_dict\(\)"):
        torch.save(again, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="generate: this model has a group"):
        again.generate(ids, 1)
