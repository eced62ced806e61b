"""Patterns that can't be honored are errors that name the value and the remedy."""

import pytest
import torch
import transformers
from families import FAMILIES, made
from tiny import MODELS, tokens

import longspan
import longspan.torch
import longspan.transformers
from longspan.transformers._attention import attention
from longspan.transformers._pattern import Registered

TEXT = "window(5, 0)"


@pytest.mark.parametrize(
    "pattern, error, message",
    [
        ("windw(3, 0)", ValueError, "expected a pattern, found `windw`"),
        (3, TypeError, "pattern is a int, expected a longspan.Pattern, its text, None, or a function"),
        (longspan.causal().compile(8), TypeError, "pattern is a Layout"),
        (longspan.Dilated([8], [1]), TypeError, "pattern is a Dilated"),
        (longspan.Pattern, TypeError, "pattern is a type"),
    ],
)
def test_patterns(pattern, error, message):
    with pytest.raises(error, match=message):
        longspan.transformers.register("longspan_refused", pattern)
    with pytest.raises(error, match=message):
        longspan.transformers.set_pattern(torch.nn.Module(), pattern)
    assert "longspan_refused" not in transformers.AttentionInterface._global_mapping


def llama():
    model = MODELS["llama"]()
    model.set_attn_implementation("longspan")
    return model


def test_what_functions_return():
    with pytest.raises(TypeError, match="returned a int for layer 0, expected a longspan.Pattern, its text, or None"):
        longspan.transformers.set_pattern(llama(), lambda layer_idx, layer_type, config: 3)
    with pytest.raises(ValueError, match="found `nothing`"):
        longspan.transformers.set_pattern(llama(), lambda layer_idx, layer_type, config: "nothing")


def test_functions_and_layers_without_index():
    model = made(FAMILIES["ViT"])
    model.set_attn_implementation("longspan")
    with pytest.raises(ValueError, match="pattern is a function, and ViT.* has no layer_idx to call it with"):
        longspan.transformers.set_pattern(model, lambda *layer: TEXT)
    longspan.transformers.register("longspan_by_layer", lambda *layer: TEXT)
    with pytest.raises(ValueError, match="pattern is a function, and ViT.* has no layer_idx to call it with"):
        model.set_attn_implementation("longspan_by_layer")
    assert model.config._attn_implementation == "longspan"
    model.config._attn_implementation = "longspan_by_layer"
    with pytest.raises(ValueError, match="has no layer_idx"):
        model(pixel_values=torch.zeros((1, 3, 48, 48)))
    model.set_attn_implementation("longspan")


def test_heads():
    model = llama()
    longspan.transformers.set_pattern(model, "heads([full, window(3, 0)])")
    with pytest.raises(ValueError, match="heads: 2 patterns for 4 query heads"):
        model(input_ids=tokens(1, 9))
    longspan.transformers.set_pattern(model, "heads([full, full, full, window(3, 0)])")
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with pytest.raises(ValueError, match="cu_seqlens: expected a pattern that is the same for all heads"):
        model(input_ids=tokens(1, 9), position_ids=positions, use_cache=False)


def test_cross_attention():
    model = made(FAMILIES["BART"])
    model.set_attn_implementation("longspan")
    with pytest.raises(NotImplementedError, match="BartAttention, which is cross-attention.*get_encoder"):
        longspan.transformers.set_pattern(model, TEXT)
    longspan.transformers.register("longspan_text", TEXT)
    with pytest.raises(NotImplementedError, match=r"the pattern window\(5, 0\) for BartAttention, which is cross"):
        model.set_attn_implementation("longspan_text")
    assert model.config._attn_implementation == "longspan"
    model.config._attn_implementation = "longspan_text"
    with pytest.raises(NotImplementedError, match="which is cross-attention"):
        model(input_ids=tokens(1, 9), decoder_input_ids=tokens(1, 7))
    model.set_attn_implementation("longspan")


def test_parts_of_encoder_decoders():
    """An encoder and the self-attention of a decoder take patterns; cross-attention is left as it is."""
    model = made(FAMILIES["BART"])
    model.set_attn_implementation("longspan")
    given = {"input_ids": tokens(1, 19), "decoder_input_ids": tokens(1, 17)}
    seen = []

    def pattern(layer_idx, layer_type, config):
        seen.append((layer_idx, layer_type))
        return None if layer_type == "cross_attention" else TEXT

    with torch.no_grad():
        plain = model(**given)
        longspan.transformers.set_pattern(model.get_encoder(), "window(3, 3)")
        encoded = model(**given)
        longspan.transformers.set_pattern(model.get_decoder(), pattern)
        decoded = model(**given)
        longspan.transformers.set_pattern(model, None)
        assert torch.equal(model(**given).logits, plain.logits)
    assert not torch.equal(encoded.encoder_last_hidden_state, plain.encoder_last_hidden_state)
    assert torch.equal(decoded.encoder_last_hidden_state, encoded.encoder_last_hidden_state)
    assert not torch.allclose(decoded.logits, encoded.logits)
    assert seen == [(0, None), (0, "cross_attention"), (1, None), (1, "cross_attention")]


def test_queries_without_positions():
    """A layer without a mask, whose queries aren't its keys."""
    module = torch.nn.Module()
    module.is_causal = False
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 4, 9, 16)
    got, _ = attention(module, k, k, k, None, registered=Registered(TEXT, ""))
    assert torch.equal(got, longspan.torch.attention(k, k, k, TEXT).transpose(1, 2))
    with pytest.raises(NotImplementedError, match="which has 3 queries, 9 keys and no mask"):
        attention(module, q, k, k, None, registered=Registered(TEXT, ""))
