"""What can't be done is an error that says what, and what to do instead."""

import pytest
import torch
from tiny import MODELS, TOKENS, mistral, tokens
from transformers import masking_utils as made

import longspan.transformers
from longspan.transformers import _read, _register
from longspan.transformers._attention import attention
from longspan.transformers._mask import mask

PLACES = {"batch_size": 2, "q_length": 9, "kv_length": 9}


def ready(make, **options):
    model = make(**options)
    model.set_attn_implementation("longspan")
    return model


def on_even_keys(batch, head, query, key):
    return key % 2 == 0


@pytest.mark.parametrize(
    "function, named",
    [
        (on_even_keys, "test_refusals.on_even_keys"),
        (made.and_masks(made.causal_mask_function, on_even_keys), "test_refusals.on_even_keys"),
        (made.or_masks(made.causal_mask_function, on_even_keys), "test_refusals.on_even_keys"),
        (made.blockwise_overlay(torch.zeros((2, 9))), "blockwise_overlay.<locals>.inner_mask"),
        (made.add_offsets_to_mask_function(made.causal_mask_function, 1, 1), "add_offsets_to_mask"),
        (lambda *at: at[3] <= at[2], "<lambda>"),
        (lambda *at: torch.tensor(bool(at[3] <= at[2]), dtype=torch.bool), "<lambda>"),
        (lambda *at: torch.tensor(False, dtype=torch.bool), "<lambda>"),
        (print, "builtins.print"),
    ],
)
def test_unknown_functions(function, named):
    with pytest.raises(NotImplementedError, match=named.replace(".", r"\.")) as error:
        mask(mask_function=function, **PLACES)
    assert 'attn_implementation="sdpa"' in str(error.value)


def test_function_of_the_same_name():
    """A name proves nothing."""

    def causal_mask_function(batch, head, query, key):
        return key < query

    causal_mask_function.__module__ = "transformers.masking_utils"
    causal_mask_function.__qualname__ = "causal_mask_function"
    with pytest.raises(NotImplementedError, match="doesn't know"):
        mask(mask_function=causal_mask_function, **PLACES)


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {
                "mask_function": made.or_masks(
                    made.causal_mask_function,
                    made.packed_sequence_mask_function(torch.zeros((2, 9))),
                )
            },
            "inside or_masks",
        ),
        (
            {
                "mask_function": made.packed_sequence_mask_function(
                    torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2, 2]] * 2)
                )
            },
            "3 sequences in 4 ranges",
        ),
        (
            {
                "mask_function": made.packed_sequence_mask_function(torch.zeros((2, 9))),
                "q_offset": 4,
            },
            "9 queries from 4 on",
        ),
        (
            {
                "mask_function": made.packed_sequence_mask_function(torch.zeros((2, 9))),
                "attention_mask": torch.ones((2, 9)),
            },
            "together with padding",
        ),
        (
            {
                "mask_function": made.and_masks(
                    made.chunked_overlay(4, torch.zeros(2)),
                    made.packed_sequence_mask_function(torch.zeros((2, 9))),
                )
            },
            r"together with dilated\(4, 1\)",
        ),
        (
            {"mask_function": made.chunked_overlay(4, torch.tensor([0, 3]))},
            r"\[0, 3\] tokens of padding",
        ),
        ({"mask_function": made.sliding_window_overlay(-1)}, "a window of -1 tokens"),
        (
            {"mask_function": made.causal_mask_function, "attention_mask": torch.ones((3, 9))},
            r"shape \(3, 9\), expected \(2, positions\)",
        ),
        ({"mask_function": made.causal_mask_function, "device": "meta"}, "expected the CPU"),
        ({}, "mask_function is missing"),
    ],
)
def test_masks(given, message):
    with pytest.raises((NotImplementedError, ValueError, TypeError), match=message):
        mask(**PLACES, **given)


@pytest.mark.parametrize("name", MODELS)
def test_masks_of_every_pair(name):
    """A user's own mask goes past the one that is registered."""
    model = ready(MODELS[name])
    pairs = torch.ones((2, 1, TOKENS, TOKENS), dtype=torch.bool).tril()
    with pytest.raises(NotImplementedError, match="no mask of every pair"):
        model(input_ids=tokens(2), attention_mask=pairs)


