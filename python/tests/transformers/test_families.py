"""Families of models give what they give with eager attention: outputs, gradients, padding, generated tokens."""

import pytest
import torch
import transformers
from families import FAMILIES, REFUSED, TABLE, config_of, default_config_of, made, table
from tiny import TOLERANCE, apart, padding, tokens, with_attention

from longspan.transformers import _pattern, _support

# Of GPTBigCode's own module.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")

TOKENS = 37
LENGTHS = [TOKENS, 23, 3]
PROMPT, NEW = 13, 9


def inputs(family, side):
    """A batch, and the rows that are compared."""
    if family.kind == "vision":
        pixels = torch.randn((2, 3, 48, 48), generator=torch.Generator().manual_seed(5))
        return {"pixel_values": pixels}, None
    ids = tokens(len(LENGTHS), TOKENS)
    held = torch.ones_like(ids) if side == "none" else padding(side, LENGTHS, TOKENS)
    given = {"input_ids": ids * held}
    if side != "none":
        given["attention_mask"] = held
    if family.kind == "encoder-decoder":
        given["decoder_input_ids"] = tokens(len(LENGTHS), 21, seed=7)
        return given, None
    return given, held.bool()


def weighted(model, family, side):
    """Outputs, and each of them times a weight: the terms of the loss."""
    given, held = inputs(family, side)
    model.zero_grad()
    out = model(**given)
    out = out.logits if "logits" in out else out.last_hidden_state
    out = out if held is None else out[held]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    return out, out * weights


def run(model, family, side):
    out, terms = weighted(model, family, side)
    terms.sum().backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return out.detach(), gradients


def gross(model, family, side, name):
    """What tokens add to the gradient of a single number, without their signs."""
    _, terms = weighted(model, family, side)
    parameter = model.get_parameter(name)
    parts = [torch.autograd.grad(part.sum(), parameter, retain_graph=True) for part in terms.flatten(0, -2)]
    return float(sum(part.abs() for (part,) in parts))


def cases(*checks):
    return [(title, check) for title, family in FAMILIES.items() for check in family.checks if check in checks]


@pytest.mark.parametrize("title, check", cases("outputs", "left", "right"))
def test_outputs_and_gradients(title, check, monkeypatch):
    family = FAMILIES[title]
    side = "none" if check == "outputs" else check
    layers = seen_layers(monkeypatch)
    expected, expected_gradients = with_attention(made(family), "eager", lambda m: run(m, family, side))
    assert not layers
    got, gradients = with_attention(made(family), "longspan", lambda m: run(m, family, side))
    assert apart(got, expected) < TOLERANCE
    assert gradients.keys() == expected_gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for name, gradient in gradients.items():
        # Gradients of some biases are 0 but for rounding.
        if float(expected_gradients[name].abs().max()) > 1e-5 * largest:
            eager = expected_gradients[name]
            size = float(eager.abs().max())
            if eager.numel() == 1:
                # No other number of the tensor says how large the terms are, which may cancel.
                size = with_attention(made(family), "eager", lambda m, name=name: gross(m, family, side, name))
            assert float((gradient - eager).abs().max()) < TOLERANCE * size, name
    # Those that ``set_pattern`` finds are those that call attention.
    assert set(layers) == {module for module in made(family).modules() if _support.calls_interface(type(module))}


def seen_layers(monkeypatch):
    """The layers that call attention from now on."""
    layers, real = [], _pattern.of_layer

    def of_layer(module, registered):
        layers.append(module)
        return real(module, registered)

    monkeypatch.setattr(_pattern, "of_layer", of_layer)
    return layers


def generated(model, family, cache):
    ids = tokens(len(LENGTHS), PROMPT)
    held = padding("left" if "left" in family.padding else "right", [PROMPT, 9, 2], PROMPT)
    if "left" not in family.padding:
        held = torch.ones_like(held)
    options = {"cache_implementation": "static"} if cache == "static" else {}
    if cache == "dynamic" and family.sliding:
        # One that keeps every key, though layers have windows.
        options = {"past_key_values": transformers.DynamicCache()}
    out = model.generate(
        input_ids=ids * held,
        attention_mask=held,
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return out.sequences[:, -NEW:], torch.stack(out.logits, 1), out.past_key_values


@pytest.mark.parametrize("title, check", cases("dynamic", "static", "sliding"))
def test_generate(title, check):
    family = FAMILIES[title]
    expected, expected_logits, _ = with_attention(made(family), "eager", lambda m: generated(m, family, check))
    got, logits, cache = with_attention(made(family), "longspan", lambda m: generated(m, family, check))
    assert len(expected.unique()) > NEW // 2, "a model that repeats itself shows little"
    assert torch.equal(got, expected)
    assert apart(logits, expected_logits) < TOLERANCE
    if check == "static":
        assert isinstance(getattr(cache, "self_attention_cache", cache), transformers.StaticCache)
    if check == "sliding":
        assert any(layer.is_sliding and layer.keys.shape[2] < PROMPT + NEW - 1 for layer in cache.layers)


def loss_of(model, given):
    """Of tokens that say the one before them, or of hidden states with a target each."""
    out = model(**given)
    if "logits" in out:
        labels = given.get("decoder_input_ids", given["input_ids"]).roll(1, 1)
        return torch.nn.functional.cross_entropy(out.logits.mT, labels)
    target = torch.randn(out.last_hidden_state.shape, generator=torch.Generator().manual_seed(5))
    return torch.nn.functional.mse_loss(out.last_hidden_state, target)


@pytest.mark.parametrize("title, check", cases("training"))
def test_training(title, check):
    """With the dropouts of the default configuration."""
    family = FAMILIES[title]
    torch.manual_seed(11)
    kind = getattr(transformers, family.model)
    model = kind._from_config(default_config_of(family), attn_implementation="longspan").train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    given, _ = inputs(family, "right")
    losses = []
    for _ in range(8):
        loss = loss_of(model, given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)
    assert losses[-1] < 0.95 * losses[0]
    if "dynamic" in family.checks:
        new, logits, _ = generated(model.eval(), family, "dynamic")
        assert new.shape == (len(LENGTHS), NEW) and logits.isfinite().all()


@pytest.mark.parametrize("title", REFUSED)
def test_refused(title):
    family = REFUSED[title]
    kind = getattr(transformers, family.model)
    model = kind._from_config(config_of(family), attn_implementation="longspan").eval()
    given = {"input_ids": tokens(2, 9)}
    if family.kind == "encoder-decoder":
        given["decoder_input_ids"] = tokens(2, 7)
    with pytest.raises((NotImplementedError, AttributeError), match=family.message):
        model(**given)


def test_compiled():
    """EmbeddingGemma's own mask functions are read while a graph is made."""
    torch._dynamo.reset()
    model = made(FAMILIES["EmbeddingGemma"])
    model.set_attn_implementation("longspan")
    given = {"input_ids": tokens(2, TOKENS), "attention_mask": padding("left", [TOKENS, 23], TOKENS)}
    with torch.no_grad():
        expected = model(**given).last_hidden_state
        # Without a C++ compiler.
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(**given).last_hidden_state
    assert apart(got, expected) < TOLERANCE


def test_enough_families():
    assert len(FAMILIES) >= 50


def test_table():
    """``python families.py`` was run after the last change."""
    written = TABLE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}." not in written:
        pytest.skip("the table is of another release of transformers")
    assert written == table()
