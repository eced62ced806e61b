"""``register(selector=…)``: layers choose key blocks by content."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import longspan
import longspan.transformers

TOKENS = 1300


def _model(implementation, **config):
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        attn_implementation=implementation,
        **config,
    )
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        # Scores that differ, so that some blocks hold most of the mass.
        layer.self_attn.q_proj.weight.data.mul_(12)
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 101, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def _register(name, **options):
    selector = longspan.BlockSelector("full", always="window(64, 0) | sinks(1)", **options)
    longspan.transformers.register(name, selector=selector)


@torch.no_grad()
def test_everything_is_dense(ids):
    _register("adaptive_all", mass=1.0)
    expected = _model("sdpa")(ids).logits
    torch.testing.assert_close(_model("adaptive_all")(ids).logits, expected, rtol=1e-3, atol=1e-4)
    held = torch.ones_like(ids)
    held[1, :200] = 0
    expected = _model("sdpa")(ids, attention_mask=held).logits[1, 200:]
    found = _model("adaptive_all")(ids, attention_mask=held).logits[1, 200:]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_more_mass_is_nearer(ids):
    distances = []
    with torch.no_grad():
        expected = _model("sdpa")(ids).logits.log_softmax(-1)
        for mass in (0.3, 0.7, 0.95):
            name = f"adaptive_{int(100 * mass)}"
            _register(name, mass=mass)
            found = _model(name)(ids).logits.log_softmax(-1)
            distances.append((expected.exp() * (expected - found)).sum(-1).mean().item())
    assert distances[0] > distances[1] > distances[2], distances


def test_gradients_and_generation(ids):
    _register("adaptive_some", mass=0.8)
    model = _model("adaptive_some")
    model(ids, labels=ids).loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    with torch.no_grad():
        # A step of decoding attends to all that the mask allows, over the keys of the same prefill.
        made = model.generate(ids[:1], max_new_tokens=4, do_sample=False)
        assert made.shape == (1, TOKENS + 4)
        # A prompt in chunks has the same choice.
        whole = model(ids[:1], use_cache=True)
        cache = None
        parts = []
        for part in ids[:1].split(512, 1):
            output = model(part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole.logits, rtol=1e-3, atol=1e-4)


def test_compiled(ids):
    _register("adaptive_compiled", mass=0.8)
    model = _model("adaptive_compiled")
    held = torch.ones_like(ids)
    held[1, :200] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=held).logits[1, 200:]
        found = torch.compile(model, backend="eager")(ids, attention_mask=held).logits[1, 200:]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_refusals():
    with pytest.raises(TypeError, match="expected a longspan.BlockSelector"):
        longspan.transformers.register("adaptive_wrong", selector="causal")
    _register("adaptive_capped", mass=0.8)
    query = torch.randn(1, 2, 64, 8)
    mask = longspan.transformers._mask.Mask("causal", None, 1, 64, 64, 0, 0, None, None, None)
    attention = longspan.transformers._attention.attention
    selector = longspan.BlockSelector("full")
    module = torch.nn.Module()
    with pytest.raises(NotImplementedError, match="a selector for a layer with softcap"):
        attention(module, query, query, query, mask, softcap=30.0, selector=selector)
    packed = longspan.transformers._mask.Mask(
        "causal", None, 1, 64, 64, 0, 0, None, (torch.tensor([0, 30, 64]),), None
    )
    with pytest.raises(NotImplementedError, match="a selector with packed sequences"):
        attention(module, query, query, query, packed, selector=selector)
    padding = torch.arange(64)[None] > 9
    held = longspan.transformers._mask.Mask("causal", None, 1, 64, 64, 0, 0, padding, None, None)
    attention(module, query, query, query, held, selector=selector)
    padding[0, 20:30] = False
    with pytest.raises(NotImplementedError, match="more than one range of a row"):
        attention(module, query, query, query, held, selector=selector)