def test_masks_of_every_pair_by_layer():
    model = ready(MODELS["gemma2"])
    pairs = torch.zeros((2, 1, TOKENS, TOKENS))
    with pytest.raises(NotImplementedError, match=r"tensor of shape \(2, 1, 67, 67\)"):
        model(input_ids=tokens(2), attention_mask=dict.fromkeys(model.config.layer_types, pairs))


@pytest.mark.parametrize("name", MODELS)
def test_output_attentions(name):
    model = ready(MODELS[name])
    with pytest.raises((NotImplementedError, ValueError), match="output_attentions"):
        model(input_ids=tokens(2), output_attentions=True)
    with pytest.raises((NotImplementedError, ValueError), match="output_attentions"):
        model.config.output_attentions = True
    model.config._output_attentions = True
    with pytest.raises((NotImplementedError, ValueError), match="output_attentions"):
        model(input_ids=tokens(2))


def direct(found, tokens_q=9, tokens_k=9, module=None, **options):
    """A call as a layer makes it."""
    q = torch.randn(2, 4, tokens_q, 16)
    k = torch.randn(2, 2, tokens_k, 16)
    return attention(module or torch.nn.Module(), q, k, k, found, scaling=0.25, **options)


CAUSAL = {"mask_function": made.causal_mask_function, **PLACES}


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("position_bias", torch.zeros((1, 4, 9, 9)), "bias of every pair"),
        ("seq_idx", torch.zeros((2, 9)), "position_ids"),
        ("cache", object(), "paged"),
        ("head_mask", torch.ones(4), "head_mask is given, but longspan has no meaning for it"),
        ("output_attentions", True, "never made"),
    ],
)
def test_arguments_of_layers(name, value, message):
    direct(mask(**CAUSAL), **{name: None})
    with pytest.raises(NotImplementedError, match=message):
        direct(mask(**CAUSAL), **{name: value})


def test_masks_of_other_layers():
    with pytest.raises(ValueError, match="9 queries and 11 keys"):
        direct(mask(**CAUSAL), tokens_k=11)
    with pytest.raises(ValueError, match="sliding_window=4 and a mask with none"):
        direct(mask(**CAUSAL), sliding_window=4)
    window = {**CAUSAL, "mask_function": made.sliding_window_causal_mask_function(5)}
    direct(mask(**window), sliding_window=5)
    with pytest.raises(ValueError, match="sliding_window=4 and a mask with 5"):
        direct(mask(**window), sliding_window=4)
    # Made for layers that a config has none of (Qwen2 MoE), so it is refused when a layer uses it.
    with pytest.raises(ValueError, match="a window of 0 tokens"):
        direct(mask(**{**CAUSAL, "mask_function": made.sliding_window_causal_mask_function(0)}))


def test_no_mask():
    """Only a layer that says that it isn't causal sees everything without one."""
    module = torch.nn.Module()
    with pytest.raises(NotImplementedError, match="is_causal=None and no mask"):
        direct(None, module=module)
    module.is_causal = True
    with pytest.raises(NotImplementedError, match="is_causal=True and no mask"):
        direct(None, module=module)
    whole = mask(**{**CAUSAL, "mask_function": made.bidirectional_mask_function})
    torch.manual_seed(0)
    expected, _ = direct(whole)
    torch.manual_seed(0)
    module.is_causal = False
    assert torch.equal(direct(None, module=module)[0], expected)


@pytest.mark.parametrize("name", ["", "a/b", 3, "paged|longspan", "sdpa", "flash_attention_9"])
def test_names(name):
    with pytest.raises(ValueError, match="expected (a|another) word"):
        longspan.transformers.register(name)


def test_release_with_other_meanings(monkeypatch):
    """A window that is one token wider under the same name is found when registering."""

    def sliding_window_overlay(sliding_window):
        def inner_mask(batch, head, query, key):
            return key >= query - sliding_window

        return inner_mask

    monkeypatch.setattr(made, "sliding_window_overlay", sliding_window_overlay)
    monkeypatch.setattr(_read, "_READERS", _read._readers())
    with pytest.raises(RuntimeError, match="shows key 0 to query 3"):
        _register.register()
