"""LongNet's layer and models against their arithmetic written out in f64."""

import dataclasses
import json
import math
import pathlib
import re

import longnet
import pytest
import torch
from safetensors import safe_open

from longspan.torch import (
    LongNetConfig,
    LongNetEncoder,
    LongNetLM,
    MultiheadDilatedAttention,
    rotary_table,
)

TINY = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "segment_lengths": [8, 16],
    "dilation_rates": [1, 3],
}
#: The same without branches.
SIZES = {name: TINY[name] for name in TINY if name not in ("segment_lengths", "dilation_rates")}
WEIGHTS = pathlib.Path(__file__).parents[3] / "docs" / "longnet-weights.md"


def shaken(module, seed=0):
    """Weights that are nowhere 0 or 1, so that one which is left out shows."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def doubled(module):
    return {
        name: x.detach().double().requires_grad_() for name, x in module.state_dict().items()
    }


def close(got, expected, name, beside=None):
    """f32 against f64: a few units of the largest number, there or ``beside`` it."""
    most = max(x.abs().max().item() for x in (expected, expected if beside is None else beside))
    error = (got.double() - expected).abs().max().item()
    assert error <= 3e-5 * most, f"{name}: off by {error}, the largest number is {most}"


@pytest.mark.parametrize("positions", [{"rotary": {"base": 100.0}}, "none"], ids=str)
def test_language_model(positions):
    model = shaken(LongNetLM(**TINY, vocab_size=50, positions=positions))
    ids = torch.randint(50, (2, 37))
    weights = doubled(model)
    logits = longnet.model(weights, model.config, ids=ids)
    found = model(ids)
    close(found, logits, "logits")
    arrived = torch.randn_like(found)
    found.backward(arrived)
    gradients = torch.autograd.grad(logits, list(weights.values()), arrived.double())
    gradients = dict(zip(weights, gradients))
    for name, parameter in model.named_parameters():
        # That of a bias of keys is 0 without positions, a sum of the terms that its weight has.
        beside = gradients[name.replace(".bias", ".weight")]
        close(parameter.grad, gradients[name], name, beside)


def test_encoder():
    model = shaken(LongNetEncoder(**TINY))
    x = torch.randn(2, 37, 24)
    close(model(x), longnet.model(doubled(model), model.config, x=x.double()), "out")
    causal = model(x, is_causal=True)
    assert causal.isfinite().all() and not torch.allclose(model(x), causal)


def test_names_and_shapes_are_those_of_the_page():
    config = LongNetConfig.of(**TINY, vocab_size=50)
    sizes = {"h": 24, "f": 40, "v": 50}
    tables = {LongNetEncoder: {}, LongNetLM: {}}
    for line in WEIGHTS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 4 or not cells[0].startswith("`") or "[" not in cells[1]:
            continue
        names, shapes = (re.findall(r"`(.*?)`", cell) for cell in cells[:2])
        if len(names) == 2:
            names[1] = names[0].removesuffix(".weight") + names[1]
        shapes = [tuple(sizes[s] for s in re.findall(r"[hfv]", shape)) for shape in shapes]
        shapes = shapes * (len(names) // len(shapes))
        for cls, cell in zip(tables, cells[2:]):
            for name, shape in zip(names, shapes):
                for layer in range(2) if "{i}" in name and cell else [0] if cell else []:
                    tables[cls][name.replace("{i}", str(layer))] = shape
    for cls, expected in tables.items():
        found = {name: tuple(x.shape) for name, x in cls(config).state_dict().items()}
        assert found == expected
    text = WEIGHTS.read_text()
    example = json.loads(re.search(r"```json\n(.*?)```", text, re.DOTALL)[1])
    assert example == dataclasses.asdict(LongNetConfig())


@pytest.mark.parametrize("cls", [LongNetEncoder, LongNetLM])
def test_save_and_load(cls, tmp_path):
    model = shaken(cls(**TINY))
    model.save(tmp_path / "model")
    again = cls.load(tmp_path / "model")
    assert again.config == model.config
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, x in again.state_dict().items():
        assert torch.equal(x, model.state_dict()[name]), name
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(model.state_dict())


def test_defaults_fill_what_file_leaves_out(tmp_path):
    model = LongNetLM(num_hidden_layers=1, hidden_size=24, intermediate_size=8)
    model.save(tmp_path)
    small = {"num_hidden_layers": 1, "hidden_size": 24, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(small))
    assert LongNetLM.load(tmp_path).config == model.config
    (tmp_path / "config.json").write_text(json.dumps({**small, "dropout": 0.1}))
    with pytest.raises(ValueError, match="dropout: LongNet has no such setting"):
        LongNetLM.load(tmp_path)


@pytest.mark.parametrize(
    "names, message",
    [
        ({"hidden_size": 25}, "hidden_size is 25, expected a multiple of num_attention_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected 1 or more"),
        ({"num_attention_heads": 8, "hidden_size": 24}, "is 3, expected an even number"),
        ({"positions": "xpos"}, "positions is 'xpos', expected"),
        ({"positions": {"rotary": {"theta": 1}}}, "positions is"),
        ({"attention": {"sparse": 1}, "segment_lengths": None, "dilation_rates": None}, "attention is"),
        ({"attention": {"pattern": "full"}}, "attention and segment_lengths, dilation_rates"),
        ({"segment_length": [8, 16]}, "expected one of the two names"),
        ({"segment_lengths": None}, "segment_lengths is missing"),
        ({"heads": 3}, "heads: LongNet has no such setting"),
    ],
    ids=str,
)
def test_what_configuration_refuses(names, message):
    with pytest.raises(ValueError, match=message):
        LongNetLM(**{**TINY, **names})
    with pytest.raises(ValueError, match="config and hidden_size: expected one of both"):
        LongNetLM(LongNetConfig(), hidden_size=3)


def test_branches_and_window_in_configuration():
    inner = {"segment_lengths": [8, 16], "dilation_rates": [1, 2], "also": "window(3, 0)"}
    earlier = LongNetConfig(attention={"dilated": inner | {"counting": "once"}}).make_attention()
    inner["overlap"] = "union"
    made = LongNetConfig(attention={"dilated": inner}).make_attention()
    assert made.branches == ((8, 16), (1, 2), "full", "window(3, 0)", "union") == earlier.branches
    assert made.causal == ((8, 16), (1, 2), "causal", "window(3, 0)", "union")


def test_the_other_spelling():
    lists = {"segment_length": TINY["segment_lengths"], "dilated_ratio": TINY["dilation_rates"]}
    assert LongNetEncoder(**SIZES, **lists).config == LongNetEncoder(**TINY).config


@pytest.mark.parametrize(
    "pattern, wider",
    [
        ("full", [(1000, 1)]),
        ("heads([full, window(100, 100), dilated(1000, 1)])", [(1000, 1)]),
    ],
)
def test_patterns_in_place_of_branches(pattern, wider):
    """Patterns that see everything are one branch that does; the model cuts all with causal."""
    model = shaken(LongNetLM(**SIZES, attention={"pattern": pattern}))
    segments, rates = zip(*wider)
    other = LongNetLM(**SIZES, segment_lengths=segments, dilation_rates=rates)
    other.load_state_dict(model.state_dict())
    ids = torch.randint(256, (1, 37))
    torch.testing.assert_close(model(ids), other(ids))


@pytest.mark.parametrize("bias, layer_norm", [(True, True), (False, False)])
def test_layer(bias, layer_norm):
    layer = MultiheadDilatedAttention(
        24, 3, [1, 3], [8, 16], bias=bias, layer_norm=layer_norm, layer_norm_eps=0.1
    )
    shaken(layer)
    names = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight"}
    names |= {f"{p}_proj.bias" for p in ("q", "k", "v", "out")} if bias else set()
    names |= {"inner_attn_ln.weight", "inner_attn_ln.bias"} if layer_norm else set()
    assert set(layer.state_dict()) == names
    q, k, v = torch.randn(3, 2, 37, 24)
    out, nothing = layer(q, k, v, is_causal=True)
    assert nothing is None
    w = doubled(layer)
    linear = torch.nn.functional.linear
    parts = [
        linear(x.double(), w[f"{p}_proj.weight"], w.get(f"{p}_proj.bias")).reshape(2, 37, 3, 8)
        for p, x in zip("qkv", (q, k, v))
    ]
    allowed = torch.ones(37, 37, dtype=bool).tril()
    a = longnet.equations(*parts, [(8, 1), (16, 3)], allowed)[0].flatten(2)
    if layer_norm:
        a = torch.nn.functional.layer_norm(
            a, (24,), w["inner_attn_ln.weight"], w["inner_attn_ln.bias"], 0.1
        )
    close(out, linear(a, w["out_proj.weight"], w.get("out_proj.bias")), "out")


def test_what_layer_refuses():
    with pytest.raises(ValueError, match="dropout is -0.1, expected a number from 0"):
        MultiheadDilatedAttention(24, 3, [1], [8], dropout=-0.1)
    with pytest.raises(ValueError, match="embed_dim is 25, expected a multiple of num_heads"):
        MultiheadDilatedAttention(25, 3, [1], [8])
    with pytest.raises(ValueError, match="op is 1"):
        MultiheadDilatedAttention(24, 3, [1], [8], op=1)
    with pytest.raises(ValueError, match="dim is 7, expected an even number"):
        rotary_table(10, 7)


def test_beginnings():
    torch.manual_seed(0)
    model = LongNetLM(hidden_size=256, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512)
    gamma = math.sqrt(math.log(6))
    for name, x in model.named_parameters():
        kind = name.split(".")[-2]
        if name.endswith("bias"):
            assert (x == 0).all(), name
        elif x.ndim == 1:
            assert (x == 1).all(), name
        else:
            deviation = {"embed_tokens": 1 / 16, "output_projection": 1 / 16}.get(
                kind, math.sqrt(2 / sum(x.shape)) * (1 if kind in ("q_proj", "k_proj") else gamma)
            )
            assert abs(x.std().item() / deviation - 1) < 0.02, name
            assert abs(x.mean().item()) < 0.02 * deviation * 10, name


def test_half_types_and_autocast():
    model = shaken(LongNetLM(**TINY))
    ids = torch.randint(256, (1, 37))
    expected = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1 * expected.abs().max().item())
    half = model.to(torch.bfloat16)(ids)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.1, atol=0.1 * expected.abs().max().item())


def test_compile():
    torch._dynamo.reset()
    model = LongNetLM(**TINY)
    fast = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (20, 33, 41):
        ids = torch.randint(256, (2, tokens))
        torch.testing.assert_close(fast(ids), model(ids))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "attention", [{}, {"attention": {"pattern": "window(9, 3) | sinks(2)"}}], ids=["dilated", "pattern"]
)
@pytest.mark.parametrize("positions", [{"rotary": {"base": 100.0}}, "none"], ids=str)
def test_generation_is_the_model_over_all_tokens(attention, positions):
    sizes = TINY if not attention else SIZES
    model = shaken(LongNetLM(**sizes, **attention, vocab_size=50, positions=positions))
    ids = torch.randint(50, (2, 21))
    columns = []
    found = model.generate(ids, 30, callback=columns.append)
    assert torch.equal(found[:, :21], ids) and torch.equal(found[:, 21:], torch.cat(columns, 1))
    logits = model(found)
    chosen = logits[:, 20:-1].gather(-1, found[:, 21:, None])[..., 0]
    # The most likely one, or one as likely but for rounding.
    assert (logits[:, 20:-1].max(-1).values - chosen).max() < 1e-4

    again = [
        model.generate(ids, 10, temperature=0.8, top_k=5, generator=torch.Generator().manual_seed(3))
        for _ in range(2)
    ]
    assert torch.equal(*again)
    logits = model(again[0])[:, 20:-1]
    least = logits.topk(5).values[..., -1]
    assert (logits.gather(-1, again[0][:, 21:, None])[..., 0] >= least - 1e-4).all()
    assert torch.equal(model.generate(ids, 0), ids)


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        ((1, 0), {}, "ids have shape"),
        ((3,), {}, "ids have shape"),
        ((1, 3), {"max_new_tokens": -1}, "max_new_tokens is -1"),
        ((1, 3), {"temperature": -0.5}, "temperature is -0.5"),
        ((1, 3), {"temperature": 1.0, "top_k": 0}, "top_k is 0"),
        ((1, 3), {"top_k": 5}, "give a temperature above 0"),
    ],
)
def test_generation_refuses(shape, arguments, message):
    model = LongNetLM(**TINY, vocab_size=50)
    with pytest.raises(ValueError, match=message):
        model.generate(torch.zeros(shape, dtype=torch.long), **{"max_new_tokens": 2, **arguments})
